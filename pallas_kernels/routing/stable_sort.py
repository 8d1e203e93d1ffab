# SPDX-License-Identifier: Apache-2.0
"""The one sort of the project: which index comes where, ties in their old order.

`jnp.argsort` and `lax.sort_key_val` inside `jax.shard_map` type the indices they return as
the same on every device (JAX 0.7 to 0.11): the forward pass is right, gradients that flow
through a gather by them are not, and nothing is raised. `lax.sort` of keys and indices
together types both as the keys are. Dims: G T R
"""

import jax
import jax.numpy as jnp


def stable_argsort(key):
    """int32 indices that sort `key` along its last dimension, ascending and stable."""
    index = jax.lax.broadcasted_iota(jnp.int32, key.shape, key.ndim - 1)
    return jax.lax.sort((key, index), dimension=-1, is_stable=True, num_keys=1)[1]
