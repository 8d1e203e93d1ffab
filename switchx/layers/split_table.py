# SPDX-License-Identifier: Apache-2.0
"""The token table and the logits' matrix with rows on devices that have different tokens.

Shen et al. 2022 (SE-MoE, arXiv:2205.10034), section 4.3. `Rules.params` says so: V over axes
that split the batch too, as `("V", ("data",))`. Everywhere else, and for a batch that these
axes do not divide, the compiler is left to it. Dims: B L D V
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from switchx.partitioning.constrain import current_rules, num_devices, open_axes
from switchx.partitioning.rules import MeshAxes
from switchx.partitioning.vocab import RowOwners, look_up


def take_rows(table_VD, tokens_BL):
    """Rows of the table `[B, L, D]`, as `jnp.take`: forward and backward the same numbers."""
    if not _is_split(tokens_BL.shape[0]):
        return jnp.take(table_VD, tokens_BL, axis=0)
    mesh, rules = jax.sharding.get_abstract_mesh(), current_rules()
    axes, batch = _axes("V"), rules.axes("B", mesh, table="activations")
    owners = RowOwners(table_VD.shape[0], math.prod(mesh.shape[axis] for axis in axes))

    def local(table_VD, tokens_BL):
        table_VD = _gather(_vary(table_VD, batch), _axes("D"), axis=1)
        x_TD = look_up(
            owners.deal(table_VD, axes),
            tokens_BL.reshape(-1),
            owners,
            axes,
            factor=rules.vocab_room,
            everywhere=batch,
        )
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
    batch = current_rules().axes("B", jax.sharding.get_abstract_mesh(), table="activations")

    def local(x_BLD, weight):
        weight = _vary(weight, batch)
        for axis, letter in enumerate(dims):
            weight = _gather(weight, _axes(letter), axis=axis)
        return jnp.einsum(equation, x_BLD, weight)

    tokens, weights = PartitionSpec(batch), PartitionSpec(*map(_axes, dims))
    sharded = jax.shard_map(
        local, in_specs=(tokens, weights), out_specs=tokens, axis_names=open_axes()
    )
    return sharded(x_BLD, weight)


def _axes(letter: str) -> MeshAxes:
    """Axes of the ambient mesh that a parameter's dimension is split over."""
    mesh = jax.sharding.get_abstract_mesh()
    return current_rules().axes(letter, mesh, table="params")


def _is_split(rows: int) -> bool:
    """Whether rows of the table and `rows` of the batch are split over the same devices."""
    if num_devices() == 1:
        return False
    mesh, rules = jax.sharding.get_abstract_mesh(), current_rules()
    (batch,) = rules.spec("B", (rows,), mesh, table="activations")
    batch = (batch,) if isinstance(batch, str) else batch or ()
    return bool(set(_axes("V")) & set(batch))


def _vary(array, axes: MeshAxes):
    """The array typed as different along `axes`: backward, its gradient is summed."""
    varying = jax.typeof(array).manual_axis_type.varying
    missing = tuple(axis for axis in axes if axis not in varying)
    return jax.lax.pcast(array, missing, to="varying") if missing else array


def _gather(array, axes: MeshAxes, *, axis: int):
    return jax.lax.all_gather(array, axes, axis=axis, tiled=True) if axes else array
