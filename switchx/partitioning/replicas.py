# SPDX-License-Identifier: Apache-2.0
"""Replicas: devices with copies of all parameters and rows of their own, each run by itself.

A reduction inside of a loop over microbatches or ticks is not moved out of it by XLA, so
gradients would cross the wire in every iteration. `run_on_replicas` makes the axes of replicas
manual around the loop and sums its results once. Inside, the rules do not know these axes,
and all shapes are those of one replica. Random numbers are drawn here, since those of a row
are the same wherever the row is.
Dims: B rows (or routing groups, in their order)
"""

import contextlib
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from switchx.partitioning.constrain import current_rules, use_rules
from switchx.partitioning.optimizer_slices import is_scattered, scattered_sums
from switchx.partitioning.rules import MeshAxes, Rules

# A user context, so that a program that was traced on other axes is traced again.
_axes = jax.make_user_context(())


def replica_axes(mesh, rules: Rules) -> MeshAxes:
    """The axes of the batch along which no parameter is split."""
    tables = rules.params, rules.expert_params
    split = {axis for table in tables for _, axes in table for axis in axes}
    batch = rules.axes("B", mesh, table="activations")
    return tuple(axis for axis in batch if axis not in split)


@contextlib.contextmanager
def on_own_rows(axes: MeshAxes):
    """Inside of a `shard_map` over `axes`: each of its devices has rows of its own.

    The rules inside of the block are those of the axes that are left. A `shard_map` within
    another one numbers only its own devices: `jax.lax.axis_index` of an outer axis would make
    what it touches vary along that axis, and gradients be summed over it. So a key that enters
    it is first made this replica's own, by `own_key`.
    """
    with _axes(axes), use_rules(current_rules().without(axes)):
        yield


def run_on_replicas(function: Callable, axes: MeshAxes, rows, others):
    """`function(rows, others)` on every replica with its rows, and the sum of what they return.

    If an optimizer has slices along `axes`, `function` returns a pair whose first part is the
    gradients by their parameters' names: these are reduce-scattered to the slices.

    Differentiate inside of `function`, not from outside: gradients that `function` returns
    cross `axes` once. Inside, nothing that is differentiated may be summed over `axes`, since
    its gradient would be summed once more.

    Args:
        axes: mesh axes that `replica_axes` returns; with () the function runs as it is.
        rows: arrays `[B, ...]`.
        others: arrays that all replicas hold.
    """
    if not axes:
        return function(rows, others)

    whole, has_slices = PartitionSpec(), is_scattered(axes)

    def body(rows, others):
        with on_own_rows(axes):
            result = function(rows, others)
        if not has_slices:
            return jax.lax.psum(result, axes)
        gradients, measured = result
        return jax.tree.map(lambda g: g[None], gradients), jax.lax.psum(measured, axes)

    sharded = jax.shard_map(
        body,
        in_specs=(PartitionSpec(axes), whole),
        out_specs=(PartitionSpec(axes), whole) if has_slices else whole,
        axis_names=set(axes),
        check_vma=False,
    )
    if not has_slices:
        return sharded(rows, others)
    gradients, measured = sharded(rows, others)
    return scattered_sums(gradients, axes), measured


def replica_number():
    """This replica's place among them, in the order of the batch's rows; 0 outside."""
    return jax.lax.axis_index(_axes.value) if _axes.value else 0


def random_rows(draw: Callable, key, shape):
    """`draw(key_b, shape[1:])` for each row b of the whole batch, of which `shape` is a part.

    A row's numbers depend only on its place in the batch, and on no mesh.

    Args:
        draw: function with the arguments of `jax.random.uniform`.
        key: random key of all rows.
        shape: shape of this replica's array, `[B, ...]`.
    """
    number_B = replica_number() * shape[0] + jnp.arange(shape[0])
    key_B = jax.vmap(functools.partial(jax.random.fold_in, key))(number_B)
    return jax.vmap(lambda key: draw(key, shape[1:]))(key_B)


def own_key(key):
    """The key of this replica, for a `shard_map` within it; the same one outside."""
    return key if key is None or not _axes.value else jax.random.fold_in(key, replica_number())
