# SPDX-License-Identifier: Apache-2.0
"""Compiled programs are kept in a folder: JAX's persistent compilation cache, on by default.

Settings by JAX's own variables and options stay; this only gives the cache a folder if none
is set. JAX finds a program again by its text, the options, the versions of JAX and XLA, and
the devices. Machines with a shared home may have different CPUs, and a program with
instructions that a CPU lacks ends the process: each kind of CPU has a folder of its own. On
some Intel CPUs XLA refuses its own programs, with a line about `+prefer-no-gather`, and
compiles them again (JAX issue 38445).
"""

import contextlib
import hashlib
import os
import pathlib
import platform
import stat
from collections.abc import Callable, Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache

from switchx.data.data_dir import cache_dir

VARIABLE = "JAX_COMPILATION_CACHE_DIR"
# Lines of /proc/cpuinfo that say which CPU is compiled for: on x86, on Arm.
_CPU_LINES = ("model name", "flags", "Features", "CPU implementer", "CPU part")


@contextlib.contextmanager
def compiled_programs_kept(
    shared: pathlib.Path | None, note: Callable[[str], None] = lambda text: None
) -> Iterator[None]:
    """In this context, JAX keeps compiled programs and reads kept ones; `note` is told where.

    If JAX has no folder yet, it is the user's own, `$XDG_CACHE_HOME/switchx/compiled`: whoever
    can write there can have code run, so no other user may. Several processes on CPUs get none:
    there JAX's keys differ by process, so that the first one would find its programs and wait,
    as long as a collective may take at most, for the others to compile theirs.

    Args:
        shared: a folder that all of several processes see: JAX lets only process 0 write, and
            the others read nothing elsewhere. None uses the user's own in any case.
    """
    given = jax.config.jax_compilation_cache_dir
    if given is not None or not jax.config.jax_enable_compilation_cache:
        is_on = given and jax.config.jax_enable_compilation_cache
        note(f"compiled programs: kept in {given}" if is_on else "compiled programs: not kept")
        yield
        return
    is_one_of_several = jax.process_count() > 1
    if is_one_of_several and jax.default_backend() == "cpu":
        note("compiled programs: not kept, of several processes on CPUs")
        yield
        return
    folder = shared if shared is not None and is_one_of_several else _own_folder(note)
    if folder is None:
        yield
        return
    folder /= cpu_kind()
    note(f"compiled programs: kept in {folder}")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()


def cpu_kind() -> str:
    """A name that CPUs of the same model and instruction sets have in common."""
    features = {platform.machine(), platform.processor()}
    with contextlib.suppress(OSError):  # it exists only on Linux
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        features |= {line for line in lines if line.startswith(_CPU_LINES)}
    return f"cpu_{hashlib.sha256(repr(sorted(features)).encode()).hexdigest()[:12]}"


def _own_folder(note: Callable[[str], None]) -> pathlib.Path | None:
    """The folder, created; None, with a note, if it is not this user's alone."""
    folder = cache_dir() / "compiled"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        entry = folder.stat()
    except OSError as error:
        note(f"compiled programs: not kept, {error}; {VARIABLE}=DIR names another folder")
        return None
    others_write = entry.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if entry.st_uid != os.geteuid() or others_write or not os.access(folder, os.W_OK | os.X_OK):
        note(
            f"compiled programs: not kept, as {folder} is not this user's alone to write; "
            f"{VARIABLE}=DIR names another folder"
        )
        return None
    return folder
