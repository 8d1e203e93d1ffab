# SPDX-License-Identifier: Apache-2.0
"""experiments/law.py: speed-ups at equal loss of made laws, and of noise."""

import numpy as np
import pytest

from experiments import law
from experiments.law import Point

FLOPS = (6e12, 1.2e13, 2.4e13, 5.6e13)


def cells(speedup: float, sd: float = 0.0, asymptote: float = 0.6, seed: int = 0):
    """Dense cells on a law, and sparse ones whose compute counts `speedup` times."""
    random = np.random.default_rng(seed)

    def points(factor):
        return [
            Point(str(flops), flops,
                  tuple(asymptote + 40 * (factor * flops) ** -0.12 + random.normal(0, sd, 4)))
            for flops in FLOPS
        ]  # fmt: skip

    return points(1.0), points(speedup)


def test_a_made_speedup_is_found():
    found, growth = law.speedups(*cells(1.25), asymptotes=(0.6,))
    for each in found[:3]:
        assert each.ratio.mean == pytest.approx(1.25, rel=1e-6) and not each.is_beyond
    # The largest sparse run is better than every dense one: at least 1.
    assert found[3].is_beyond and found[3].ratio.mean == pytest.approx(1.0)
    assert growth[0.6].mean == pytest.approx(1.0)  # that bound has no part in it
    dense, sparse = cells(1.25)
    inside, growth = law.speedups(dense, sparse[:3], asymptotes=(0.6,))
    assert growth[0.6].mean == pytest.approx(1.0)
    doubled = [Point(p.name, p.flops, q.losses) for p, q in zip(dense, dense[1:], strict=False)]
    both = doubled[0], sparse[2]  # 2 times, then 1.25 times, two octaves apart
    assert law.speedups(dense, both, (0.6,))[1][0.6].mean == pytest.approx(
        (1.25 / 2) ** (1 / np.log10(4)), rel=1e-6
    )


def test_the_asymptote_hardly_moves_what_is_interpolated():
    found, _ = law.speedups(*cells(1.25))
    for name in map(str, FLOPS[:2]):
        ratios = [each.ratio.mean for each in found if each.name == name]
        assert len(ratios) == 3 and max(ratios) / min(ratios) < 1.05


@pytest.mark.slow  # a simulation
def test_intervals_hold_the_true_speedup_as_often_as_they_say(monkeypatch):
    monkeypatch.setattr(law, "DRAWS", 200)
    held = []
    for seed in range(60):
        found, _ = law.speedups(*cells(1.25, sd=0.01, seed=seed), asymptotes=(0.6,))
        held.append(found[1].ratio.low < 1.25 < found[1].ratio.high)
    assert 0.85 <= np.mean(held) <= 1.0


def test_bad_cells_are_named():
    dense, sparse = cells(1.25)
    with pytest.raises(ValueError, match="not above asymptote=9.0"):
        law.speedups(dense, sparse, asymptotes=(9.0,))
    rising = [Point(p.name, p.flops, q.losses) for p, q in zip(dense, dense[::-1], strict=True)]
    with pytest.raises(ValueError, match="do not fall"):
        law.speedups(rising, sparse)
