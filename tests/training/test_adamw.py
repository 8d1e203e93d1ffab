# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from switchx.optim.adamw import AdamW
from switchx.optim.protocol import apply_updates
from switchx.optim.schedules import Constant, WarmupCosine
from tests.data.refusals import refused


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_as_optax_with_a_mask():
    params = {
        "w_in_DF": normal(0, 4, 6),
        "scale_D": normal(1, 4),
        "embedding_VD": normal(2, 5, 4),
    }
    schedule = WarmupCosine(0.1, 2, 5)
    ours = AdamW(beta1=0.8, beta2=0.9, epsilon=1e-4, weight_decay=0.3).build(schedule)
    theirs = optax.adamw(
        schedule, b1=0.8, b2=0.9, eps=1e-4, weight_decay=0.3,
        mask={"w_in_DF": True, "scale_D": False, "embedding_VD": False},
    )  # fmt: skip
    state, their_state, their_params = ours.init(params), theirs.init(params), params
    for step in range(4):
        gradient = jax.tree.map(lambda w, step=step: normal(step + 3, *w.shape), params)
        updates, state = jax.jit(ours.update)(gradient, state, params)
        expected, their_state = theirs.update(gradient, their_state, their_params)
        params = apply_updates(params, updates)
        their_params = optax.apply_updates(their_params, expected)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
            params,
            their_params,
        )


def test_first_step_by_hand():
    # m = 0.1 g and v = 0.001 g^2; without bias m_hat = g, v_hat = g^2: a step of -rate *
    # (sign(g) + decay * w).
    params = {"w_in_DF": jnp.array([[2.0, -4.0]]), "scale_D": jnp.array([3.0])}
    gradient = {"w_in_DF": jnp.array([[0.5, 7.0]]), "scale_D": jnp.array([-1e-3])}
    transformation = AdamW(weight_decay=0.1).build(Constant(0.01))
    updates, _ = transformation.update(gradient, transformation.init(params), params)
    # 1 - 0.999 has a relative error of 1e-5 in float32, epsilon another in the second.
    np.testing.assert_allclose(updates["w_in_DF"], [[-0.01 * 1.2, -0.01 * 0.6]], rtol=1e-4)
    np.testing.assert_allclose(updates["scale_D"], [0.01], rtol=1e-4)


def test_bfloat16_parameters_have_float32_moments_and_updates():
    params = {"w_in_DF": jnp.ones((4, 6), jnp.bfloat16)}
    transformation = AdamW().build(Constant(0.01))
    state = transformation.init(params)
    updates, state = transformation.update(params, state, params)
    assert updates["w_in_DF"].dtype == jnp.float32
    moments = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim == 2]
    assert [leaf.dtype for leaf in moments] == [jnp.float32] * 2
    assert apply_updates(params, updates)["w_in_DF"].dtype == jnp.bfloat16


def test_gradient_scale():
    params = {"w_in_EDF": jnp.ones((2, 3, 4))}
    gradient = normal(0, 2, 3, 4)
    transformation = AdamW(epsilon=1.0).build(Constant(0.01))
    state = transformation.init(params)
    ours = transformation.update({"w_in_EDF": gradient}, state, params, gradient_scale=0.25)
    expected = transformation.update({"w_in_EDF": gradient / 4}, state, params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), ours, expected)


def test_donated_update_is_in_place():
    params = {"w_in_EDF": jnp.ones((4, 128, 256))}
    transformation = AdamW().build(Constant(0.01))

    def step(params, state, gradient, is_finite):
        def update(params, state):
            updates, state = transformation.update(gradient, state, params)
            return apply_updates(params, updates), state

        return jax.lax.cond(is_finite, update, lambda *kept: kept, params, state)

    state = transformation.init(params)
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, params, True)
    memory = lowered.compile().memory_analysis()
    assert memory.temp_size_in_bytes < params["w_in_EDF"].nbytes / 4
    assert memory.alias_size_in_bytes >= 3 * params["w_in_EDF"].nbytes


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"beta1": 1.0}, "AdamW.beta1=1.0; use 0 <= beta1 < 1"),
        ({"beta2": -0.1}, "AdamW.beta2=-0.1; use 0 <= beta2 < 1"),
        ({"epsilon": 0.0}, "AdamW.epsilon=0.0; use a number above 0"),
        ({"weight_decay": -1.0}, "AdamW.weight_decay=-1.0; use 0 or more"),
    ],
)
def test_bad_setting(setting, message):
    with refused(message):
        AdamW(**setting)


def test_bad_call():
    with pytest.raises(ValueError, match="schedule=0.1 is not a schedule"):
        AdamW().build(0.1)
    transformation = AdamW().build(Constant(0.1))
    params = {"scale_D": jnp.ones(3)}
    with pytest.raises(ValueError, match="params=None; pass the parameters"):
        transformation.update(params, transformation.init(params))
