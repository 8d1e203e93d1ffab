# SPDX-License-Identifier: Apache-2.0
"""Token and position embeddings, and the logits; the table may be split by rows.

Shen et al. 2022 (SE-MoE, arXiv:2205.10034), section 4.3: with `("V", ("data",))` in
`Rules.params`, or V over other axes that split the batch too, the rows of the token table and
of the logits' matrix are on devices that have different tokens. Where these axes do not divide
the batch, the compiler splits the lookup.

Dims: B batch, L length, T tokens, D model, V vocabulary, R rows of the table on
a device
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from switchx.layers.dense import normal, weight
from switchx.layers.positions import sinusoids
from switchx.partitioning.collectives import vary
from switchx.partitioning.constrain import (
    current_rules,
    gathered_where_used,
    num_devices,
    open_axes,
)
from switchx.partitioning.rules import MeshAxes
from switchx.partitioning.vocab import RowOwners, look_up


class Embedding(nnx.Module):
    """The token table or tables, positions that are added to them, and the logits."""

    def __init__(self, config, *, key):
        self.config = config
        key_tokens, key_positions, key_logits = jax.random.split(key, 3)
        V, D = config.vocab_size, config.d_model
        # T5 draws the table from normal(1.0) and divides tied logits by sqrt(D); GPT draws
        # it small and does not divide.
        stddev = 1.0 if config.scale_tied_logits or not config.tie_embeddings else 0.02
        self.embedding_VD = normal(config, key_tokens, (V, D), stddev)
        if config.separate_embeddings:
            key_encoder = jax.random.fold_in(key_tokens, 1)
            self.encoder_VD = normal(config, key_encoder, (V, D), stddev)
        if config.positions == "learned":
            self.positions_LD = normal(config, key_positions, (config.max_length, D), 0.02)
        if not config.tie_embeddings:
            self.w_logits_DV = weight(config, key_logits, (D, V), fan_in=D)

    def embed(self, tokens_BL, positions_BL, stack: str = "decoder"):
        """Rows of the stack's table `[B, L, D]` in the compute dtype, plus its positions."""
        is_own = stack == "encoder" and self.config.separate_embeddings
        table = self.encoder_VD if is_own else self.embedding_VD
        x_BLD = take_rows(table[...], tokens_BL)
        if self.config.positions == "learned":
            table_LD = self.positions_LD[...]
            # Padding may lie beyond the table.
            places_BL = jnp.clip(positions_BL, 0, len(table_LD) - 1)
            x_BLD = x_BLD + take_rows(table_LD, places_BL, "LD")
        elif self.config.positions == "sinusoidal":
            x_BLD = x_BLD + sinusoids(positions_BL, self.config.d_model).astype(x_BLD.dtype)
        return x_BLD.astype(self.config.precision.compute_dtype)

    def logits(self, x_BLD):
        """Logits `[B, L, V]` in the precision's logits dtype."""
        return project(*self.factors(x_BLD))

    def factors(self, x_BLD):
        """The logits' factors: x, scaled, in their dtype; a weight; the weight's letters."""
        dtype = jnp.dtype(self.config.precision.logits)
        x_BLD = x_BLD.astype(dtype)
        if not self.config.tie_embeddings:
            return x_BLD, self.w_logits_DV[...].astype(dtype), "DV"
        if self.config.scale_tied_logits:
            x_BLD = x_BLD * jnp.asarray(1 / math.sqrt(self.config.d_model), dtype)
        return x_BLD, self.embedding_VD[...].astype(dtype), "VD"


def take_rows(table_VD, ids_BL, dims: str = "VD"):
    """Rows of the table `[B, L, D]`, as by `jnp.take`: the same numbers forward and backward.

    Each device looks up its own rows and columns. Where columns are on devices with different
    tokens, ids are gathered and what was looked up is exchanged, as are its gradients: no
    device sees more of them than those of its part of the table.

    Args:
        dims: dimension letters of the table.
    """
    if num_devices() == 1:
        return jnp.take(table_VD, ids_BL, axis=0)
    batch = _batch_axes(len(ids_BL))
    rows, columns = _split_axes(table_VD, dims)
    is_exchanged = bool(rows) and set(rows) <= set(batch)
    is_undivided = not is_exchanged and set(rows) & set(_axes("B", "activations"))
    if is_undivided or not set(columns) <= set(batch):
        # The batch does not divide: the compiler splits the lookup.
        return jnp.take(table_VD, ids_BL, axis=0)

    def local(table_VD, ids_BL):
        table_VD = vary(table_VD, batch)
        if is_exchanged:
            return _exchanged_rows(table_VD, ids_BL, rows, columns, batch)
        return _own_rows(table_VD, ids_BL, rows, columns)

    tokens = PartitionSpec(batch or None)
    table = PartitionSpec(rows or None, columns or None)
    sharded = jax.shard_map(
        local, in_specs=(table, tokens), out_specs=tokens, axis_names=open_axes()
    )
    return sharded(table_VD, ids_BL)


def _own_rows(table_VD, ids_BL, rows: MeshAxes, columns: MeshAxes):
    """Rows of a table whose rows are all here, or on devices that have the same tokens.

    Args:
        columns: axes of D whose devices have different tokens.
    """
    ids_BL = _gather(ids_BL, columns, axis=0)
    if rows:
        block = len(table_VD)
        first = jax.lax.axis_index(rows) * block
        V = block * jax.lax.axis_size(rows)
        is_here_BL = (ids_BL >= first) & (ids_BL < first + block)
        x_BLD = jnp.take(table_VD, jnp.where(is_here_BL, ids_BL - first, 0), axis=0)
        # An id outside of the table gives a row of NaN, as `jnp.take` does.
        missing_BL = jnp.where((ids_BL >= 0) & (ids_BL < V), 0, jnp.nan).astype(x_BLD.dtype)
        x_BLD = jnp.where(is_here_BL[..., None], x_BLD, missing_BL[..., None])
    else:
        x_BLD = jnp.take(table_VD, ids_BL, axis=0)
    if columns:
        x_BLD = jax.lax.all_to_all(x_BLD, columns, split_axis=0, concat_axis=2, tiled=True)
    return jax.lax.psum(x_BLD, rows) if rows else x_BLD


def _exchanged_rows(table_VD, ids_BL, rows: MeshAxes, columns: MeshAxes, batch: MeshAxes):
    """Rows of a table whose rows are on devices with other tokens (`partitioning/vocab.py`)."""
    parts = jax.lax.axis_size(rows)
    owners = RowOwners(len(table_VD) * parts, parts)
    room = current_rules().vocab_room
    rows_RD = owners.deal(_gather(table_VD, columns, axis=1), rows)
    x_TD = look_up(rows_RD, ids_BL.reshape(-1), owners, rows, factor=room, everywhere=batch)
    return x_TD.reshape(*ids_BL.shape, -1)


def project(x_BLD, weight, dims: str):
    """`[B, L, D]` times a weight of dimensions `VD` or `DV`: logits `[B, L, V]`.

    A weight whose rows are on devices with other tokens is gathered whole for this product.
    """
    multiply = functools.partial(jnp.einsum, f"BLD,{dims}->BLV")
    if not _is_split(x_BLD.shape[0]):
        return multiply(x_BLD, _gathered_by_compiler(weight, dims))
    tokens = PartitionSpec(_batch_axes(x_BLD.shape[0]))
    return _on_own_tokens(multiply, x_BLD, weight, dims, out_specs=tokens)


def summed_over_tokens(compute, x_BLD, weight, dims: str, *of_tokens):
    """`compute(x_BLD, weight, *of_tokens, axes)`, a sum over tokens, over those of all devices.

    A device has its own tokens, and of the weight all of V or, over `axes`, a part. The
    weight's gradient is summed over devices once, whatever loops `compute` has.

    Args:
        of_tokens: `[B, L]`.
    """
    if num_devices() == 1:
        return compute(x_BLD, weight, *of_tokens, ())
    batch, split = _batch_axes(x_BLD.shape[0]), _split_axes(weight, dims)
    if not set(split[dims.index("D")]) <= set(batch):
        # Slices of D are on devices with the same tokens, as where a batch does not divide: the
        # compiler sums the weight's gradient in each iteration of a loop.
        return compute(x_BLD, _gathered_by_compiler(weight, dims), *of_tokens, ())
    axes = tuple(axis for axis in split[dims.index("V")] if axis not in batch)

    def sums(*arrays):
        return jax.lax.psum(compute(*arrays, axes), batch) if batch else compute(*arrays, axes)

    return _on_own_tokens(sums, x_BLD, weight, dims, *of_tokens, out_specs=PartitionSpec())


def _on_own_tokens(compute, x_BLD, weight, dims: str, *of_tokens, out_specs):
    """`compute` inside of a `shard_map`: each device computes it for its own tokens.

    Slices of the weight on devices with other tokens are all-gathered, and its gradient is
    reduce-scattered: as many bytes as an all-reduce of a replicated weight's gradient sends.
    """
    batch, split = _batch_axes(x_BLD.shape[0]), _split_axes(weight, dims)

    def local(x_BLD, weight, *of_tokens):
        weight = vary(weight, batch)
        for axis, axes in enumerate(split):
            others = tuple(each for each in axes if each in batch)
            weight = _gather(weight, others, axis=axis)
        return compute(x_BLD, weight, *of_tokens)

    tokens = PartitionSpec(batch or None)
    weights = PartitionSpec(*(axes or None for axes in split))
    sharded = jax.shard_map(
        local,
        in_specs=(tokens, weights, *(tokens for _ in of_tokens)),
        out_specs=out_specs,
        axis_names=open_axes(),
    )
    return sharded(x_BLD, weight, *of_tokens)


def _gathered_by_compiler(weight, dims: str):
    return gathered_where_used({f"w_{dims}": weight})[f"w_{dims}"]


def _split_axes(weight, dims: str) -> list[MeshAxes]:
    """The axes of the ambient mesh that each dimension of a weight is split over."""
    mesh, rules = jax.sharding.get_abstract_mesh(), current_rules()
    return [_entry(axes) for axes in rules.spec(dims, weight.shape, mesh, table="params")]


def _axes(letter: str, table: str = "params") -> MeshAxes:
    """Axes of the ambient mesh that a dimension is split over."""
    return current_rules().axes(letter, jax.sharding.get_abstract_mesh(), table=table)


def _entry(axes) -> MeshAxes:
    """The axes of one entry of a `PartitionSpec`."""
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def _batch_axes(rows: int) -> MeshAxes:
    """The axes of the ambient mesh that a batch of `rows` rows is split over."""
    if num_devices() == 1:
        return ()
    mesh = jax.sharding.get_abstract_mesh()
    return _entry(current_rules().spec("B", (rows,), mesh, table="activations")[0])


def _is_split(rows: int) -> bool:
    """Whether rows of the table and `rows` of the batch are split over the same devices."""
    batch = _batch_axes(rows)
    return bool(batch) and not set(batch).isdisjoint(_axes("V"))


def _gather(array, axes: MeshAxes, *, axis: int):
    return jax.lax.all_gather(array, axes, axis=axis, tiled=True) if axes else array
