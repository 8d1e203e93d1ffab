# SPDX-License-Identifier: Apache-2.0
"""experiments/grid: cells of equal FLOPs, and the effects that made the qualities."""

import math

import numpy as np
import pytest

from experiments.grid import run as grid
from experiments.ladder import R0
from experiments.pages import ROOT
from switchx.gin_config.building import job_from_gin
from switchx.models.flops import train_flops

CELLS = [(g, e) for e in grid.SPARSITIES for g in grid.GRANULARITIES]


def test_cells_have_the_same_flops_but_in_the_router():
    flops = []
    for each in grid.RUNS.contenders:
        job = job_from_gin([ROOT / R0.gin_file], ["FILES='text'", *each.bindings])
        flops.append(train_flops(job.model, *job.sequence_lengths))
    assert len({*flops}) == 1 and flops[0] > 0


def test_effects_are_those_that_made_the_qualities():
    """Quality = 0.02 log2 G - 0.005 (log2 G)^2 + 0.03 log2 E0 + 0.01 log2 G log2 E0."""
    noise_CS = np.random.default_rng(0).normal(0, 1e-6, (len(CELLS), 2))
    finals = {}
    for (g, e), each, noise_S in zip(CELLS, grid.RUNS.contenders, noise_CS, strict=True):
        x, y = math.log2(g), math.log2(e)
        mean = -3 + 0.02 * x - 0.005 * x**2 + 0.03 * y + 0.01 * x * y
        finals[each.name] = [mean + noise for noise in noise_S]
    found = [each.mean for each in grid.effects(finals).values()]
    # Over G of 1, 2, 4 a parabola's mean slope is its linear part and twice its square's.
    slopes = [0.02 - 0.01 + 0.01 * math.log2(e) for e in grid.SPARSITIES]
    wanted = [slopes[1], 0.03 + 0.01, -0.01, *slopes]
    assert found == pytest.approx(wanted, abs=1e-5)
