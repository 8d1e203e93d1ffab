# SPDX-License-Identifier: Apache-2.0
"""Tiles of the kernels for GPUs that are not Hopper (Pallas's Triton back end).

Dims: R rows, D inputs, F outputs, E experts
"""

import dataclasses
import itertools

import jax.numpy as jnp

from pallas_kernels.tiling.gpu import rows_per_expert

# The tensor core takes no less.
SMALLEST = 16


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The tile of a block of threads.

    In the weight gradient `rows` is the step along R; `depth` and `features` are the tile's
    sizes along D and F.

    Attributes:
        rows, features: sizes of a tile of the result; powers of 2 from 16 on.
        depth: size of one step along D; a power of 2 from 16 on.
        warps: number of warps of 32 threads.
        stages: number of steps in shared memory at once.
    """

    rows: int
    features: int
    depth: int
    warps: int = 4
    stages: int = 3

    def check(self) -> None:
        """Raises ValueError if the compiler would refuse the tiling."""
        sizes = self.rows, self.features, self.depth
        if any(size < SMALLEST or size & (size - 1) for size in sizes):
            raise ValueError(
                f"rows={self.rows}, features={self.features}, depth={self.depth}; expected "
                f"powers of 2 from {SMALLEST} on"
            )
        if self.warps not in (1, 2, 4, 8, 16) or self.stages < 1:
            raise ValueError(
                f"warps={self.warps}, stages={self.stages}; expected 1, 2, 4, 8 or 16 warps, "
                "and a stage or more"
            )


def default_tiling(R: int, E: int, dtype, num_matrices: int = 1) -> Tiling:
    """Tiles that hold all rows of an expert if they are few, so that its weights are read once;
    steps are then deep, since the time is that of reading the weights."""
    rows = min(128, max(SMALLEST, 1 << (rows_per_expert(R, E) - 1).bit_length()))
    if jnp.dtype(dtype).itemsize > 2:
        return Tiling(min(rows, 64), 64 // num_matrices, 32, stages=2)
    if rows <= 32:
        return Tiling(rows, 64, 64 // num_matrices, stages=4)
    return Tiling(rows, 128 // num_matrices, 32, warps=4 if rows == 64 else 8)


def candidates(R: int, E: int, dtype, num_matrices: int = 1) -> list[Tiling]:
    """Tilings worth a measurement, the default first."""
    first = default_tiling(R, E, dtype, num_matrices)
    features = (64 // num_matrices, 128 // num_matrices)
    sizes = itertools.product(features, (32, 64), (4, 8), (2, 4))
    others = [Tiling(first.rows, *each) for each in sizes]
    return [first, *(each for each in others if each != first)]
