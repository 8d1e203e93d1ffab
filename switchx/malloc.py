# SPDX-License-Identifier: Apache-2.0
"""Freed memory on a CPU: kept by glibc's malloc for the next array, or given to the system.

By default glibc maps each large array anew and unmaps it once it is freed, so that the kernel
faults in, and zeroes, every page of every array in every step.
"""

import ctypes
import importlib.metadata
import importlib.util
import os

from switchx.fields import require

VARIABLE = "SWITCHX_MALLOC"
# Parameters of mallopt(3), of malloc.h.
_TRIM_THRESHOLD = -1
_TOP_PAD = -2
_MMAP_THRESHOLD = -3
_MMAP_MAX = -4
_ARENA_MAX = -8

# What mallopt(3) reads from the environment; GLIBC_TUNABLES is newer.
_OF_GLIBC = (
    *("MALLOC_ARENA_MAX", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_"),
    *("MALLOC_TOP_PAD_", "MALLOC_TRIM_THRESHOLD_"),
)


def keep_freed_memory() -> str:
    """Has malloc keep what is freed, in one arena; to be called before JAX is first used.

    Nothing changes where an accelerator holds the arrays, where the C library is not glibc,
    where GLIBC_TUNABLES or a variable of mallopt(3) sets malloc, or with SWITCHX_MALLOC=system.

    Returns:
        A sentence that says which it is.

    Raises:
        ValueError: SWITCHX_MALLOC has another value.
    """
    return _changed(
        {_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1, _ARENA_MAX: 1, _TOP_PAD: 2**26},
        f"malloc keeps freed memory ({VARIABLE}=system gives it back)",
    )


def return_freed_memory() -> str:
    """Has malloc give large arrays to the system once they are freed.

    For those who set a bound: kept, in an arena a thread, they were more than twice
    `StorageSpec.host_bytes` (`rss_over_budget` of `make promises`).

    Returns, Raises:
        As `keep_freed_memory`, and nothing changes where it changes nothing.
    """
    return _changed(
        {
            _MMAP_MAX: 2**16,
            _MMAP_THRESHOLD: 2**17,
            _TRIM_THRESHOLD: 2**17,
            _TOP_PAD: 2**17,
            _ARENA_MAX: 1,
        },
        "malloc gives freed memory to the system (StorageSpec.host_bytes bounds memory)",
    )


def _changed(parameters: dict[int, int], says: str) -> str:
    """What malloc does: what `says` says if it takes these, else what leaves it as it is."""
    chosen = os.environ.get(VARIABLE, "keep")
    require(
        chosen in ("keep", "system"),
        f"{VARIABLE}={chosen!r}; use 'keep', or 'system' for malloc as the system has it",
    )
    if chosen == "system":
        return f"malloc gives freed memory to the system ({VARIABLE}=system)"
    if "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return "malloc is set by GLIBC_TUNABLES"
    if given := [name for name in _OF_GLIBC if os.environ.get(name)]:
        return f"malloc is set by {given[0]}"
    return says if _on_cpu() and _set(parameters) else "malloc is the system's"


def _set(parameters: dict[int, int]) -> bool:
    """Whether the C library has mallopt, and took all."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all([mallopt(*each) for each in parameters.items()])


def _on_cpu() -> bool:
    """Whether JAX's default back end will be a CPU; it is not initialized for it."""
    if platforms := os.environ.get("JAX_PLATFORMS"):
        return platforms.partition(",")[0] == "cpu"
    has_plugins = bool(importlib.metadata.entry_points(group="jax_plugins"))
    return not has_plugins and importlib.util.find_spec("libtpu") is None
