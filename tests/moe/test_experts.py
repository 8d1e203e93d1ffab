# SPDX-License-Identifier: Apache-2.0
"""The experts against loops: equal blocks, sorted rows, one device's part; dropout, sizes."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from switchx.models.config import ModelConfig, SwitchConfig
from switchx.moe.experts import Experts
from tests.layers.weights import numbers_for, with_params
from tests.moe.oracle import activated
from tests.training.jobs import with_switch

E, R, D, F = 3, 8, 5, 7
SWITCH = SwitchConfig(E, every=1)
CONFIG = ModelConfig("decoder_only", 8, D, F, 2, 3, 1, activation="relu", switch=SWITCH)


def rows(seed=1):
    return np.random.default_rng(seed).normal(size=(E, R, D)).astype(np.float32)


def loop(x_ERD, w, activation):
    y_ERD = np.zeros(x_ERD.shape)
    for e, r in np.ndindex(*x_ERD.shape[:2]):
        x_D = x_ERD[e, r].astype(np.float64)
        h_F = x_D @ w["w_in_EDF"][e]
        gate_F = x_D @ w["w_gate_EDF"][e] if "w_gate_EDF" in w else None
        if "b_in_EF" in w:
            h_F = h_F + w["b_in_EF"][e]
        y_ERD[e, r] = activated(activation, h_F, gate_F) @ w["w_out_EFD"][e]
        if "b_out_ED" in w:
            y_ERD[e, r] += w["b_out_ED"][e]
    return y_ERD


@pytest.mark.parametrize(
    ("activation", "expert_bias"),
    [("relu", False), ("gelu", True), ("geglu", False), ("swiglu", True)],
)
def test_equals_a_loop(activation, expert_bias, key):
    config = with_switch(
        dataclasses.replace(CONFIG, activation=activation), expert_bias=expert_bias
    )
    experts = Experts(config, key=key)
    w = numbers_for(experts)
    assert ("b_in_EF" in w) == ("b_out_ED" in w) == expert_bias
    assert ("w_gate_EDF" in w) == (activation in ("geglu", "swiglu"))
    y_ERD = with_params(experts, w).weights()(jnp.asarray(rows()))
    np.testing.assert_allclose(y_ERD, loop(rows(), w, activation), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("model_rate", "expert_rate", "expected"),
    [(0.1, None, 0.1), (0.1, 0.4, 0.4), (0.1, 0.0, 0.0), (0.0, 0.4, 0.4)],
)
def test_expert_dropout_takes_the_models_rate_unless_given(
    model_rate, expert_rate, expected, key
):
    """Section 2.4, Table 4: fine-tuning uses 0.1 and, inside the experts, 0.4."""
    config = with_switch(
        dataclasses.replace(CONFIG, dropout_rate=model_rate), expert_dropout_rate=expert_rate
    )
    # The identity after a ReLU: of a row of ones, the output shows what was dropped.
    eye_EDD = jnp.tile(jnp.eye(64), (E, 1, 1))
    experts = Experts(dataclasses.replace(config, d_model=64, d_ff=64), key=key)
    experts = with_params(experts, {"w_in_EDF": eye_EDD, "w_out_EFD": eye_EDD})
    x_ERD = jnp.ones((E, 100, 64))
    np.testing.assert_array_equal(experts.weights()(x_ERD), x_ERD)
    y_ERD = np.asarray(experts.weights(key=key)(x_ERD))
    # Each entry has a mask of its own: the share is binomial over 19200 of them.
    deviation = math.sqrt(expected * (1 - expected) / y_ERD.size)
    assert abs(np.mean(y_ERD == 0) - expected) <= 5 * deviation
    np.testing.assert_allclose(y_ERD[y_ERD != 0], 1 / (1 - expected), rtol=1e-6)


def test_sizes_and_initial_deviations(key):
    """Fan-in is D or F whatever E is; F of the experts may differ from the model's."""
    config = with_switch(
        dataclasses.replace(CONFIG, d_model=48, init_scale=0.1, activation="geglu"),
        d_ff=96,
        num_experts=8,
        expert_bias=True,
    )
    params = Experts(config, key=key)
    for name, shape, fan_in in [
        ("w_in_EDF", (8, 48, 96), 48),
        ("w_gate_EDF", (8, 48, 96), 48),
        ("w_out_EFD", (8, 96, 48), 96),
    ]:
        w = np.asarray(getattr(params, name)[...])
        assert w.shape == shape
        np.testing.assert_allclose(w.std(), math.sqrt(0.1 / fan_in), rtol=0.03)
        # No two experts start alike.
        assert len({matrix.tobytes() for matrix in w}) == 8
    assert not np.any(params.b_in_EF[...]) and not np.any(params.b_out_ED[...])
    assert params.b_in_EF[...].shape == (8, 96) and params.b_out_ED[...].shape == (8, 48)
    assert Experts(CONFIG, key=key).w_in_EDF[...].shape == (E, D, F)
