# SPDX-License-Identifier: Apache-2.0
"""Devices that are simulated on CPU, for commands that look at meshes."""

import os

FLAG = "--xla_force_host_platform_device_count"


def ask_for(number: int) -> None:
    """So many devices on CPU, unless XLA_FLAGS says how many. JAX reads it at its first use."""
    flags = os.environ.get("XLA_FLAGS", "")
    if FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {FLAG}={number}".strip()
