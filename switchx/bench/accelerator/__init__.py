# SPDX-License-Identifier: Apache-2.0
"""`switchx check accelerator`: what a quarter of an hour on one card can decide."""
