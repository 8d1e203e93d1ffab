# SPDX-License-Identifier: Apache-2.0
"""A bounded cache of compiled decoding programs, and a count of what was compiled.

A process has a limited number of memory maps (Linux: `vm.max_map_count`, 65,530), and XLA's
CPU programs take several hundred to a thousand each; a process that runs out of them ends in a
segmentation fault. So the least recently used program is dropped before that.
"""

import collections
import pathlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import jax

Program = TypeVar("Program")
# XLA's options: pairs of name and value, sorted by name.
Options = tuple[tuple[str, str], ...]
MOST_PROGRAMS = 64
# A program without weights only moves rows: it takes 24 to 36 memory maps and half a MiB on a
# CPU, where one that runs a model takes several hundred maps and 7 to 60 MiB.
SMALL = 1 / 8
# Share of the memory maps that a process may have.
MOST_MAPS = 0.5

_COMPILED_EVENT = "/jax/core/compile/backend_compile_duration"
_MAPS = pathlib.Path("/proc/self/maps")
_MAX_MAPS = pathlib.Path("/proc/sys/vm/max_map_count")


class Programs:
    """A cache that keeps the most recently used programs with what they compiled.

    Any thread may use it.
    """

    def __init__(self, most: int = MOST_PROGRAMS):
        """Keeps at most `most` programs, or fewer where they have too many memory maps; ones
        that only move rows count as `SMALL`."""
        self.most = most
        self._lock, self._starting = threading.Lock(), threading.Lock()
        # Keys of a mesh's programs that are not compiled yet.
        self._fresh: set[tuple] = set()
        self._size: dict[tuple, float] = {}
        self._kept: collections.OrderedDict[tuple, Any] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def run(
        self, function, settings: tuple, shape: tuple, *, options=(), is_on_mesh=False, **arrays
    ):
        """Runs a function, compiled, and returns its result.

        Args:
            function: takes `settings`, then `arrays`; an array named `state` is donated.
            settings: constants of the program.
            shape: anything else that distinguishes programs with the same settings.
            options: the compiler's `Options`.
            is_on_mesh: whether it runs on several devices, which all have to begin programs in
                the same order. Otherwise two threads might begin two programs in different
                orders on two devices, and their collectives would wait for each other forever.
        """
        key = function, settings, shape, options

        def make():
            if is_on_mesh:
                self._fresh.add(key)
            return _jitted(function, settings, options), 1 if "params" in arrays else SMALL

        jitted = self.kept(key, make)
        if not is_on_mesh:
            return jitted(**arrays)
        if key in self._fresh:
            # JAX keeps what it compiles for the call below; other threads need not wait for it.
            jitted.lower(**arrays).compile()
            self._fresh.discard(key)
        with self._starting:
            return jitted(**arrays)

    def kept(self, key: tuple, make: Callable[[], tuple[Program, float]]) -> Program:
        """Returns the program of a key, which `make` makes where it is not kept.

        Args:
            key: function, settings, shape, options as in `run`, then what else identifies it.
            make: returns it, not compiled yet, and how many programs of a model it counts as.
        """
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        program, size = make()  # it may trace, which others need not wait for
        with self._lock:
            if key not in self._kept:  # otherwise another thread has made it meanwhile
                self._make_space(size)
                self._kept[key], self._size[key] = program, size
            return self._kept[key]

    def holds(self, function, settings: tuple, shape: tuple, options: Options = ()) -> bool:
        """Whether it keeps a program of such a call, whole (`run`) or cut into parts."""
        with self._lock:
            return any(key[:4] == (function, settings, shape, options) for key in self._kept)

    def _make_space(self, size: float) -> None:
        def is_full():
            held = sum(self._size[key] for key in self._kept)
            return held + size > self.most or share_of_maps() > MOST_MAPS

        while self._kept and is_full():
            left, _ = self._kept.popitem(last=False)
            del self._size[left]


def _jitted(function, settings: tuple, options: Options):
    function = getattr(function, "__wrapped__", function)  # the function inside a `jax.jit`

    # A new function each time: JAX keeps what it compiled as long as the function exists.
    def program(**arrays):
        return function(*settings, **arrays)

    program.__name__ = program.__qualname__ = function.__name__
    return jax.jit(program, donate_argnames="state", compiler_options=dict(options))


def num_maps() -> int:
    """Number of memory maps of this process; 0 where the system does not say."""
    try:
        return _MAPS.read_bytes().count(b"\n")
    except OSError:
        return 0


def share_of_maps() -> float:
    """The share of its allowed memory maps that this process has in use."""
    try:
        return num_maps() / int(_MAX_MAPS.read_text())
    except (OSError, ValueError):
        return 0.0


class Compilations:
    """Counts of the programs that this process compiled or read from the persistent cache.

    Attributes:
        number: number of programs.
        seconds: wall time in seconds, summed over threads.
    """

    def __init__(self):
        """Counts from now on."""
        self.number, self.seconds = 0, 0.0
        self._lock = threading.Lock()
        jax.monitoring.register_event_duration_secs_listener(self._count)

    def _count(self, event: str, duration_s: float, **_) -> None:
        if event == _COMPILED_EVENT:
            with self._lock:
                self.number += 1
                self.seconds += duration_s


# One of each per process, since memory maps are per process.
PROGRAMS, COMPILATIONS = Programs(), Compilations()
