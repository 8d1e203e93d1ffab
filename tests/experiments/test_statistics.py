# SPDX-License-Identifier: Apache-2.0
"""Statistics of the experiments, against scipy, tables of others and simulation."""

import math
import re

import numpy as np
import pytest
import scipy.optimize
import scipy.stats

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
    fitted = [each for each in found if each.residual is not None]  # by all five
    spread = np.std([math.log(each.vertex) for each in fitted])
    assert 1900 < len(fitted) <= 2000
    exact = statistics.parabola(np.exp(x), -0.118 * x**2)
    assert spread == pytest.approx(exact.error, rel=0.05)
    assert exact.error / math.log(2) == pytest.approx(0.04, abs=0.005)


@pytest.mark.parametrize(
    "qualities",
    [
        [-4.135, -3.771, -3.488, -3.428, -4.444],  # dense on the first rung, as it was swept
        [-4.128, -3.669, -3.362, -3.283, -3.239, -4.979],
    ],
)
def test_a_cliff_is_fitted_about_the_best_rate(qualities):
    """Five rates leave the parabola; it goes through three, by Newton's divided differences."""
    found = statistics.parabola([0.002 * 2**i for i in range(len(qualities))], qualities)
    best = int(np.argmax(qualities))
    low, y, high = qualities[best - 1 : best + 2]
    steps = (low - high) / (2 * (low - 2 * y + high))
    assert found.vertex == pytest.approx(0.002 * 2 ** (best + steps))
    assert not found.problem and found.residual is None
    assert 0.002 * 2 ** (best - 1) < found.rate < 0.002 * 2**best


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


RANDOM = np.random.default_rng(1)
FINALS = {name: RANDOM.normal(-4 + i / 50, 0.015, 4) for i, name in enumerate("abcd")}


def test_one_variance_is_that_of_the_analysis_of_variance():
    """Of two contenders it is Student's t; the F of all contrasts is scipy's."""
    two = {name: FINALS[name] for name in "ab"}
    found = statistics.estimate(two, statistics.difference("b", "a"))
    oracle = scipy.stats.ttest_ind(two["b"], two["a"])
    bounds = oracle.confidence_interval(0.95)
    pairs = {name: values[:2] for name, values in two.items()}
    assert statistics.estimate(pairs, {"a": -1.0, "b": 1.0}).model == "one variance"
    assert found.model == "one variance" and found.p() == pytest.approx(oracle.pvalue)
    assert (found.interval().low, found.interval().high) == pytest.approx(tuple(bounds))
    # Orthogonal contrasts share the sum of squares between contenders.
    sizes = dict(zip("abcd", (2, 4, 8, 16), strict=True))
    cubic = {"a": -1.0, "b": 3.0, "c": -3.0, "d": 1.0}
    contrasts = (statistics.trend(sizes), statistics.curvature(sizes), cubic)
    each = [statistics.estimate(FINALS, weights) for weights in contrasts]
    between = np.mean([(e.mean / e.error) ** 2 for e in each])
    assert between == pytest.approx(scipy.stats.f_oneway(*FINALS.values()).statistic)
    assert {e.freedom for e in each} == {12}


def test_a_trend_is_the_slope_and_curvature_its_change():
    sizes = {f"{n} experts": n for n in (2, 4, 8, 16, 32)}
    random = np.random.default_rng(2)
    finals = {name: random.normal(-4, 0.02, 4) for name in sizes}
    # To the bit, on any CPU: a rule's digest has them.
    assert [*statistics.trend(sizes).values()] == [-0.2, -0.1, 0.0, 0.1, 0.2]
    x = np.repeat(np.log2([*sizes.values()]), 4)
    y = np.concatenate([*finals.values()])
    for weights, power in ((statistics.trend(sizes), 1), (statistics.curvature(sizes), 2)):
        assert statistics.estimate(finals, weights).mean == pytest.approx(
            power * np.polyfit(x, y, power)[0]
        )
    line = {name: [3.0 * np.log2(n) ** 2] for name, n in sizes.items()}  # gains 9, 15, 21, 27
    weights = statistics.curvature(sizes)
    assert sum(weights[name] * line[name][0] for name in sizes) == pytest.approx(6.0)
    with pytest.raises(ValueError, match="more than 2 different sizes"):
        statistics.curvature({"a": 2, "b": 4})


def test_unequal_variances_are_those_of_welch():
    finals = {"a": [0.0, 1, -1, 2, -2, 0], "b": [5.0, 45, -30, 60, -25, 9], "c": [1.0, 2, 0, 1]}
    found = statistics.estimate(finals, statistics.difference("b", "a"))
    oracle = scipy.stats.ttest_ind(finals["b"], finals["a"], equal_var=False)
    assert found.model == "Welch" and found.p() == pytest.approx(oracle.pvalue)
    bounds = oracle.confidence_interval(0.95)
    assert (found.interval().low, found.interval().high) == pytest.approx(tuple(bounds))


def test_seeds_are_blocks_where_they_matter():
    """Of two contenders that is the paired t."""
    seeds, random = np.array([0, 0.5, -0.4, 0.9, -0.8]), np.random.default_rng(3)
    finals = {name: seeds + random.normal(0, 0.02, 5) for name in "ab"}
    found = statistics.estimate(finals, statistics.difference("b", "a"))
    assert found.model == "seeds as blocks"
    assert found.p() == pytest.approx(scipy.stats.ttest_rel(finals["b"], finals["a"]).pvalue)


def test_what_is_no_contrast_is_named():
    for finals, weights in (
        (FINALS, {"a": 1.0, "e": -1.0}), (FINALS, {"a": 1.0, "b": 1.0}),
        ({"a": [1.0], "b": [1.0, 2.0]}, {"a": 1.0, "b": -1.0}),
        ({"a": [1.0, 1.0], "b": [2.0, 2.0], "c": [1.0, 3.0]}, {"a": 1.0, "b": -1.0}),
        ({"a": [1.0, math.nan], "b": [2.0, 3.0]}, {"a": 1.0, "b": -1.0}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="give (contenders|runs) of|no finite quality"):
            statistics.estimate(finals, weights)


def test_nominal_levels_are_those_of_pocock():
    """Pocock 1977, Table 1: 0.0294 and 0.0221 for two and three equal steps."""
    levels = [statistics.pocock(range(1, looks + 1)) for looks in (1, 2, 3)]
    assert levels == pytest.approx([0.05, 0.0294, 0.0221], abs=6e-5)
    assert statistics.pocock((4, 7, 10)) > levels[2]  # means that share more seeds


def test_equivalence_is_two_one_sided_tests():
    for mean in (0.0, 0.01, 0.019, 0.03, -0.03):
        values = mean + np.array([0.004, -0.006, 0.002, -0.004, 0.004])
        error = scipy.stats.sem(values)
        ps = (
            scipy.stats.ttest_1samp(values, 0.02, alternative="less").pvalue,
            scipy.stats.ttest_1samp(values, -0.02, alternative="greater").pvalue,
        )
        p = scipy.stats.ttest_1samp(values, 0).pvalue
        said = statistics.outcome(values.mean(), error, 4, 0.02, 0.03)
        want = "open"
        if max(ps) < 0.03:
            want = "equivalent"
        elif p < 0.03:
            want = "ahead" if mean > 0 else "behind"
        assert statistics.OUTCOMES[said] == want


def test_holm_and_dunnett():
    """Holm's by hand: 4 x 0.005, 3 x 0.01, then 2 x 0.03 for 0.03 and for 0.04."""
    adjusted = statistics.holm([0.01, 0.04, 0.03, 0.005])
    assert adjusted == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert statistics.holm([0.5, 0.6]) == [1, 1]
    # Dunnett 1955, breaking strength of cloth: variance 19, 8 degrees of freedom; two-sided
    # critical value 2.88 (Dunnett 1964).
    cloth = {
        "standard": [55, 47, 48], "1": [55, 64, 64], "2": [55, 49, 52], "3": [50, 44, 41],
    }  # fmt: skip
    found = statistics.dunnett(cloth, "standard")
    middles = {name: each.mean for name, (each, _) in found.items()}
    assert middles == pytest.approx({"1": 11, "2": 2, "3": -5})
    allowances = [(each.high - each.low) / 2 for each, _ in found.values()]
    assert allowances == pytest.approx([2.88 * (2 * 19 / 3) ** 0.5] * 3, rel=3e-3)
    one = statistics.dunnett({name: FINALS[name] for name in "ab"}, "a")["b"]
    assert one[1] == pytest.approx(
        scipy.stats.ttest_ind(FINALS["b"], FINALS["a"]).pvalue, abs=1e-3
    )


def test_a_ratio_of_spreads_is_fishers():
    random = np.random.default_rng(4)
    holds = 0
    for _ in range(1000):
        found = statistics.spread_ratio(random.normal(0, 2, 5), random.normal(0, 1, 6))
        holds += found.low < 2 < found.high
    assert 0.93 < holds / 1000 < 0.97
    # scipy: the 97.5% quantile for 9 and 9 degrees of freedom is 4.026, its root 2.007.
    ten = random.normal(0, 1, 10)
    assert statistics.spread_ratio(ten, ten).high == pytest.approx(2.007, abs=1e-3)


def test_a_share_of_compute_is_worth_the_slope():
    """0.42 nats for e times the compute: 5% is worth 0.42 ln 1.05."""
    lengths = {x: [-4 + 0.42 * math.log(x) + e for e in (0.01, -0.01)] for x in (0.5, 1, 2)}
    assert statistics.loss_of_compute(lengths) == pytest.approx(0.42 * math.log(1.05))
    for bad in ({1: [-4.0]}, {1: [-4.0], 2: [-4.1]}):
        with pytest.raises(ValueError, match="several lengths that gain"):
            statistics.loss_of_compute(bad)


# Standard deviations of differences in the note's tables; those of a run are smaller by 2^0.5.
WIDE, NARROW = 0.0212 / 2**0.5, 0.012 / 2**0.5


def ends(effect: float, sd: float, margin: float | None = 0.02, **more) -> dict[str, float]:
    """Of a difference at looks of 4, 7 and 10 seeds."""
    level = statistics.pocock((1, 2, 3))
    two = statistics.difference("a", "b")
    return statistics.simulate(two, effect, sd, (4, 7, 10), margin, level, **more)


def test_the_stopping_rule_errs_as_seldom_as_it_says():
    """Ahead or behind where there is nothing, and equivalent where the margin is the effect."""
    for contenders in (2, 5):
        none = ends(0.0, WIDE, margin=None, contenders=contenders)
        print(contenders, none)
        assert none["ahead"] + none["behind"] == pytest.approx(0.05, abs=0.005)
    for sd in (WIDE, NARROW):
        print(sd, at := ends(0.02, sd))
        assert 0.03 < at["equivalent"] <= 0.043


@pytest.mark.parametrize(
    ("sd", "effect", "want"),
    [
        (WIDE, 0.00, (0.02, 0.61, 0.34, 8.8)), (WIDE, 0.01, (0.23, 0.30, 0.46, 8.8)),
        (WIDE, 0.02, (0.72, 0.04, 0.24, 7.7)), (WIDE, 0.03, (0.97, 0.00, 0.03, 6.0)),
        (WIDE, 0.04, (1.00, 0.00, 0.00, 4.8)), (WIDE, 0.06, (1.00, 0.00, 0.00, 4.1)),
        (NARROW, 0.0, (0.01, 0.98, 0.00, 5.4)), (NARROW, 0.01, (0.37, 0.60, 0.02, 6.3)),
        (NARROW, 0.02, (0.96, 0.04, 0.00, 5.2)), (NARROW, 0.03, (1.00, 0.00, 0.00, 4.2)),
    ],
)  # fmt: skip
def test_power_is_that_of_the_table(sd, effect, want):
    found = ends(effect, sd, num_runs=4000)
    keys = ("ahead", "equivalent", "open", "seeds")
    assert [found[key] for key in keys] == pytest.approx(want, abs=0.03, rel=0.02)


def test_power_of_a_slope_is_that_of_the_noncentral_t():
    sizes = {str(n): n for n in (2, 4, 8, 16, 32)}
    for seeds, want in ((3, 0.50), (4, 0.65), (7, 0.89)):
        found = statistics.simulate(
            statistics.trend(sizes), 0.006, 0.0152, (seeds,), None, 0.05, num_runs=8000
        )
        freedom, error = 5 * (seeds - 1), 0.0152 / (seeds * 10) ** 0.5
        bound = scipy.stats.t.ppf(0.975, freedom)
        power = scipy.stats.nct.sf(bound, freedom, 0.006 / error)
        assert power == pytest.approx(want, abs=0.01)
        assert found["ahead"] == pytest.approx(power, abs=0.015)


@pytest.mark.parametrize(
    ("contenders", "num_runs"),
    [(5, 300), *(pytest.param(c, 20_000, marks=pytest.mark.slow) for c in (2, 5))],
)
def test_what_is_judged_errs_as_what_is_simulated(contenders, num_runs):
    """With the choice of a model of the variance, which `simulate` has not."""
    random, level, wrong = np.random.default_rng(0), statistics.pocock((1, 2)), 0
    names, two = "abcde"[:contenders], statistics.difference("b", "a")
    for values_CS in random.normal(0, WIDE, (num_runs, contenders, 7)):
        for n in (4, 7):
            of = statistics.estimate(dict(zip(names, values_CS[:, :n], strict=True)), two)
            if statistics.outcome(of.mean, of.error, of.freedom, None, level):
                wrong += 1
                break
    print(f"{num_runs} experiments: {wrong / num_runs:.4f} claims where there is nothing")
    error = (0.05 * 0.95 / num_runs) ** 0.5
    assert abs(wrong / num_runs - 0.05) < 3 * error + 0.005
