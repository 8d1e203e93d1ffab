# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import numpy as np
import optax

from switchx.optim.protocol import apply_updates


def test_updates_are_added_in_the_parameters_dtype():
    params = {"scale_D": jnp.array([1.0, 2.0], jnp.bfloat16), "w_in_DF": jnp.ones((1, 2))}
    updates = {"scale_D": jnp.array([0.5, 1e-3]), "w_in_DF": jnp.array([[0.25, -1.0]])}
    new = apply_updates(params, updates)
    jax.tree.map(np.testing.assert_array_equal, new, optax.apply_updates(params, updates))
    assert new["scale_D"].dtype == jnp.bfloat16
    # 2^-8 is the distance of bfloat16 values around 2: the small update is lost, as said.
    np.testing.assert_array_equal(new["scale_D"].astype(jnp.float32), [1.5, 2.0])
