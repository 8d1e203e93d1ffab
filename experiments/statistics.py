# SPDX-License-Identifier: Apache-2.0
"""Statistics of the experiments: learning rates, contrasts of contenders, looks, power.

Quality is the validation negative log perplexity, in nats per token: higher is better. A
contrast is a weighted sum of the contenders' means, such as a difference or a slope.

Dims: N rates, C contenders, S seeds, R simulated experiments
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.optimize
import scipy.stats

from experiments.measured import Interval, Ratio, finite_of

# Standard deviation of a run's quality over seeds: the mean of twelve experiments.
SD = 0.015
# Probability of a type I error, over all looks at a claim together.
ERROR = 0.05
# Seeds are treated as blocks where their F is above this.
BLOCKS = 4.0
# Level at which variances differ, and seeds are blocks. By F > 4 alone 0.071 of experiments of
# two contenders, four and seven seeds, would claim something where there is nothing.
MODEL = 0.01
OUTCOMES = ("open", "ahead", "behind", "equivalent")


@dataclasses.dataclass(frozen=True)
class Parabola:
    """Quality as a parabola in ln(rate), and the rate that it gives a contender.

    Attributes:
        vertex: rate at which the parabola is best; None where it has no maximum.
        rate: vertex rounded to a power of 2^(1/4); None where `problem` says why.
        error: standard error of ln(vertex), by the delta method with `sd` per run; None for
            three points.
        curvature: loss of quality, in nats, at a rate that is e times too high or too low.
        residual: standard deviation of the points about the parabola; None for three points.
        problem: why the rate is not found, and the way out; empty where it is found.
    """

    vertex: float | None
    rate: float | None
    error: float | None
    curvature: float
    residual: float | None
    problem: str = ""


def open_sides(rates: Sequence[float], qualities: Sequence[float], sd: float = SD) -> list[str]:
    """`lower` and `higher`, where no rate on that side of the best one is worse by `sd`."""
    qualities_N = np.asarray(qualities, float)[np.argsort(rates)]  # None is NaN
    y_N = np.where(np.isfinite(qualities_N), qualities_N, -math.inf)
    best = int(y_N.argmax())
    sides = {"lower": y_N[:best], "higher": y_N[best + 1 :]}
    return [name for name, side in sides.items() if not (side < y_N[best] - sd).any()]


def parabola(rates: Sequence[float], qualities: Sequence[float], sd: float = SD) -> Parabola:
    """Fits quality over ln(rate), by least squares of the five rates nearest to the best one.

    Where these leave the parabola by 2 `sd` or more, as where quality falls steeply above the
    best rate, and yet quality rises to the best rate and falls from there, the parabola goes
    through the best rate and those on each side of it.

    The rate is found where some rate on each side of the best one is worse by more than `sd`,
    one of the two parabolas fits, and the vertex lies between the rates that were tried. Not
    the next rate alone: two rates about the vertex are equally good. A quality that is not
    finite is worse than any other and is not fitted.

    Args:
        rates: learning rates that were tried, in any order.
        qualities: one per rate, at the last step; higher is better.

    Raises:
        ValueError: a rate is given twice or is not positive, or fewer than three qualities are
            finite.
    """
    rates_N = np.asarray(rates, float)
    qualities_N = np.asarray(qualities, float)
    if len({*rates}) < len(rates) or rates_N.shape != qualities_N.shape or (rates_N <= 0).any():
        raise ValueError(f"{rates=} and {qualities=}; give one quality a positive rate")
    order_N = np.argsort(rates_N)
    x_N, y_N = np.log(rates_N[order_N]), qualities_N[order_N]
    is_finite_N = np.isfinite(y_N)
    if is_finite_N.sum() < 3:
        raise ValueError(
            f"{is_finite_N.sum()} rates of {len(rates)} have a finite quality and a parabola "
            "takes three; try lower rates"
        )
    y_N = np.where(is_finite_N, y_N, -math.inf)
    best, sides = int(y_N.argmax()), open_sides(rates, qualities, sd)
    nearest = np.argsort(abs(x_N - x_N[best]), kind="stable")
    near = sorted([i for i in nearest if is_finite_N[i]][:5])
    least, best_x, most = x_N[[0, best, -1]]
    powers, coefficients, residual = _fit(x_N[near] - best_x, y_N[near])
    at_best, steps = near.index(best), np.diff(y_N[near])
    has_one_peak = (steps[:at_best] > -sd).all() and (steps[at_best:] < sd).all()
    beside = near[max(at_best - 1, 0) : at_best + 2]
    if residual is not None and residual >= 2 * sd and has_one_peak and len(beside) == 3:
        powers, coefficients, residual = _fit(x_N[beside] - best_x, y_N[beside])
    a, b, _ = coefficients
    at = f"the best rate is {math.exp(best_x):.4g}"
    if sides:
        problem = f"{at} and none is worse by {sd} beside it; add {' and '.join(sides)} rates"
    elif a >= 0 or not least < best_x - b / (2 * a) < most:
        problem = f"{at} and the parabola is not best between the rates; add rates about it"
    elif residual is not None and residual >= 2 * sd:
        problem = (
            f"the parabola's residual is {residual:.4f}, not below {2 * sd}; add rates about it"
        )
    else:
        problem = ""
    if a >= 0:
        return Parabola(None, None, None, float(-a), residual, problem)
    vertex = best_x - b / (2 * a)
    slope = np.array([b / (2 * a * a), -1 / (2 * a), 0.0])  # of the vertex, by coefficient
    # A parabola fits any three points, and the rates alone decide where it peaks.
    error = None
    if residual is not None:
        error = sd * math.sqrt(slope @ np.linalg.inv(powers.T @ powers) @ slope)
    rounded = 2 ** (round(4 * vertex / math.log(2)) / 4)
    return Parabola(
        math.exp(vertex), None if problem else rounded, error, float(-a), residual, problem
    )


def difference(name: str, control: str) -> dict[str, float]:
    """Weights of a contender's mean minus the control's."""
    return {name: 1.0, control: -1.0}


def trend(sizes: dict[str, float]) -> dict[str, float]:
    """Weights of the slope over log2 of the contenders' sizes, by least squares: the gain from
    a doubling."""
    return _of_power(sizes, 1)


def curvature(sizes: dict[str, float]) -> dict[str, float]:
    """Weights of the second derivative over log2 of the sizes, by a least-squares parabola: how
    much the gain from a doubling changes with each further one."""
    return {name: 2 * weight for name, weight in _of_power(sizes, 2).items()}


def _of_power(sizes: dict[str, float], power: int) -> dict[str, float]:
    """Of what the lower powers leave of this one; by sums that are exact on any CPU, as
    weights are in the digest of a rule."""
    if len({*sizes.values()}) <= power:
        raise ValueError(f"{sizes=}; give more than {power} different sizes")
    logs = [math.log2(size) for size in sizes.values()]
    left = []
    for exponent in range(power + 1):
        column = [x**exponent for x in logs]
        for lower in left:
            share = _dot(lower, column) / _dot(lower, lower)
            column = [x - share * y for x, y in zip(column, lower, strict=True)]
        left.append(column)
    squares = _dot(column, column)
    return {name: x / squares for name, x in zip(sizes, column, strict=True)}


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def _fit(x_N: np.ndarray, y_N: np.ndarray):
    """The matrix of powers, the parabola's coefficients from the highest power down, and the
    residual, which is None for three points."""
    powers, freedom = np.vander(x_N, 3), len(x_N) - 3
    coefficients = np.linalg.lstsq(powers, y_N, rcond=None)[0]
    squares = np.sum((y_N - powers @ coefficients) ** 2)
    return powers, coefficients, math.sqrt(squares / freedom) if freedom else None


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A contrast of contenders.

    Attributes:
        error: standard error of the mean.
        freedom: degrees of freedom of Student's t.
        sd: standard deviation of a run, over seeds.
        model: assumption about the variance.
    """

    mean: float
    error: float
    freedom: float
    sd: float
    model: str

    def interval(self, level: float = ERROR) -> Interval:
        """The interval with confidence 1 - level."""
        half = float(scipy.stats.t.ppf(1 - level / 2, self.freedom)) * self.error
        return Interval(self.mean, self.mean - half, self.mean + half)

    def p(self) -> float:
        """Two-sided p-value for no effect."""
        return float(2 * scipy.stats.t.sf(abs(self.mean) / self.error, self.freedom))


def estimate(finals: dict[str, Sequence[float]], weights: dict[str, float]) -> Estimate:
    """A contrast with one variance for all contenders.

    It has a variance for each (Welch) where Levene's test of the medians (Brown and Forsythe)
    has p < 0.01; it has seeds as blocks, which pairs by seed, where the F of seeds is above 4
    and has p < 0.01.

    Args:
        finals: quality by contender, one a seed, in the same order of seeds.
        weights: of contenders in the contrast; their sum is 0.

    Raises:
        ValueError: a contender is missing or has fewer than two seeds, weights do not sum to
            0, a quality is not finite, or nothing varies.
    """
    groups = {name: np.asarray(values, float) for name, values in finals.items()}
    missing = sorted({*weights} - {*groups})
    few = sorted(name for name, values in groups.items() if len(values) < 2)
    lost = sorted(name for name, values in groups.items() if not np.isfinite(values).all())
    if lost:
        raise ValueError(f"runs of {lost} have no finite quality; say so by a gate, not a mean")
    if missing or few or abs(sum(weights.values())) > 1e-9:
        raise ValueError(
            f"no contender {missing}, fewer than two seeds of {few}, weights sum to "
            f"{sum(weights.values())}; give contenders of two seeds and weights of sum 0"
        )
    mean = sum(weight * groups[name].mean() for name, weight in weights.items())
    sizes = {name: len(values) for name, values in groups.items()}
    variances = {name: float(values.var(ddof=1)) for name, values in groups.items()}
    freedom = sum(sizes.values()) - len(sizes)
    pooled = sum((sizes[name] - 1) * v for name, v in variances.items()) / freedom
    if not any(variances[name] for name in weights):
        raise ValueError(f"{[*weights]} do not vary over seeds; give runs of different seeds")
    spread = sum(w * w / sizes[name] for name, w in weights.items())
    # Two values lie equally far from their median, so that Levene's test needs three.
    is_many = len(groups) > 1 and min(sizes.values()) > 2
    if is_many and scipy.stats.levene(*groups.values()).pvalue < MODEL:
        parts = {name: w * w * variances[name] / sizes[name] for name, w in weights.items()}
        total = sum(parts.values())
        freedom = total**2 / sum(p * p / (sizes[name] - 1) for name, p in parts.items())
        return Estimate(mean, math.sqrt(total), freedom, math.sqrt(pooled), "Welch")
    if len(groups) > 1 and len({*sizes.values()}) == 1:
        values_CS = np.array([*groups.values()])
        over_C, over_S = values_CS.mean(1, keepdims=True), values_CS.mean(0)
        rest_CS = values_CS - over_C - over_S + values_CS.mean()
        of_seeds = len(groups) * over_S.var(ddof=1)
        block_freedom = (len(groups) - 1) * (len(over_S) - 1)
        rest = float(np.sum(rest_CS**2)) / block_freedom
        bound = scipy.stats.f.isf(MODEL, len(over_S) - 1, block_freedom)
        if of_seeds > max(BLOCKS, bound) * rest > 0:
            error = math.sqrt(rest * spread)
            return Estimate(mean, error, block_freedom, math.sqrt(rest), "seeds as blocks")
    error = math.sqrt(pooled * spread)
    return Estimate(mean, error, freedom, math.sqrt(pooled), "one variance")


def finite_mean(qualities: Sequence[float | None]) -> float | None:
    """Their mean; None where a run diverged."""
    is_whole = all(each is not None and math.isfinite(each) for each in qualities)
    return float(np.mean(qualities)) if is_whole else None


def interval_over(
    finals: dict[str, list[float | None]], name: str, control: str
) -> dict[str, float] | None:
    """`mean`, `low` and `high` of a difference, 95%; None where a run of either diverged."""
    whole = {each: v for each, v in finals.items() if finite_mean(v) is not None}
    if not {name, control} <= whole.keys():
        return None
    return dataclasses.asdict(estimate(whole, difference(name, control)).interval())


def intervals(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Each contender less the first one, of the `curves` of results.json, with 95% intervals by
    `estimate`; none of those that diverged.

    By the variance of both alone where each has three seeds: one of all is too small for a
    contender whose seeds differ more than others', which four seeds seldom show.
    """
    first, finals = next(iter(results["curves"])), finite_of(results)
    found = {}
    for name in finals:
        if first in finals and name != first:
            both = {each: finals[each] for each in (first, name)}
            known = both if min(map(len, both.values())) > 2 else finals
            found[name] = dataclasses.asdict(
                estimate(known, difference(name, first)).interval()
            )
    return found


def pocock(seeds: Sequence[int]) -> float:
    """The nominal two-sided level, the same at every look, for which all looks together err
    with probability 0.05 (Pocock 1977): of normal means of so many seeds.

    Three looks after equally many seeds each have 0.0221, two 0.0294.
    """
    n = np.asarray(seeds, float)
    if len(n) == 1:
        return ERROR
    correlation = np.sqrt(np.minimum.outer(n, n) / np.maximum.outer(n, n))
    means = scipy.stats.multivariate_normal(np.zeros(len(n)), correlation, seed=0)

    def excess(bound: float) -> float:
        bounds = np.full(len(n), bound)
        return 1 - means.cdf(bounds, lower_limit=-bounds) - ERROR

    return float(2 * scipy.stats.norm.sf(scipy.optimize.brentq(excess, 1.9, 4.0, xtol=1e-6)))


def outcome(mean, error, freedom, margin: float | None, level: float) -> np.ndarray:
    """What a look says, an index of OUTCOMES; of scalars or arrays.

    Equivalent, where the interval of confidence 1 - 2 level lies inside of +-margin (two
    one-sided tests, Schuirmann 1987), wins over ahead or behind, where the interval of
    confidence 1 - level leaves out 0.
    """
    half, inner = (scipy.stats.t.ppf(1 - tail, freedom) * error for tail in (level / 2, level))
    is_inside = np.zeros_like(mean, bool) if margin is None else abs(mean) + inner < margin
    return np.select([is_inside, mean - half > 0, mean + half < 0], [3, 1, 2], 0)


def simulate(
    weights: dict[str, float],
    effect: float,
    sd: float,
    looks: Sequence[int],
    margin: float | None,
    level: float,
    contenders: int | None = None,
    num_runs: int = 20_000,
) -> dict[str, float]:
    """How often an experiment of normal runs that stops at the first outcome ends with each.

    Args:
        weights: those of the contrast.
        effect: true value of the contrast.
        sd: standard deviation of a run.
        looks: seeds of a contender at each look.
        contenders: those that share the variance, the contrast's own among them; these alone
            by default.

    Returns:
        Shares by outcome, and the mean number of seeds in `seeds`.
    """
    weights_C = np.zeros(contenders or len(weights))
    weights_C[: len(weights)] = [*weights.values()]
    runs_RCS = np.random.default_rng(0).normal(0, sd, (num_runs, len(weights_C), looks[-1]))
    runs_RCS += (effect * weights_C / np.sum(weights_C**2))[:, None]
    ends_R, seeds_R = np.zeros(num_runs, int), np.full(num_runs, looks[-1])
    for n in looks:
        mean_R = runs_RCS[..., :n].mean(-1) @ weights_C
        variance_R = runs_RCS[..., :n].var(-1, ddof=1).mean(-1)
        error_R = np.sqrt(variance_R * np.sum(weights_C**2) / n)
        said_R = outcome(mean_R, error_R, len(weights_C) * (n - 1), margin, level)
        stops_R = (ends_R == 0) & (said_R > 0)
        ends_R[stops_R], seeds_R[stops_R] = said_R[stops_R], n
    shares = {name: float(np.mean(ends_R == i)) for i, name in enumerate(OUTCOMES)}
    return shares | {"seeds": float(seeds_R.mean())}


def holm(ps: Sequence[float]) -> list[float]:
    """The p of each claim adjusted for all of them (Holm 1979)."""
    order = np.argsort(ps)
    raised = np.maximum.accumulate(np.arange(len(ps), 0, -1) * np.asarray(ps, float)[order])
    adjusted = np.empty(len(ps))
    adjusted[order] = np.minimum(raised, 1)
    return adjusted.tolist()


def dunnett(
    finals: dict[str, Sequence[float]], control: str, level: float = ERROR
) -> dict[str, tuple[Interval, float]]:
    """Each contender less one control: simultaneous interval and p (Dunnett 1955)."""
    others = [name for name in finals if name != control]
    samples = [finals[name] for name in others]
    found = scipy.stats.dunnett(*samples, control=finals[control], rng=np.random.default_rng(0))
    bounds = found.confidence_interval(1 - level)
    middle = [np.mean(each) - np.mean(finals[control]) for each in samples]
    columns = (middle, bounds.low, bounds.high, found.pvalue)
    return {
        name: (Interval(*map(float, each[:3])), float(each[3]))
        for name, *each in zip(others, *columns, strict=True)
    }


def spread_ratio(values: Sequence[float], over: Sequence[float]) -> Ratio:
    """The ratio of standard deviations over seeds; its 95% interval is that of Fisher's F."""
    ratio = float(np.std(values, ddof=1) / np.std(over, ddof=1))
    freedom = len(values) - 1, len(over) - 1
    low, high = (math.sqrt(scipy.stats.f.ppf(q, *freedom)) for q in (0.025, 0.975))
    return Ratio(ratio, ratio / high, ratio / low)


def loss_of_compute(qualities: dict[float, Sequence[float]], share: float = 0.05) -> float:
    """What a share of compute is worth, in nats: the slope of quality over ln(compute) times
    ln(1 + share).

    Args:
        qualities: those of one dense model, one a seed, by compute in any unit, as 0.5, 1 and
            2 lengths of training.

    Raises:
        ValueError: there are fewer than two lengths, or more compute is not better.
    """
    points = [(math.log(x), y) for x, values in qualities.items() for y in values]
    slope = np.polyfit(*zip(*points, strict=True), 1)[0] if len(qualities) > 1 else 0.0
    if not slope > 0:
        raise ValueError(
            f"{qualities=}; give dense runs of several lengths that gain by length"
        )
    return float(slope * math.log1p(share))
