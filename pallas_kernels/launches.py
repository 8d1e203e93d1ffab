# SPDX-License-Identifier: Apache-2.0
"""Kernels that a traced program launches, the bytes that each copies and what it multiplies.

XLA knows nothing of what a Pallas kernel reads, and the cost estimate that a kernel may supply
is only its author's word. Here bytes and products are counted from what the kernel
runs: its grid, its blocks and its tile schedule, for given sizes of the groups. Nothing is
executed.
"""

import collections
import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.dtypes import itemsize_bits

# Of an H100 and an H200 (NVIDIA's data sheets).
L2_BYTES = 50 * 10**6


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel of a traced program.

    Attributes:
        name: name of the kernel.
        operands, results: shapes and dtypes, in the order of the compiled call.
        copied: sizes of the groups -> the bytes copied between memory and the kernel, for each
            operand and for each result.
        flops: sizes of the groups -> the FLOPs, 2 m n k for each tile that is multiplied, as a
            whole; None if they are not counted.
    """

    name: str
    operands: tuple[jax.ShapeDtypeStruct, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]
    copied: Callable[[np.ndarray], tuple[list[int], list[int]]]
    flops: Callable[[np.ndarray], int] | None = None


_recording: list[list[Launch]] = []


@contextlib.contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """The kernels that are traced within; one that is traced twice is listed twice."""
    _recording.append([])
    try:
        yield _recording[-1]
    finally:
        _recording.pop()


def record(name: str, operands: Iterable, results: Iterable, copied, flops=None) -> None:
    """Adds a kernel to those that are recorded; does nothing if none are being recorded."""
    if _recording:
        operands, results = (
            tuple(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in arrays)
            for arrays in (operands, results)
        )
        _recording[-1].append(Launch(name, operands, results, copied, flops))


def num_bytes(shape: Sequence[int], dtype) -> int:
    return math.prod(map(int, shape)) * itemsize_bits(dtype) // 8


def pipelined_bytes(grid: Sequence[int], spec, array) -> int:
    """Bytes that a TPU pipeline copies of one operand or result.

    A block is copied if its index differs from that of the previous step, as the pipeline
    does; of a block at the array's edge, only what exists.

    Args:
        spec: the `pl.BlockSpec`.
        array: shape and dtype.
    """
    block = np.array([1 if size is None else int(size) for size in spec.block_shape])
    steps = np.indices(grid, np.int32).reshape(len(grid), -1)
    index = jax.vmap(spec.index_map)(*steps)
    index = np.stack([np.broadcast_to(each, steps.shape[1]) for each in index], axis=1)
    is_new = np.append(True, np.any(index[1:] != index[:-1], axis=1))
    shapes = np.minimum(block, np.array(array.shape) - index[is_new] * block)
    elements = int(np.sum(np.prod(shapes, axis=1, dtype=np.int64)))
    return elements * itemsize_bits(array.dtype) // 8


class Cache:
    """A cache of memory that keeps what was used last; counts what it has to read.

    It is a GPU's L2, between memory and the copies into blocks. The copies of all blocks are
    taken in the order of their tiles, which is about the order in which blocks run.
    """

    def __init__(self, num_bytes: int = L2_BYTES):
        self._free = num_bytes
        self._sizes: collections.OrderedDict[Any, int] = collections.OrderedDict()

    def read(self, key, size: int) -> int:
        """Bytes that have to come from memory: `size`, or 0."""
        if key in self._sizes:
            self._sizes.move_to_end(key)
            return 0
        self.write(key, size)
        return size

    def write(self, key, size: int) -> None:
        """Puts something in, and evicts what was used longest ago."""
        self._free -= size - self._sizes.pop(key, 0)
        self._sizes[key] = size
        while self._free < 0 and len(self._sizes) > 1:
            self._free += self._sizes.popitem(last=False)[1]
