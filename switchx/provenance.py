# SPDX-License-Identifier: Apache-2.0
"""Where a number, a run or an artifact comes from: the code, the machine, the libraries."""

import os
import pathlib
import subprocess
from typing import Any


def git_commit() -> str:
    """The commit of the checkout this code runs from, or `unknown` outside of one.

    An installed copy may lie in another repository, whose commit says nothing about it: git
    is believed only where it tracks this file.
    """
    here = pathlib.Path(__file__)
    git = ["git", "-C", str(here.parent)]
    is_tracked = [*git, "ls-files", "--error-unmatch", here.name]
    describe = [*git, "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        for command in (is_tracked, describe):
            process = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return process.stdout.strip()


def environment() -> dict[str, Any]:
    """Device, cores, JAX and commit of a measurement, and glibc's tunables, which change it."""
    import jax

    return {
        "device": jax.devices()[0].device_kind,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "jax": jax.__version__,
        "commit": git_commit(),
        "glibc_tunables": os.environ.get("GLIBC_TUNABLES"),
    }
