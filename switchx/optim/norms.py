# SPDX-License-Identifier: Apache-2.0
"""The global norm of the raw gradients, and what clipping by it multiplies them with.

Pascanu et al. 2013 (arXiv:1211.5063), algorithm 1.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from switchx import tree
from switchx.partitioning.constrain import current_rules
from switchx.partitioning.rules import param_spec


def global_norm(gradients) -> jax.Array:
    """Root of the sum of squares of all gradients, float32.

    As `optax.tree.norm`, whatever the dtype of the gradients.
    """
    return jnp.sqrt(sum(map(_squared_norm, jax.tree.leaves(gradients))))


def sliced_global_norm(gradients) -> jax.Array:
    """The same of gradients that devices have slices of, in one all-reduce.

    In the scope of a mesh. Left to the compiler, it is one all-reduce a parameter.
    """
    mesh, rules = jax.sharding.get_abstract_mesh(), current_rules()
    axes = rules.axes("D", mesh, table="params")
    specs = tree.map_named(
        lambda name, leaf: param_spec(rules, mesh, name, leaf.shape), gradients
    )

    def local(gradients):
        squares = {True: jnp.zeros(()), False: jnp.zeros(())}
        for leaf in jax.tree.leaves(gradients):
            is_sliced = bool(jax.typeof(leaf).manual_axis_type.varying)
            squares[is_sliced] += _squared_norm(leaf)
        return jnp.sqrt(squares[False] + jax.lax.psum(squares[True], axes))

    return jax.shard_map(local, in_specs=(specs,), out_specs=PartitionSpec())(gradients)


def clip_scale(norm, max_norm: float) -> jax.Array:
    """`min(1, max_norm / norm)`: what scales a gradient of this norm down to `max_norm`.

    Args:
        norm: the global norm; 0 gives 1, and one that is not finite must be caught before.

    """
    return jnp.minimum(1.0, max_norm / norm)


def _squared_norm(gradient):
    return jnp.sum(jnp.square(gradient.astype(jnp.float32)))
