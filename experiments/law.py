# SPDX-License-Identifier: Apache-2.0
"""What experts are worth in compute: the dense models' loss by compute, read at a sparse loss.

Between two neighbouring dense cells the logarithm of compute is linear in that of the loss, in
bits per byte. No law is fitted to all of them: cells of two widths and three lengths lie on
none (one power of compute misses them by 0.1 bits per byte, a speed-up by half of itself). A
speed-up is the compute of a dense run with the same loss over that of the sparse run; nothing
is read beyond the dense cells.

Dims: X draws of the bootstrap, C cells
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import scipy.stats

from experiments.measured import Ratio

DRAWS = 2000


@dataclasses.dataclass(frozen=True)
class Point:
    """One cell of the ladder.

    Attributes:
        name: rung and length, the same for a dense cell and its sparse one.
        flops: training FLOPs of a run.
        losses: bits per byte at the last step, one value per seed.
    """

    name: str
    flops: float
    losses: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Speedup:
    """The effective speed-up of a sparse cell at equal loss.

    Attributes:
        ratio: dense FLOPs over the sparse run's, with a 95% interval; what lies beyond the
            dense cells is at their edge.
        bound: `at least` where the sparse loss is below that of every dense cell, `at most`
            where it is above; else empty.
    """

    name: str
    ratio: Ratio
    bound: str


def _ln_dense_flops(flops_C: np.ndarray, losses_C: np.ndarray, losses: np.ndarray):
    """ln FLOPs of dense runs with given losses, not beyond the cells.

    Args:
        flops_C: increasing FLOPs of the dense cells.
        losses_C: their losses; one that is not below the one before counts as that.
    """
    falling_C = np.minimum.accumulate(losses_C)
    return np.interp(-np.log(losses), -np.log(falling_C), np.log(flops_C))


def _drawn(points: Sequence[Point], random: np.random.Generator) -> np.ndarray:
    """Means of cells, as they would be with other seeds, `[X, C]`: drawn by t with each cell's
    variance, as four seeds are too few to draw from."""
    means_C = [np.mean(point.losses) for point in points]
    errors_C, freedom_C = errors_of(points)
    return means_C + errors_C * random.standard_t(freedom_C, (DRAWS, len(points)))


def half_widths(points: Sequence[Point]) -> np.ndarray:
    """Half of the 95% intervals of the cells' means; 0 for a cell with one seed."""
    errors_C, freedom_C = errors_of(points)
    return errors_C * scipy.stats.t.ppf(0.975, freedom_C)


def errors_of(points: Sequence[Point]) -> tuple[np.ndarray, np.ndarray]:
    """The standard error of each cell's mean, 0 for one seed, and its degrees of freedom, at
    least 1. At some lengths seeds differ far more than at others."""
    counts_C = np.array([len(point.losses) for point in points])
    sds_C = [np.std(p.losses, ddof=1) if len(p.losses) > 1 else 0.0 for p in points]
    return sds_C / np.sqrt(counts_C), np.maximum(counts_C - 1, 1)


def speedups(
    dense: Sequence[Point], sparse: Sequence[Point]
) -> tuple[list[Speedup], Ratio | None]:
    """The speed-up of each sparse cell, and how it changes with scale.

    Returns:
        Also the factor by which the speed-up grows with ten times the compute: above 1, experts
        are worth more at scale. It is computed from cells that are not bounds; None where there
        are fewer than two.
    """
    dense = sorted(dense, key=lambda point: point.flops)
    dense_flops_C, sparse_flops_C = (np.array([p.flops for p in x]) for x in (dense, sparse))
    dense_C, sparse_C = (np.array([np.mean(p.losses) for p in x]) for x in (dense, sparse))

    def ln_speedups(dense_losses, sparse_losses) -> np.ndarray:
        needed_C = _ln_dense_flops(dense_flops_C, dense_losses, sparse_losses)
        return needed_C - np.log(sparse_flops_C)

    random = np.random.default_rng(0)
    draws = zip(_drawn(dense, random), _drawn(sparse, random), strict=True)
    middle_C = ln_speedups(dense_C, sparse_C)
    logs_XC = np.array([ln_speedups(*each) for each in draws])
    ends_2C = np.percentile(logs_XC, (2.5, 97.5), axis=0)
    bounds = [
        "at least" if loss < dense_C.min() else "at most" if loss > dense_C.max() else ""
        for loss in sparse_C
    ]
    found = [
        Speedup(point.name, Ratio(*map(float, np.exp(numbers))), bound)
        for point, numbers, bound in zip(
            sparse, np.vstack([middle_C, ends_2C]).T, bounds, strict=True
        )
    ]
    is_inside_C = np.array([not bound for bound in bounds])
    if is_inside_C.sum() < 2:
        return found, None
    decades = np.log10(sparse_flops_C[is_inside_C])
    slopes = np.polyfit(decades, np.vstack([middle_C, logs_XC])[:, is_inside_C].T, 1)[0]
    ends = np.percentile(slopes[1:], (2.5, 97.5))
    return found, Ratio(*map(float, np.exp([slopes[0], *ends])))
