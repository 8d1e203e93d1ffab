# SPDX-License-Identifier: Apache-2.0
"""Tilings that were measured to be the best on a device, and where they are kept."""
