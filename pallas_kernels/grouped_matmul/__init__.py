# SPDX-License-Identifier: Apache-2.0
"""Rows sorted by expert, each times its expert's matrix; forward and both gradients."""
