# SPDX-License-Identifier: Apache-2.0
"""What experts are worth in compute: the dense models' loss by compute, read at a sparse loss.

Loss is in bits per byte, L(C) = Linf + A C^-a over the dense runs. Over so few decades Linf is
not identified, so it is pinned at several values: the speed-up, which interpolates, hardly
moves by it. A speed-up is the compute of a dense run of the same loss over that of the sparse
run; it is not read beyond the largest dense run.

Dims: X draws of the bootstrap, C cells
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from experiments.measured import Ratio

ASYMPTOTES = (0.0, 0.6, 0.9)
DRAWS = 2000


@dataclasses.dataclass(frozen=True)
class Point:
    """One cell of the ladder.

    Attributes:
        name: rung and length, the same for a dense cell and its sparse one.
        flops: training FLOPs of a run.
        losses: bits per byte at the last step, one a seed.
    """

    name: str
    flops: float
    losses: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Speedup:
    """The effective speed-up of a sparse cell at equal loss.

    Attributes:
        ratio: dense FLOPs over the sparse run's, with a 95% interval; bounds at the edge of the
            dense runs are that edge.
        is_beyond: whether the sparse loss is below that of the largest dense run, so that
            the speed-up is at least the ratio.
    """

    name: str
    asymptote: float
    ratio: Ratio
    is_beyond: bool


def frontier(flops: Sequence[float], losses: Sequence[float], asymptote: float):
    """(ln A, a) of L = asymptote + A C^-a, by least squares of logarithms.

    Raises:
        ValueError: a loss is not above the asymptote, or more compute is not better.
    """
    above = np.asarray(losses, float) - asymptote
    if (above <= 0).any():
        raise ValueError(f"{losses=} are not above {asymptote=} bits per byte; use a lower one")
    slope, log_scale = np.polyfit(np.log(flops), np.log(above), 1)
    if slope >= 0:
        raise ValueError(f"{losses=} do not fall with {flops=}; give dense runs that do")
    return float(log_scale), float(-slope)


def _ln_speedup(dense_flops, dense_losses, flops: float, loss: float, asymptote: float):
    """Its logarithm, not beyond the dense runs, and whether it would be."""
    log_scale, exponent = frontier(dense_flops, dense_losses, asymptote)
    wanted = (log_scale - math.log(loss - asymptote)) / exponent
    least, most = math.log(min(dense_flops)), math.log(max(dense_flops))
    return min(max(wanted, least), most) - math.log(flops), wanted > most


def _drawn(points: Sequence[Point], random: np.random.Generator) -> np.ndarray:
    """Means of cells, as they would be of other seeds: normal, with one variance of all, as
    four seeds are too few to draw from."""
    return random.normal([np.mean(point.losses) for point in points], errors_of(points))


def errors_of(points: Sequence[Point]) -> list[float]:
    """Standard errors of the cells' means, by one variance; 0 where each has one seed."""
    freedom = sum(len(point.losses) - 1 for point in points)
    squares = sum((len(point.losses) - 1) * np.var(point.losses, ddof=1) for point in points
                  if len(point.losses) > 1)  # fmt: skip
    sd = math.sqrt(squares / freedom) if freedom else 0.0
    return [sd / math.sqrt(len(point.losses)) for point in points]


def band(dense: Sequence[Point], asymptote: float, num: int = 40) -> np.ndarray:
    """FLOPs, the frontier, and the ends of its 95% band by the bootstrap, [4, N]."""
    flops = [point.flops for point in dense]
    x_N, random = np.geomspace(min(flops), max(flops), num), np.random.default_rng(0)

    def line(losses) -> np.ndarray:
        log_scale, exponent = frontier(flops, losses, asymptote)
        return asymptote + np.exp(log_scale) * x_N**-exponent

    drawn = np.array([line(_drawn(dense, random)) for _ in range(DRAWS)])
    ends = np.percentile(drawn, (2.5, 97.5), axis=0)
    return np.array([x_N, line([np.mean(point.losses) for point in dense]), *ends])


def speedups(
    dense: Sequence[Point], sparse: Sequence[Point], asymptotes: Sequence[float] = ASYMPTOTES
) -> tuple[list[Speedup], dict[float, Ratio]]:
    """The speed-up of each sparse cell, by asymptote; and how it goes with scale.

    Returns:
        Also, by asymptote, the factor by which the speed-up grows where compute is ten times as
        large: above 1 experts are worth more at scale. It is of at least two cells whose
        speed-ups are not bounds.
    """
    random = np.random.default_rng(0)
    drawn = [(_drawn(dense, random), _drawn(sparse, random)) for _ in range(DRAWS)]
    means = tuple(np.array([np.mean(p.losses) for p in points]) for points in (dense, sparse))
    dense_flops, sparse_flops = ([p.flops for p in points] for points in (dense, sparse))

    def logs(losses, asymptote):
        return np.array([
            _ln_speedup(dense_flops, losses[0], flops, loss, asymptote)
            for flops, loss in zip(sparse_flops, losses[1], strict=True)
        ]).T  # fmt: skip

    found, growth = [], {}
    for asymptote in asymptotes:
        middle, beyond = logs(means, asymptote)
        draws_XC = np.array([logs(each, asymptote)[0] for each in drawn])
        low, high = np.percentile(draws_XC, (2.5, 97.5), axis=0)
        for i, point in enumerate(sparse):
            ratio = Ratio(*(float(math.exp(each[i])) for each in (middle, low, high)))
            found.append(Speedup(point.name, asymptote, ratio, bool(beyond[i])))
        if np.sum(inside := np.logical_not(beyond)) < 2:
            continue
        decades, logs_XC = np.log10(sparse_flops), np.vstack([middle, draws_XC])
        slopes = np.polyfit(decades[inside], logs_XC[:, inside].T, 1)[0]
        bounds = np.percentile(slopes[1:], (2.5, 97.5))
        growth[asymptote] = Ratio(*(float(math.exp(s)) for s in (slopes[0], *bounds)))
    return found, growth
