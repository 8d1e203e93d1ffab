# SPDX-License-Identifier: Apache-2.0
"""Around an optimizer's update: norms, clipping, the sum, the average.

Dims: N stacked layers, E experts
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from switchx import tree
from switchx.axes import dims_of
from switchx.partitioning.constrain import current_rules
from switchx.partitioning.mesh import platform_of
from switchx.partitioning.rules import param_spec


def global_norm(gradients) -> jax.Array:
    """Root of the sum of squares of all raw gradients, float32 whatever their dtype."""
    return jnp.sqrt(sum(map(squared_norm, jax.tree.leaves(gradients))))


def sliced_global_norm(gradients) -> jax.Array:
    """The global norm of gradients that devices have slices of, by one all-reduce.

    It must be called in the scope of a mesh. The compiler alone would make one all-reduce for
    each parameter.
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
            squares[is_sliced] += squared_norm(leaf)
        return jnp.sqrt(squares[False] + jax.lax.psum(squares[True], axes))

    return jax.shard_map(local, in_specs=(specs,), out_specs=PartitionSpec())(gradients)


def clip_scale(norm, max_norm: float) -> jax.Array:
    """`min(1, max_norm / norm)`, which scales a gradient of this norm down to `max_norm`.

    Pascanu et al. 2013 (arXiv:1211.5063), algorithm 1.

    Args:
        norm: the global norm; 0 gives 1, and a non-finite one must be caught before.
    """
    return jnp.minimum(1.0, max_norm / norm)


def squared_norm(gradient):
    """The sum of squares, in float32."""
    return jnp.sum(jnp.square(gradient.astype(jnp.float32)))


def rms_by_name(params) -> dict[str, jax.Array]:
    """The root mean square of every parameter by its path, per expert, float32.

    `[N]` for stacked layers, `[E]` for a bank of experts, `[N, E]` for both, else a scalar.

    Args:
        params: parameters, or gradients or updates of them, by the parameters' names.
    """

    def rms(name: str, leaf):
        letters = dims_of(name.rpartition("/")[2], leaf.ndim)
        axes = tuple(i for i, letter in enumerate(letters) if letter not in "NE")
        return jnp.sqrt(jnp.mean(jnp.square(leaf.astype(jnp.float32)), axis=axes))

    return {name: rms(name, leaf) for name, leaf in tree.named_leaves(params).items()}


def update_if(is_finite, update, kept: tuple, unmoved) -> tuple:
    """`update(*kept)`, or `(*kept, unmoved)` if `is_finite` is false; both in place.

    On a CPU this is a conditional: XLA updates weights and moments one after another there, and
    would copy what a selection still needs. Where it updates them in one kernel, a selection
    costs nothing, and after a conditional a GPU copies the whole state (AdamW moves 1.9 times
    the ideal bytes instead of 1.1, tests/promises/optimizer_bytes.py).

    Args:
        is_finite: scalar bool.
        update: function of `kept` that returns its new values and one more value.
        kept: donated arrays, in trees.
        unmoved: that additional value for a step that is left out.
    """
    if platform_of(jax.sharding.get_abstract_mesh()) == "cpu":
        return jax.lax.cond(is_finite, update, lambda *kept: (*kept, unmoved), *kept)
    return jax.tree.map(
        lambda new, old: jnp.where(is_finite, new, old), update(*kept), (*kept, unmoved)
    )


def moved_average(average, params, decay: float):
    """`average + (1 - decay) (params - average)`, leaf by leaf, in float32.

    The exponential moving average of parameters (Polyak and Juditsky 1992; as in TensorFlow's
    `ExponentialMovingAverage` without bias correction): it begins as the first parameters. In
    this form the average of a constant is that constant.
    """
    return jax.tree.map(
        lambda a, w: a + (1.0 - decay) * (w.astype(jnp.float32) - a), average, params
    )
