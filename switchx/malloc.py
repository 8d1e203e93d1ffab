# SPDX-License-Identifier: Apache-2.0
"""Freed memory on a CPU: kept by glibc's malloc for the next array or returned to the system.

By default glibc maps each large array anew and unmaps it when it is freed, so the kernel
faults in and zeroes every page of every array in every step.
"""

import ctypes
import importlib.metadata
import importlib.util
import os

from switchx.fields import require

VARIABLE = "SWITCHX_MALLOC"
# Parameters of mallopt(3), from malloc.h.
_TRIM_THRESHOLD = -1
_TOP_PAD = -2
_MMAP_THRESHOLD = -3
_MMAP_MAX = -4
_ARENA_MAX = -8

# The environment variables documented in mallopt(3); GLIBC_TUNABLES is newer.
_OF_GLIBC = (
    *("MALLOC_ARENA_MAX", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_"),
    *("MALLOC_TOP_PAD_", "MALLOC_TRIM_THRESHOLD_"),
)


def keep_freed_memory() -> str:
    """Makes malloc keep freed memory, in one arena; call it before JAX is first used.

    Nothing changes if an accelerator holds the arrays, if the C library is not glibc, if
    GLIBC_TUNABLES or a variable of mallopt(3) sets malloc, or with SWITCHX_MALLOC=system.

    Returns:
        A sentence that says which of these applies.

    Raises:
        ValueError: SWITCHX_MALLOC has another value.
    """
    return _changed(
        {_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1, _ARENA_MAX: 1, _TOP_PAD: 2**26},
        f"malloc keeps freed memory ({VARIABLE}=system gives it back)",
    )


def return_freed_memory() -> str:
    """Makes malloc return large arrays to the system when they are freed.

    For users who set a bound: when kept, in one arena per thread, such arrays took more than
    twice `StorageSpec.host_bytes` (`rss_over_budget` of `make promises`).

    Returns, Raises:
        As `keep_freed_memory`; nothing changes where that function would change nothing.
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
    """What malloc does: `says` if it accepts these parameters, else why it stays as it is."""
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
    """Whether the C library has mallopt and accepted all parameters."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all([mallopt(*each) for each in parameters.items()])


def _on_cpu() -> bool:
    """Whether JAX's default backend will be a CPU, found out without initializing it."""
    if platforms := os.environ.get("JAX_PLATFORMS"):
        return platforms.partition(",")[0] == "cpu"
    has_plugins = bool(importlib.metadata.entry_points(group="jax_plugins"))
    return not has_plugins and importlib.util.find_spec("libtpu") is None
