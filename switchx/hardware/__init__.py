# SPDX-License-Identifier: Apache-2.0
"""What accelerators, their memories, links, hosts and disks can do, read from spec files."""
