# SPDX-License-Identifier: Apache-2.0
"""Tiles of the Hopper kernels: which are possible, what they take, which are tried first.

Dims: R rows, D inputs, F outputs, E experts
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

from jax.dtypes import itemsize_bits

# Shared memory that a block may ask for on Hopper, and the most that its barriers take of it.
SHARED_BYTES = 232448
BARRIER_BYTES = 1024
H200_SMS = 132
# The part of an H100's and an H200's 50 MB of cache that the weights of a panel may take.
PANEL_BYTES = 24 * 10**6
# Rows of a tile up to which a launch is a large part of a product.
FEW_ROWS = 64
# Features of a row that are stored at once; of 16 bits, the most that the copy engine swizzles.
STORED = 64
# The copy engine reads tiled rows from a multiple of this on.
ROW_ALIGNMENT = 8
# Registers of a thread that accumulators may take, by the warpgroups that multiply; with these
# nothing spills. The compiler gives each of 512 threads 128 registers.
_ACCUMULATOR_REGISTERS = {1: 128, 2: 128, 3: 64}
# What a tile takes besides its steps along D, in steps: its sums are stored.
STEPS_OF_A_STORE = 1
# Most parts of D, by default.
MOST_PARTS = 16
FEW_WAVES = 4
# What the two kernels that parts need take, in steps: 9 us on an H200.
STEPS_OF_A_SUM = 12


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The tile of a block, and the order and parts of its work.

    In the weight gradient M is a tile of D, N of F and K of the rows.

    Attributes:
        tile_m: M, 64 or 128 output features of each warpgroup.
        tile_n: N, rows of a tile: 8, 16, 32, 64, 128 or 256. Fewer are multiplied if fewer are
            its group's (`gpu_walk.heights`).
        tile_k: K, one step along D, which it divides.
        warpgroups: number of warpgroups that multiply; each has features of its own.
        stages: number of steps of K in shared memory at once.
        panel: number of tiles of features that share the cache with all rows.
        splits: most parts of D that XLA sums afterwards; divides D / K. A run has as many parts
            as occupy the SMs with its tiles (`best_parts`).
        through_smem: quantized weights only: 1 sends them to the tensor core through shared
            memory instead of registers, the same arithmetic.
        num_sms: number of blocks, one for each SM; 0 for as many as the GPU has, 132 if there
            is none.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    warpgroups: int = 2
    stages: int = 4
    panel: int = 16
    splits: int = 1
    through_smem: int = 0
    num_sms: int = 0


def shared_bytes(
    tiling: Tiling, x_dtype, w_dtype, stored_bytes: int | None = None, num_matrices: int = 1
) -> int:
    """Shared memory of a block without its barriers; `stored_bytes` hold its results."""
    m, n, k = tiling.tile_m * tiling.warpgroups, tiling.tile_n, tiling.tile_k
    stage_bits = n * k * itemsize_bits(x_dtype) + num_matrices * m * k * itemsize_bits(w_dtype)
    y_bytes = m * n * (4 if tiling.splits > 1 else 2) if stored_bytes is None else stored_bytes
    scratch = m * 64 * 2 if tiling.through_smem else 0
    return tiling.stages * stage_bits // 8 + y_bytes + scratch


def checked(
    tiling: Tiling,
    D: int,
    x_dtype,
    w_dtype,
    stored_bytes: int | None = None,
    num_matrices: int = 1,
) -> Tiling:
    """The tiling; `stored_bytes` and `num_matrices` as in `shared_bytes`.

    Raises:
        ValueError: the kernel cannot run with it.
    """
    n, steps = tiling.tile_n, D // tiling.tile_k
    if n not in (8, 16, 32, 64, 128, 256) or tiling.tile_m not in (64, 128):
        raise ValueError(
            f"tile_m={tiling.tile_m}, tile_n={n}; expected tile_m 64 or 128 and tile_n 8, 16, "
            "32, 64, 128 or 256"
        )
    if tiling.warpgroups not in (1, 2, 3) or tiling.stages < 2 or tiling.panel < 1:
        raise ValueError(
            f"warpgroups={tiling.warpgroups}, stages={tiling.stages}, panel={tiling.panel}; "
            "expected 1 to 3 warpgroups, 2 stages or more and a panel of at least 1"
        )
    registers = _ACCUMULATOR_REGISTERS[tiling.warpgroups]
    if num_matrices * tiling.tile_m * n // 128 > registers:
        raise ValueError(
            f"tile_m={tiling.tile_m} by tile_n={n} needs more registers than one of "
            f"{tiling.warpgroups} warpgroups has; use tile_m * tile_n <= "
            f"{128 * registers // num_matrices}"
        )
    if tiling.tile_k % 64 or D % tiling.tile_k:
        raise ValueError(
            f"tile_k={tiling.tile_k} must be a multiple of 64 that divides D={D}; use "
            f"tile_k={math.gcd(D, 128)}"
        )
    if steps % tiling.splits or (tiling.splits > 1 and tiling.tile_m != 64):
        raise ValueError(
            f"splits={tiling.splits} must divide the {steps} steps of tile_k={tiling.tile_k} "
            f"along D={D} and takes tile_m=64, not {tiling.tile_m}; use splits=1"
        )
    taken = shared_bytes(tiling, x_dtype, w_dtype, stored_bytes, num_matrices)
    taken += BARRIER_BYTES
    if taken > SHARED_BYTES:
        raise ValueError(
            f"the tiling takes {taken} bytes of shared memory, Hopper has {SHARED_BYTES}; "
            f"use fewer than {tiling.stages} stages or a smaller tile"
        )
    return tiling


def fitted(
    tiling: Tiling,
    x_dtype,
    w_dtype,
    most: int,
    stored_bytes: int | None = None,
    num_matrices: int = 1,
) -> Tiling:
    """The tiling with as many stages as fit, at most `most`."""
    none = dataclasses.replace(tiling, stages=0)
    one = dataclasses.replace(tiling, stages=1)
    fixed = shared_bytes(none, x_dtype, w_dtype, stored_bytes, num_matrices)
    stage = shared_bytes(one, x_dtype, w_dtype, stored_bytes, num_matrices) - fixed
    stages = (SHARED_BYTES - BARRIER_BYTES - fixed) // stage
    return dataclasses.replace(tiling, stages=max(2, min(most, stages)))


def candidates_around(
    first: Tiling,
    R: int,
    F: int,
    E: int,
    depths,
    x_dtype,
    w_dtype,
    check: Callable[[Tiling], Any],
) -> list[Tiling]:
    """Tilings of the forward product worth a measurement, `first` before the others.

    Every tile near the first one's, then the first one with another number of warpgroups, panel
    or number of stages, one of these at a time.

    Args:
        depths: steps along D.
        check: raises ValueError for a tiling that the kernel cannot run with.
    """
    rows = sorted({max(8, first.tile_n // 2), first.tile_n, min(256, 2 * first.tile_n)})
    splits = sorted({1, 2, 4, first.splits}) if rows_per_expert(R, E) <= 16 else [1]
    tried = [
        dataclasses.replace(first, tile_m=tile_m, tile_n=tile_n, tile_k=tile_k, splits=parts)
        for tile_n, tile_m, tile_k, parts in itertools.product(rows, (64, 128), depths, splits)
    ]
    tried += [
        dataclasses.replace(first, warpgroups=groups, tile_k=tile_k)
        for groups, tile_k in itertools.product((1, 2, 3), depths)
    ]
    tried = [fitted(tiling, x_dtype, w_dtype, most=8) for tiling in tried]
    # A panel of all columns or more is one panel.
    columns = -(-F // (first.tile_m * first.warpgroups))
    panels = {max(1, columns // share) for share in (1, 2, 4, columns)} - {
        min(columns, first.panel)
    }
    tried += [dataclasses.replace(first, panel=panel) for panel in sorted(panels)]
    tried += [
        dataclasses.replace(first, stages=stages)
        for stages in (2, (first.stages + 2) // 2, first.stages - 1, first.stages + 1)
    ]
    found = [first]
    for tiling in tried:
        with contextlib.suppress(ValueError):
            check(tiling)
            found += [tiling] if tiling not in found else []
    return found


def with_parts(tiling: Tiling, D: int, x_dtype, w_dtype, num_matrices: int = 1) -> Tiling:
    """The tiling with D in parts, as few as possible, whose sums leave the kernel as float32.

    D is a multiple of 64 above it. Steps are shorter if that makes fewer parts, or if longer
    ones do not fit beside such sums.
    """
    if tiling.splits > 1:
        return tiling

    def least_parts(tile_k: int) -> int:
        steps = D // tile_k
        return next(parts for parts in range(2, steps + 1) if steps % parts == 0)

    def in_steps_of(tile_k: int) -> Tiling:
        splits = least_parts(tile_k)
        parts = dataclasses.replace(tiling, tile_m=64, tile_k=tile_k, splits=splits)
        return fitted(parts, x_dtype, w_dtype, tiling.stages, num_matrices=num_matrices)

    def fits(tiling: Tiling) -> bool:
        taken = shared_bytes(tiling, x_dtype, w_dtype, num_matrices=num_matrices)
        return taken + BARRIER_BYTES <= SHARED_BYTES

    depths = [k for k in (512, 256, 128, 64) if k <= tiling.tile_k and k < D and D % k == 0]
    possible = [in_steps_of(tile_k) for tile_k in sorted(depths, key=least_parts)]
    return next(filter(fits, possible), possible[-1])


def rows_per_expert(R: int, E: int) -> int:
    return -(-R // max(1, min(R, E)))


def tile_of_rows(R: int, E: int) -> int:
    """Rows of a tile that mostly holds all rows of an expert: its weights are then read once.

    It is a quarter more than the mean, and 7 for a group that starts within a tile's 8.
    """
    rows = rows_per_expert(R, E)
    return min(256, max(16, 1 << (rows + rows // 4 + 7 - 1).bit_length()))


def default_panel(tiling: Tiling, D: int, F: int, bits: int, num_matrices: int = 1) -> int:
    """The number of tiles of features in a panel: all of an expert's tiles, so that rows are
    read once, or as many as the cache has room for.

    Args:
        bits: bits of a weight.
    """
    block = tiling.tile_m * tiling.warpgroups
    fitting = PANEL_BYTES // max(1, num_matrices * D * block * bits // 8)
    return min(-(-F // block), max(1, fitting))


def steps_of_busiest(parts: int, tiles: int, steps: int, num_sms: int) -> int:
    """Steps of the SM that has the most tiles, each in parts of the steps along D."""
    return -(-tiles * parts // num_sms) * (steps // parts + STEPS_OF_A_STORE)


def best_parts(tiles: int, steps: int, most: int, num_sms: int) -> int:
    """The parts of D, up to `most`, with which the busiest SM has the fewest steps.

    The fewest of equally good ones; one if the last of many waves is not a large part.
    """
    if tiles >= FEW_WAVES * num_sms:
        return 1
    options = (parts for parts in range(1, most + 1) if steps % parts == 0)
    return min(options, key=lambda parts: steps_of_busiest(parts, tiles, steps, num_sms))


def default_splits(tiling: Tiling, R: int, D: int, F: int, E: int) -> int:
    """The most parts of D that are useful if there are few rows; 1 if there are many.

    Parts cost two more kernels, the schedule and the sum, so they pay if D is long and tiles
    are few: those of as many experts as rows that choose at random would use. The kernel takes
    fewer parts when a run has more tiles.
    """
    if tiling.tile_n > 64 or tiling.tile_m != 64:
        return 1
    active = max(1, round(E * (1 - (1 - 1 / E) ** R)))
    tiles = active * -(-F // (tiling.tile_m * tiling.warpgroups))
    if tiles >= H200_SMS:
        return 1
    steps = D // tiling.tile_k
    parts = best_parts(tiles, steps, MOST_PARTS, H200_SMS)
    whole, in_parts = (steps_of_busiest(n, tiles, steps, H200_SMS) for n in (1, parts))
    return parts if in_parts + STEPS_OF_A_SUM <= whole else 1
