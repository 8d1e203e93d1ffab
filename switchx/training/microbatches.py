# SPDX-License-Identifier: Apache-2.0
"""A batch cut into microbatches, and gradients summed over them and over the replicas.

Dims: B batch, M microbatches
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from switchx.models.config import ModelConfig
from switchx.moe.capacity import rows_of_groups
from switchx.partitioning.constrain import current_rules
from switchx.partitioning.replicas import replica_axes, run_on_replicas
from switchx.partitioning.rules import MeshAxes


def summed_gradients(
    gradient_of: Callable,
    config: ModelConfig,
    params,
    batch: dict,
    key,
    num_microbatches: int,
    *,
    readers: tuple[ModelConfig, ...] = (),
):
    """Gradients and measurements of the whole batch, summed once over the replicas.

    Args:
        gradient_of: function from `(params, microbatch, key)` to gradients and measurements.
        readers: other models that read the batch; their routing groups stay whole too.
    """
    rows = into_microbatches(config, batch, num_microbatches)
    keys = jax.random.split(key, num_microbatches)

    def added_up(rows, params):
        if num_microbatches == 1:
            return gradient_of(params, jax.tree.map(lambda x: x[:, 0], rows), key)
        return added_gradients(functools.partial(_add, gradient_of), params, rows, keys)

    return run_on_replicas(added_up, own_rows_axes(rows, config, *readers), rows, params)


def added_gradients(add: Callable, params, rows: dict, keys, zeros: Callable | None = None):
    """Gradients and measurements, added up over the microbatches by a loop.

    Args:
        add: function `(total, params, microbatch, key)` that returns the total with this
            microbatch's gradients added, and the microbatch's measurements.
        rows: the batch, as `into_microbatches` returns it.
        keys: one random key for each microbatch.
        zeros: function of `params` that returns the total before the first microbatch; None
            uses zeros with the parameters' shardings.
    """
    batches = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), rows)
    first = jax.tree.map(lambda x: x[0], (batches, keys))
    total = (zeros or _zeros)(params)
    _, measured = jax.eval_shape(add, total, params, *first)
    begin = total, _zeros(measured)

    def turn(carry, microbatch):
        total, measured = add(carry[0], params, *microbatch)
        return (total, jax.tree.map(jnp.add, carry[1], measured)), None

    return jax.lax.scan(turn, begin, (batches, keys))[0]


def _add(gradient_of: Callable, total, params, batch, key):
    grads, measured = gradient_of(params, batch, key)
    return jax.tree.map(jnp.add, total, grads), measured


def _zeros(tree):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)


def into_microbatches(model: ModelConfig, batch: dict, num_microbatches: int) -> dict:
    """`[B, ...]` -> `[B / M, M, ...]`: microbatch m of M is `[:, m]`.

    Every M-th row is one microbatch, so that each device of a sharded batch keeps its rows.
    If a routing group has several rows, these stay together (`rows_kept_together`): the
    microbatches then route, drop and balance as the whole batch does.
    """
    M = num_microbatches
    rows = rows_kept_together(model, batch, num_microbatches)
    batch_size = batch["decoder_segment_ids"].shape[0]

    def split(x):
        if rows > 1:  # else no row moves: a reshape alone needs no communication
            x = x.reshape(batch_size // (M * rows), M, rows, *x.shape[1:])
            x = jnp.swapaxes(x, 1, 2).reshape(batch_size, *x.shape[3:])
        return x.reshape(batch_size // M, M, *x.shape[1:])

    return jax.tree.map(split, batch)


def from_microbatches(x, rows: int):
    """`[B / M, M, ...]` -> `[B, ...]`, the inverse of `into_microbatches`.

    Args:
        rows: `rows_kept_together` of the whole batch; divides B / M, which may be that of its
            first rows only.
    """
    B, M = x.shape[0] * x.shape[1], x.shape[1]
    x = x.reshape(B // (M * rows), rows, M, *x.shape[2:])
    return jnp.swapaxes(x, 1, 2).reshape(B, *x.shape[3:])


def rows_kept_together(model: ModelConfig, batch: dict, num_microbatches: int) -> int:
    """The number of neighbouring rows of a batch that stay in one microbatch."""
    if model.switch is None:
        return 1
    names = [f"{stack}_segment_ids" for stack in sparse_stacks(model)]
    lengths = [batch[name].shape[1] for name in names]
    batch_size = batch["decoder_segment_ids"].shape[0]
    return rows_of_groups(model.switch, batch_size, lengths, num_microbatches) or 1


def own_rows_axes(rows: dict, *models: ModelConfig) -> MeshAxes:
    """The axes of the mesh in use whose devices run a microbatch's rows by themselves.

    They are the axes of replicas if each replica has whole routing groups; () if some group's
    tokens are on several replicas, and without a mesh.

    Args:
        rows: the batch, as `into_microbatches` returns it.
        models: the models that read the rows.
    """
    mesh, rules = jax.sharding.get_abstract_mesh(), current_rules()
    axes = () if rules is None else replica_axes(mesh, rules)
    number = len(rows["decoder_segment_ids"])
    parts = math.prod(mesh.shape[axis] for axis in axes)
    for model in models:
        lengths = [rows[f"{stack}_segment_ids"].shape[2] for stack in sparse_stacks(model)]
        if not has_whole_groups(model, number, lengths, parts):
            return ()
    return axes


def has_whole_groups(model: ModelConfig, rows: int, lengths: list[int], parts: int) -> bool:
    """Whether `rows` rows can be cut into parts with whole routing groups.

    Args:
        lengths: tokens of a row, in each stack that has Switch layers.
    """
    if not lengths or parts == 1:
        return rows % parts == 0
    is_one_group = model.switch.router.counts_first
    return not is_one_group and rows_of_groups(model.switch, rows, lengths, parts) is not None


def sparse_stacks(model: ModelConfig) -> list[str]:
    return [stack for stack in ("encoder", "decoder") if model.num_sparse_layers_of(stack)]
