# SPDX-License-Identifier: Apache-2.0
"""Statistics of the experiments: learning rates, contrasts of contenders, looks, power.

Quality is the validation negative log perplexity, in nats per token: higher is better.

Dims: N rates
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

# Standard deviation of a run's quality over seeds: the mean of twelve experiments.
SD = 0.015


@dataclasses.dataclass(frozen=True)
class Parabola:
    """Quality as a parabola in ln(rate), and the rate that a contender gets by it.

    Attributes:
        vertex: rate at which the parabola is best; None where it has no maximum.
        rate: vertex rounded to a power of 2^(1/4); None where `problem` says why.
        error: standard error of ln(vertex), by the delta method with `sd` a run.
        curvature: loss of quality, in nats, at a rate that is e times too high or too low.
        residual: standard deviation of the points about the parabola; None of three points.
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
    y_N = np.asarray([quality for _, quality in sorted(zip(rates, qualities, strict=True))])
    y_N = np.where(np.isfinite(y_N), y_N, -math.inf)
    best = int(y_N.argmax())
    sides = {"lower": y_N[:best], "higher": y_N[best + 1 :]}
    return [name for name, side in sides.items() if not (side < y_N[best] - sd).any()]


def parabola(rates: Sequence[float], qualities: Sequence[float], sd: float = SD) -> Parabola:
    """Fits quality over ln(rate), by least squares of the five rates nearest to the best one.

    The rate is found where some rate on each side of the best one is worse by more than `sd`,
    the residual is below 2 `sd`, and the vertex lies between the rates that were tried. Not
    the next rate alone: two rates about the vertex are equally good. A quality that is not
    finite is worse than any other and is not fitted.

    Args:
        rates: learning rates that were tried, in any order.
        qualities: one a rate, at the last step; higher is better.

    Raises:
        ValueError: a rate is given twice or is not positive, or fewer than three qualities are
            finite.
    """
    rates_N, qualities_N = np.asarray(rates, float), np.asarray(qualities, float)
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
    near = [i for i in np.argsort(abs(x_N - x_N[best]), kind="stable") if is_finite_N[i]][:5]
    least, best_x, most = x_N[[0, best, -1]]
    x_N, y_N = x_N[near], y_N[near]
    powers = np.vander(x_N - best_x, 3)
    a, b, c = coefficients = np.linalg.lstsq(powers, y_N, rcond=None)[0]
    freedom = len(near) - 3
    residual = (
        math.sqrt(np.sum((y_N - powers @ coefficients) ** 2) / freedom) if freedom else None
    )
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
    error = sd * math.sqrt(slope @ np.linalg.inv(powers.T @ powers) @ slope)
    rounded = 2 ** (round(4 * vertex / math.log(2)) / 4)
    return Parabola(
        math.exp(vertex), None if problem else rounded, error, float(-a), residual, problem
    )
