# SPDX-License-Identifier: Apache-2.0
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.optim.schedules import Constant, InverseSquareRoot, LinearWarmup, WarmupCosine
from tests.data.refusals import refused


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        (Constant(1e-3), {0: 1e-3, 10**6: 1e-3}),
        # T5: 0.01 for the first 10000 steps, a tenth of it after a million.
        (InverseSquareRoot(), {0: 0.01, 1: 0.01, 10_000: 0.01, 40_000: 0.005, 10**6: 0.001}),
        (InverseSquareRoot(base=2.0, warmup_steps=4), {0: 1.0, 4: 1.0, 16: 0.5}),
        (LinearWarmup(0.5, 10), {0: 0.0, 1: 0.05, 9: 0.45, 10: 0.5, 11: 0.5, 10**6: 0.5}),
        (
            WarmupCosine(1.0, 10, 30, final=0.2),
            {
                0: 0.0,
                5: 0.5,
                10: 1.0,
                15: 0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2,
                20: 0.6,
                25: 0.2 + 0.8 * (1 - math.cos(math.pi / 4)) / 2,
                30: 0.2,
                31: 0.2,
                10**6: 0.2,
            },
        ),
    ],
)
def test_rates(schedule, rates):
    compiled = jax.jit(schedule)
    for step, rate in rates.items():
        np.testing.assert_allclose(schedule(step), rate, rtol=1e-6, atol=1e-9)
        traced = compiled(jnp.int32(step))
        np.testing.assert_allclose(traced, rate, rtol=1e-6, atol=1e-9)
        assert traced.dtype == jnp.float32
        assert traced.shape == ()


def test_a_cosine_ends_after_its_warmup():
    with refused("WarmupCosine.total_steps=10 leaves nothing after warmup_steps=10"):
        WarmupCosine(1.0, 10, 10)
