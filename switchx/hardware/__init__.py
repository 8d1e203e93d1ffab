# SPDX-License-Identifier: Apache-2.0
"""Rates and sizes of accelerators, memories, links, hosts and disks, from spec files."""
