# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.training.adafactor import Adafactor
from switchx.training.dense_gradient import DenseGradient
from switchx.training.factoring import factoring_of
from switchx.training.gradient_norm import global_norm
from switchx.training.optimizers import apply_updates
from switchx.training.schedules import Constant


@pytest.mark.parametrize(
    ("name", "shape", "batch", "matrix"),
    [
        ("w_in_EDF", (2, 3, 4), (2,), (3, 4)),
        ("w_out_EFD", (5, 2, 3, 4), (5, 2), (3, 4)),
        ("w_query_DHK", (3, 2, 4), (), (3, 8)),
        ("w_out_HKD", (5, 2, 3, 4), (5,), (6, 4)),
    ],
)
def test_means_and_products_as_numpy(name, shape, batch, matrix):
    random = np.random.default_rng(0)
    factoring = factoring_of(name, shape, 1)
    g = random.normal(size=shape)
    gradient = DenseGradient(jnp.asarray(g, jnp.float32), factoring)
    matrices = g.reshape(*batch, *matrix)
    row, column = (
        random.normal(size=(*batch, matrix[0])),
        random.normal(size=(*batch, matrix[1])),
    )
    # Statistics keep H and K apart.
    row_shape = [n for axis, n in enumerate(shape) if axis not in factoring.columns]
    column_shape = [n for axis, n in enumerate(shape) if axis not in factoring.rows]

    def agrees(ours, expected, shape):
        np.testing.assert_allclose(ours, expected.reshape(shape), rtol=2e-6)

    agrees(gradient.row_mean_squares(), (matrices**2).mean(-1), row_shape)
    agrees(gradient.column_mean_squares(), (matrices**2).mean(-2), column_shape)
    scaled = row[..., :, None] * matrices * column[..., None, :]
    factors = row.reshape(row_shape), column.reshape(column_shape)
    factors = [jnp.asarray(factor, jnp.float32) for factor in factors]
    agrees(gradient.mean_squares(*factors), (scaled**2).mean((-2, -1)), batch)
    agrees(gradient.scaled(*factors), scaled, shape)


@pytest.mark.parametrize("name", ["w_in_EDF", "w_query_DHK"])
def test_update_needs_no_memory_of_the_gradients_size(name):
    # Whether the norm is taken in the same computation or not: XLA shares the squares of
    # any two sums that it can, by writing them out.
    params = {name: jnp.ones((4, 128, 256) if name == "w_in_EDF" else (256, 4, 128))}
    transformation = Adafactor().build(Constant(0.01))

    def step(params, state, gradients):
        updates, state = transformation.update(gradients, state, params)
        return apply_updates(params, updates), state, global_norm(gradients)

    compiled = (
        jax.jit(step, donate_argnums=(0, 1))
        .lower(params, transformation.init(params), params)
        .compile()
    )
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary < params[name].nbytes / 4
