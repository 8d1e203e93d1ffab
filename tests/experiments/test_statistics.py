# SPDX-License-Identifier: Apache-2.0
"""Statistics of the experiments, against scipy, tables of others and simulation."""

import math
import re

import numpy as np
import pytest
import scipy.optimize

from experiments import statistics


def test_a_parabola_is_that_of_curve_fit():
    """Values and the standard error of the vertex."""
    rates = [0.004, 0.001, 0.002, 0.016, 0.008]
    noise = [0.004, -0.006, 0.001, 0.003, -0.005]
    qualities = [
        -4 - 0.118 * math.log(rate / 0.005) ** 2 + e
        for rate, e in zip(rates, noise, strict=True)
    ]

    def curve(x, top, vertex, curvature):
        return top - curvature * (x - vertex) ** 2

    sigma = np.full(5, statistics.SD)
    fit = scipy.optimize.curve_fit(
        curve, np.log(rates), qualities, (-4, -5, 0.1), sigma, absolute_sigma=True
    )
    found = statistics.parabola(rates, qualities)
    assert found.vertex == pytest.approx(math.exp(fit[0][1]), rel=1e-4)
    assert found.curvature == pytest.approx(fit[0][2], rel=1e-4)
    assert found.error == pytest.approx(math.sqrt(fit[1][1, 1]), rel=1e-3)
    squares = np.sum((curve(np.log(rates), *fit[0]) - qualities) ** 2)
    assert found.residual == pytest.approx(math.sqrt(squares / 2), rel=1e-4)
    # 2^(-7.75) = 0.00465, 2^(-7.5) = 0.00552
    assert found.rate == pytest.approx(2**-7.75) and not found.problem


def test_the_vertex_errs_as_its_standard_error_says():
    random, x = np.random.default_rng(0), np.log(2) * np.arange(-2, 3)
    drawn = -0.118 * x**2 + random.normal(0, 0.015, (2000, 5))
    found = [statistics.parabola(np.exp(x), y) for y in drawn]
    spread = np.std([math.log(each.vertex) for each in found])
    exact = statistics.parabola(np.exp(x), -0.118 * x**2)
    assert spread == pytest.approx(exact.error, rel=0.05)
    assert exact.error / math.log(2) == pytest.approx(0.04, abs=0.005)


@pytest.mark.parametrize(
    ("qualities", "said"),
    [
        ([-5.2, -5.1, -5.0], "the best rate is 4 and none .* add higher rates"),
        ([-5.0, -5.1, -5.2], "add lower rates"),
        ([-5.01, -5.0, -5.1], "add lower rates"),
        ([-5.3, -5.0, -5.1, -5.0001, -5.3], "residual is .* not below 0.03"),
        ([-4.0, -3.0, -3.3, -1.1, -1.2], "add rates about it"),
    ],
)
def test_an_optimum_at_the_edge_is_no_rate(qualities, said):
    found = statistics.parabola([2.0**i for i in range(len(qualities))], qualities)
    assert found.rate is None
    assert re.search(said, found.problem)


def test_a_run_that_diverged_is_worse_and_is_not_fitted():
    with_nan = statistics.parabola([1, 2, 4, 8], [-5.2, -5.0, -5.1, math.nan])
    without = statistics.parabola([1, 2, 4], [-5.2, -5.0, -5.1])
    assert with_nan == without and with_nan.residual is None and not with_nan.problem
    assert not statistics.parabola([1, 2, 3, 4], [-6, -5.2, -5.0, math.nan]).problem
    for rates, qualities in (([1, 1, 2], [-5] * 3), ([1, 2], [-5] * 2), ([0, 1, 2], [-5] * 3)):
        with pytest.raises(ValueError, match="give one quality|takes three"):
            statistics.parabola(rates, qualities)
