# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled ahead of time for hardware that is not there, and what they need of it."""
