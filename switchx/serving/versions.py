# SPDX-License-Identifier: Apache-2.0
"""Versions of a server's parts: switchx, its commit, JAX and the device."""

import functools
import importlib.metadata

import jax

from switchx.whole_folders import git_commit


@functools.cache
def versions() -> dict[str, str]:
    """The versions of a server's software, as texts."""
    try:
        version = importlib.metadata.version("switchx")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    return {
        "version": version,
        "commit": git_commit(),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }
