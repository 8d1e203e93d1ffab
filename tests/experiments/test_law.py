# SPDX-License-Identifier: Apache-2.0
"""experiments/law.py: speed-ups at equal loss of made laws, and of noise."""

import numpy as np
import pytest

from experiments import law
from experiments.law import Point

FLOPS = (6e12, 1.2e13, 2.4e13, 5.6e13)


def cells(speedup: float, sd: float = 0.0, seed: int = 0):
    """Dense cells on a law, and sparse ones whose compute counts `speedup` times."""
    random = np.random.default_rng(seed)

    def points(factor):
        return [
            Point(str(flops), flops,
                  tuple(40 * (factor * flops) ** -0.1 + random.normal(0, sd, 4)))
            for flops in FLOPS
        ]  # fmt: skip

    return points(1.0), points(speedup)


def test_a_made_speedup_is_found():
    dense, sparse = cells(1.25)
    found, growth = law.speedups(dense[::-1], sparse)
    for each in found[:3]:
        assert each.ratio.mean == pytest.approx(1.25, rel=1e-6) and not each.bound
    # The largest sparse run is better than every dense one: at least 1.
    assert found[3].bound == "at least" and found[3].ratio.mean == pytest.approx(1.0)
    assert growth.mean == pytest.approx(1.0)  # that bound has no part in it
    worse, none = law.speedups(dense, cells(0.5)[1][:1])
    assert (worse[0].bound, none) == ("at most", None)
    assert worse[0].ratio.mean == pytest.approx(1.0)
    doubled = [Point(p.name, p.flops, q.losses) for p, q in zip(dense, dense[1:], strict=False)]
    both = doubled[0], sparse[2]  # 2 times, then 1.25 times, two octaves apart
    assert law.speedups(dense, both)[1].mean == pytest.approx(
        (1.25 / 2) ** (1 / np.log10(4)), rel=1e-6
    )


def test_dense_cells_on_no_law_are_read_between_neighbours():
    """Two cells before or after do not move what is read between two others."""
    dense = [
        Point(str(f), f, (v,)) for f, v in zip(FLOPS, (2.6, 2.13, 1.93, 1.86), strict=True)
    ]
    sparse = [Point("sparse", 1.2e13, ((2.13 * 1.93) ** 0.5,))]
    for part in (dense, dense[1:3]):
        ((found,), _) = law.speedups(part, sparse)
        assert found.ratio.mean == found.ratio.low == pytest.approx(2**0.5)
    # A dense run that is no better than a smaller one adds nothing.
    worse = [*dense[:3], Point("worse", 5e13, (2.0,))]
    ((found,), _) = law.speedups(worse, [Point("sparse", 1e13, (1.9,))])
    assert (found.bound, found.ratio.mean) == ("at least", pytest.approx(5.0))


def test_few_seeds_make_wide_intervals():
    points = [Point("a", 1.0, (1.0, 1.2)), Point("b", 2.0, (2.0, 2.2))]
    # sd 0.1414 of one degree of freedom, whose t is 12.71.
    np.testing.assert_allclose(law.half_widths(points), 12.706 * 0.1, rtol=1e-3)
    assert list(law.half_widths([Point("a", 1.0, (1.0,))])) == [0.0]


@pytest.mark.slow  # a simulation
def test_intervals_hold_the_true_speedup_as_often_as_they_say(monkeypatch):
    monkeypatch.setattr(law, "DRAWS", 200)
    held = []
    for seed in range(60):
        found, _ = law.speedups(*cells(1.25, sd=0.01, seed=seed))
        held.append(found[1].ratio.low < 1.25 < found[1].ratio.high)
    assert 0.85 <= np.mean(held) <= 1.0
