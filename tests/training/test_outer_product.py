# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.training.adafactor import Adafactor
from switchx.training.optimizers import apply_updates
from switchx.training.outer_product import OuterProductGradient, OuterProductUpdate
from switchx.training.schedules import Constant


def factors(seed, *batch, rows=5, d=12, f=16, dtype=np.float32):
    random = np.random.default_rng(seed)
    x, dy = (random.normal(size=(*batch, rows, n)).astype(dtype) for n in (d, f))
    return OuterProductGradient(jnp.asarray(x), jnp.asarray(dy))


def numpy_product(gradient):
    x, dy = (np.asarray(a, np.float64) for a in (gradient.x_ERD, gradient.dy_ERF))
    return np.einsum("...rd,...rf->...df", x, dy)


@pytest.mark.parametrize("batch", [(3,), (2, 3)])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_statistics_are_those_of_the_product(batch, rows):
    gradient = factors(0, *batch, rows=rows)
    dw = numpy_product(gradient)
    assert gradient.shape == dw.shape
    np.testing.assert_allclose(gradient.dense(), dw, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradient.squared_norm(), (dw**2).sum(), rtol=1e-5)
    np.testing.assert_allclose(gradient.row_mean_squares(), (dw**2).mean(-1), rtol=1e-5)
    np.testing.assert_allclose(gradient.column_mean_squares(), (dw**2).mean(-2), rtol=1e-5)
    random = np.random.default_rng(1)
    row, column = random.normal(size=dw.shape[:-1]), random.normal(size=(*batch, dw.shape[-1]))
    scaled = row[..., None] * dw * column[..., None, :]
    arguments = [jnp.asarray(factor, jnp.float32) for factor in (row, column)]
    np.testing.assert_allclose(
        gradient.mean_squares(*arguments), (scaled**2).mean((-2, -1)), rtol=1e-5
    )
    update = gradient.scaled(*arguments)
    np.testing.assert_allclose(update.dense(jnp.zeros(dw.shape)), scaled, rtol=1e-4, atol=1e-5)


def test_it_is_the_gradient_of_an_experts_matmul():
    gradient = factors(2, 3)
    x_ERD, dy_ERF = gradient.x_ERD, gradient.dy_ERF

    def output(w_EDF):
        return jnp.einsum("ERD,EDF->ERF", x_ERD, w_EDF)

    (expected,) = jax.vjp(output, jnp.ones(gradient.shape))[1](dy_ERF)
    np.testing.assert_allclose(gradient.dense(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch", [(3,), (2, 3)])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"beta1": 0.9},
        {"weight_decay_rate": 0.01},
        {"clipping_threshold": None, "multiply_by_parameter_scale": False},
        {"min_dim_size_to_factor": 13},  # too small to factor: multiplied out
    ],
)
def test_adafactor_as_with_the_product(batch, settings):
    optimizer = Adafactor(**{"min_dim_size_to_factor": 12} | settings)
    transformation = optimizer.build(Constant(0.01))
    random = np.random.default_rng(3)
    params = {"w_in_EDF": jnp.asarray(random.normal(size=(*batch, 12, 16)), jnp.float32)}
    expected_params = params
    state = expected_state = transformation.init(params)

    @jax.jit
    def step(gradient, state, params):
        updates, state = transformation.update(gradient, state, params, gradient_scale=0.5)
        return apply_updates(params, updates), state

    for seed in range(3):
        gradient = factors(seed, *batch)
        params, state = step({"w_in_EDF": gradient}, state, params)
        expected_params, expected_state = step(
            {"w_in_EDF": gradient.dense()}, expected_state, expected_params
        )
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
            (params, state),
            (expected_params, expected_state),
        )


@pytest.mark.parametrize(
    "settings", [{}, {"decay": 0.25}, {"smallest_scale": 0.5}, {"smallest_scale": 2.0}]
)
@pytest.mark.parametrize("batch", [(3,), (2, 4)])
def test_update_of_a_few_experts_at_a_time_as_of_all_at_once(batch, settings):
    left = jnp.swapaxes(factors(4, *batch).x_ERD, -2, -1)
    right = factors(4, *batch).dy_ERF
    param = jnp.asarray(np.random.default_rng(5).normal(size=(*batch, 12, 16)), jnp.float32)
    update = OuterProductUpdate(left, right, **settings)
    rms = np.sqrt(np.mean(np.square(param), axis=(-2, -1), keepdims=True))
    scale = np.maximum(rms, settings["smallest_scale"]) if "smallest_scale" in settings else 1
    expected = param * (1 - settings.get("decay", 0)) + scale * (left @ right)
    np.testing.assert_allclose(param + update.dense(param), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        jax.jit(lambda p: update.apply_to(p))(param), expected, rtol=1e-5, atol=1e-5
    )
    mesh = jax.make_mesh((1,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        at_once = jax.jit(lambda p: update.apply_to(p))(param)
    np.testing.assert_allclose(at_once, expected, rtol=1e-5, atol=1e-5)
    half = update.apply_to(param.astype(jnp.bfloat16))
    assert half.dtype == jnp.bfloat16


def test_whole_update_is_in_place_and_never_the_size_of_the_weights():
    params = {"w_in_EDF": jnp.ones((32, 128, 256))}
    gradient = {"w_in_EDF": factors(6, 32, rows=4, d=128, f=256)}
    transformation = Adafactor().build(Constant(0.01))

    def step(params, state, gradient, is_finite):
        def update(params, state):
            updates, state = transformation.update(gradient, state, params)
            return apply_updates(params, updates), state

        return jax.lax.cond(is_finite, update, lambda *kept: kept, params, state)

    state = transformation.init(params)
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, gradient, True)
    memory = lowered.compile().memory_analysis()
    assert memory.temp_size_in_bytes < params["w_in_EDF"].nbytes / 4


def test_empty_experts_stay():
    gradient = factors(7, 2)
    empty = OuterProductGradient(gradient.x_ERD.at[0].set(0), gradient.dy_ERF)
    transformation = Adafactor(min_dim_size_to_factor=4).build(Constant(0.01))
    params = {"w_in_EDF": jnp.ones((2, 12, 16))}
    updates, state = transformation.update(
        {"w_in_EDF": empty}, transformation.init(params), params
    )
    new = apply_updates(params, updates)["w_in_EDF"]
    np.testing.assert_array_equal(new[0], 1)
    assert np.all(new[1] != 1)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(state))


def test_products_that_cancel_make_no_large_update():
    # Two rows with opposite inputs, third roots so that nothing is exact: dW is rounding.
    x = np.random.default_rng(8).normal(size=(1, 1, 128)) / 3
    dy = np.random.default_rng(9).normal(size=(1, 1, 128)) / 3
    gradient = OuterProductGradient(
        jnp.asarray(np.concatenate([x, -x * (1 + 1e-7)], 1), jnp.float32),
        jnp.asarray(np.concatenate([dy, dy], 1), jnp.float32),
    )
    params = {"w_in_EDF": jnp.ones((1, 128, 128))}
    transformation = Adafactor().build(Constant(0.01))
    updates, state = transformation.update(
        {"w_in_EDF": gradient}, transformation.init(params), params
    )
    new = apply_updates(params, updates)["w_in_EDF"]
    assert np.sqrt(np.mean(np.square(new - 1))) <= 0.01 * 1.001
    assert np.min(state.statistics["w_in_EDF"]["v_row_ED"]) > 0
