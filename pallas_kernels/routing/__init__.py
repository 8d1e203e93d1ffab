# SPDX-License-Identifier: Apache-2.0
"""Rows to experts and back by one sort, around the grouped products."""
