# SPDX-License-Identifier: Apache-2.0
"""Rows sorted by expert, each times its expert's int8, int4 or float8 matrix."""
