# SPDX-License-Identifier: Apache-2.0
"""Pallas kernels of sparse models, usable without switchx: plain arrays in and out."""
