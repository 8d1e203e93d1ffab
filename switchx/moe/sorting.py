# SPDX-License-Identifier: Apache-2.0
"""A stable sort of choices by expert, right also inside of `jax.shard_map`.

`jnp.argsort` and `lax.sort_key_val` there type the order they return as the same on every
device, which it is not (JAX 0.7 to 0.11, `check_vma=True`): outputs are exact, gradients of
whatever is gathered with it are wrong, and nothing is raised. Everything that sorts by
expert sorts here.
"""

import jax
import jax.numpy as jnp


def stable_order(key_R):
    """Indices that sort `key_R`, equal keys in their order."""
    index_R = jax.lax.iota(jnp.int32, key_R.shape[0])
    return jax.lax.sort((key_R, index_R), num_keys=1)[1]
