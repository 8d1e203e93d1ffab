# SPDX-License-Identifier: Apache-2.0
"""Token and position embeddings, and the logits; the table may be split by rows.

Shen et al. 2022 (SE-MoE, arXiv:2205.10034), section 4.3: with `("V", ("data",))` in
`Rules.params`, or V over other axes that split the batch too, the rows of the token table and
of the logits' matrix are on devices that have different tokens. Everywhere else, and for a
batch that these axes do not divide, the compiler splits the lookup.

Dims: B batch, L length, T tokens, D model, V vocabulary, R rows of the table on
a device
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from switchx.layers.dense import weight
from switchx.partitioning.collectives import vary
from switchx.partitioning.constrain import current_rules, num_devices, open_axes
from switchx.partitioning.rules import MeshAxes
from switchx.partitioning.vocab import RowOwners, look_up


class Embedding(nnx.Module):
    """The token table, learned positions where the model has them, and the logits."""

    def __init__(self, config, *, key):
        self.config = config
        key_tokens, key_positions, key_logits = jax.random.split(key, 3)
        V, D, dtype = config.vocab_size, config.d_model, config.precision.params
        # T5 draws the table from normal(1.0) and divides tied logits by sqrt(D); GPT draws
        # it small and does not divide.
        stddev = 1.0 if config.scale_tied_logits or not config.tie_embeddings else 0.02
        self.embedding_VD = nnx.Param(jax.random.normal(key_tokens, (V, D), dtype) * stddev)
        if config.positions == "learned":
            shape = (config.max_length, D)
            self.positions_LD = nnx.Param(jax.random.normal(key_positions, shape, dtype) * 0.02)
        if not config.tie_embeddings:
            self.w_logits_DV = weight(config, key_logits, (D, V), fan_in=D)

    def embed(self, tokens_BL, positions_BL):
        """Rows of the table `[B, L, D]` in the compute dtype, plus learned positions."""
        x_BLD = take_rows(self.embedding_VD[...], tokens_BL)
        if self.config.positions == "learned":
            # Padding may lie beyond the table; by default it would become NaN there.
            x_BLD = x_BLD + jnp.take(self.positions_LD[...], positions_BL, axis=0, mode="clip")
        return x_BLD.astype(self.config.precision.compute_dtype)

    def logits(self, x_BLD):
        """Logits `[B, L, V]` in the precision's logits dtype."""
        dtype = jnp.dtype(self.config.precision.logits)
        x_BLD = x_BLD.astype(dtype)
        if not self.config.tie_embeddings:
            return project(x_BLD, self.w_logits_DV[...].astype(dtype), "DV")
        if self.config.scale_tied_logits:
            x_BLD = x_BLD * jnp.asarray(1 / math.sqrt(self.config.d_model), dtype)
        return project(x_BLD, self.embedding_VD[...].astype(dtype), "VD")


def take_rows(table_VD, tokens_BL):
    """Rows of the table `[B, L, D]`, as `jnp.take`: forward and backward the same numbers."""
    if not _is_split(tokens_BL.shape[0]):
        return jnp.take(table_VD, tokens_BL, axis=0)
    mesh, rules = jax.sharding.get_abstract_mesh(), current_rules()
    axes, batch = _axes("V"), _axes("B", "activations")
    owners = RowOwners(table_VD.shape[0], math.prod(mesh.shape[axis] for axis in axes))

    def local(table_VD, tokens_BL):
        table_VD = _gather(vary(table_VD, batch), _axes("D"), axis=1)
        rows_RD, id_T = owners.deal(table_VD, axes), tokens_BL.reshape(-1)
        x_TD = look_up(rows_RD, id_T, owners, axes, factor=rules.vocab_room, everywhere=batch)
        return x_TD.reshape(*tokens_BL.shape, -1)

    specs = PartitionSpec(axes, _axes("D")), PartitionSpec(batch)
    sharded = jax.shard_map(local, in_specs=specs, out_specs=specs[1], axis_names=open_axes())
    return sharded(table_VD, tokens_BL)


def project(x_BLD, weight, dims: str):
    """`[B, L, D]` times a weight of dimensions `VD` or `DV`: logits `[B, L, V]`.

    A split weight is gathered whole for this product and its gradient reduce-scattered: the
    bytes that an all-reduce of a replicated weight's gradient sends.
    """
    equation = f"BLD,{dims}->BLV"
    if not _is_split(x_BLD.shape[0]):
        return jnp.einsum(equation, x_BLD, weight)
    batch = _axes("B", "activations")

    def local(x_BLD, weight):
        weight = vary(weight, batch)
        for axis, letter in enumerate(dims):
            weight = _gather(weight, _axes(letter), axis=axis)
        return jnp.einsum(equation, x_BLD, weight)

    tokens, weights = PartitionSpec(batch), PartitionSpec(*map(_axes, dims))
    sharded = jax.shard_map(
        local, in_specs=(tokens, weights), out_specs=tokens, axis_names=open_axes()
    )
    return sharded(x_BLD, weight)


def _axes(letter: str, table: str = "params") -> MeshAxes:
    """Axes of the ambient mesh that a dimension is split over."""
    return current_rules().axes(letter, jax.sharding.get_abstract_mesh(), table=table)


def _is_split(rows: int) -> bool:
    """Whether rows of the table and `rows` of the batch are split over the same devices."""
    if num_devices() == 1:
        return False
    mesh, rules = jax.sharding.get_abstract_mesh(), current_rules()
    (batch,) = rules.spec("B", (rows,), mesh, table="activations")
    batch = (batch,) if isinstance(batch, str) else batch or ()
    return bool(set(_axes("V")) & set(batch))


def _gather(array, axes: MeshAxes, *, axis: int):
    return jax.lax.all_gather(array, axes, axis=axis, tiled=True) if axes else array
