# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from switchx.optim.adafactor import Adafactor
from switchx.optim.adamw import AdamW
from switchx.optim.protocol import apply_updates, state_dims
from switchx.optim.schedules import Constant


def test_updates_are_added_in_the_parameters_dtype():
    params = {"scale_D": jnp.array([1.0, 2.0], jnp.bfloat16), "w_in_DF": jnp.ones((1, 2))}
    updates = {"scale_D": jnp.array([0.5, 1e-3]), "w_in_DF": jnp.array([[0.25, -1.0]])}
    new = apply_updates(params, updates)
    jax.tree.map(np.testing.assert_array_equal, new, optax.apply_updates(params, updates))
    assert new["scale_D"].dtype == jnp.bfloat16
    # 2^-8 is the distance of bfloat16 values around 2: the small update is lost, as said.
    np.testing.assert_array_equal(new["scale_D"].astype(jnp.float32), [1.5, 2.0])


def test_state_dims_of_stacked_and_unstacked_parameters():
    params = {
        "w_in_EDF": jnp.zeros((2, 128, 128)),
        "stack": {"w_query_DHK": jnp.zeros((3, 128, 2, 64)), "scale_D": jnp.zeros((3, 128))},
    }
    state = jax.eval_shape(Adafactor(beta1=0.9).build(Constant(0.1)).init, params)
    dims = state_dims(state)
    assert dims.count == ""
    assert dims.statistics == {
        "w_in_EDF": {"v_row_ED": "ED", "v_col_EF": "EF", "momentum_EDF": "EDF"},
        "stack": {
            "w_query_DHK": {"v_row_D": "ND", "v_col_HK": "NHK", "momentum_DHK": "NDHK"},
            "scale_D": {"v_D": "ND", "momentum_D": "ND"},
        },
    }
    adam = state_dims(jax.eval_shape(AdamW().build(Constant(0.1)).init, params))
    letters = jax.tree.leaves(adam)
    assert sorted(letters) == sorted(["", "", *["EDF", "NDHK", "ND"] * 2])


def test_state_dims_of_foreign_names():
    with pytest.raises(ValueError, match="'kernel' has 2 dimensions"):
        state_dims({"kernel": jnp.zeros((2, 2))})
