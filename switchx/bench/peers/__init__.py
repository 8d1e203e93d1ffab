# SPDX-License-Identifier: Apache-2.0
"""Implementations of others that `switchx bench` measures beside ours."""
