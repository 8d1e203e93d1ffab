# SPDX-License-Identifier: Apache-2.0
"""A vocabulary's rows split over devices that have different tokens: owners, and the exchange.

Ids travel to the devices that have their rows, and rows travel back. All of it runs inside of
`jax.shard_map`. Shen et al. 2022 (SE-MoE, arXiv:2205.10034), section 4.3, Figure 9.
Dims: V vocabulary, D model, T tokens of a device, R rows of an owner; P devices of the
exchange, C rows that one device requests of another
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from switchx.partitioning.collectives import all_to_all
from switchx.partitioning.rules import MeshAxes


@dataclasses.dataclass(frozen=True)
class RowOwners:
    """Which device owns which row in the exchange: `id mod P`, so that frequent low ids spread.

    The table is stored in the order of the ids, V / P rows per device, and checkpoints see that
    order; `deal` takes the rows from there to their owners.

    Attributes:
        num_rows: V.
        num_parts: P.

    Raises:
        ValueError: the devices do not divide the rows.
    """

    num_rows: int
    num_parts: int

    def __post_init__(self):
        V, P = self.num_rows, self.num_parts
        if V % P:
            choices = [str(n) for n in (V - V % P, V - V % P + P) if n]
            raise ValueError(
                f"a vocabulary of V={V} rows is not divisible by the {P} devices that hold "
                f"them; use {' or '.join(choices)} rows (ids that no token has cost nothing "
                f"but their memory), or a number of devices that divides {V}"
            )

    @property
    def block(self) -> int:
        """The number of rows that a device stores, and of those that it owns."""
        return self.num_rows // self.num_parts

    @property
    def stripe(self) -> int:
        """The number of rows from one block to one owner; the last may be padding."""
        return math.ceil(self.block / self.num_parts)

    @property
    def places(self) -> int:
        """The number of rows that an owner has after `deal`: its own and padding."""
        return self.stripe * self.num_parts

    def of(self, id_T):
        """The owner of each id and the place of its row there, int32 `[T]` each."""
        block, offset = id_T // self.block, id_T % self.block
        return id_T % self.num_parts, block * self.stripe + offset // self.num_parts

    def deal(self, table_VD, axes: MeshAxes):
        """Exchanges a device's stored block `[V / P, D]` for the rows it owns `[places, D]`.

        It is one all-to-all of the block; backward, gradients return by another one.
        """
        P, D = self.num_parts, table_VD.shape[1]
        table_VD = jnp.pad(table_VD, ((0, self.places - self.block), (0, 0)))
        table_PRD = table_VD.reshape(self.stripe, P, D).swapaxes(0, 1)
        # Row i of block b is id b * block + i: its owner is not i mod P.
        first = jax.lax.axis_index(axes) * self.block
        return all_to_all(jnp.roll(table_PRD, first, axis=0), axes).reshape(-1, D)


def requests(id_T, owners: RowOwners):
    """Each token's place among the different ids that this device requests of its owner.

    Returns:
        Places `[T]`, equal for equal ids, and how many ids each owner is asked for `[P]`.
    """
    owner_T, row_T = owners.of(id_T)
    is_requested_PR = jnp.zeros((owners.num_parts, owners.places), jnp.int32)
    is_requested_PR = is_requested_PR.at[owner_T, row_T].set(1, mode="drop")
    place_PR = jnp.cumsum(is_requested_PR, axis=1) - 1
    return place_PR[owner_T, row_T], jnp.sum(is_requested_PR, axis=1)


def buffer_rows(num_tokens: int, owners: RowOwners, factor: float) -> tuple[int, int]:
    """Rows of the buffer between two devices: the usual one, and one that always suffices.

    Args:
        factor: size of the usual one, over the even share of `num_tokens` different ids.
    """
    most = min(num_tokens, owners.block)
    return min(most, math.ceil(num_tokens / owners.num_parts * factor)), most


def look_up(
    rows_RD, id_T, owners: RowOwners, axes: MeshAxes, *, factor: float, everywhere: MeshAxes
):
    """Rows `[T, D]` of the ids, from their owners: ids out and rows back, two all-to-alls.

    Each device requests an id once, however many of its tokens have it. Backward, it adds up
    their gradients and sends them in one all-to-all. If some device has more ids for one owner
    than the usual buffer holds, all devices use the one that always suffices: nothing is
    dropped, and finding out costs an all-reduce of one number.

    Args:
        rows_RD: the rows that this device owns (`RowOwners.deal`).
        id_T: ids from 0 to V - 1; one outside gives a row of NaN, as `jnp.take` does.
        axes: devices of the exchange.
        factor: see `buffer_rows`.
        everywhere: all axes whose devices have different tokens, `axes` included: their devices
            have to agree on the buffer.
    """
    is_id_T = (id_T >= 0) & (id_T < owners.num_rows)
    id_T = jnp.where(is_id_T, id_T, 0)
    place_T, requested_P = requests(id_T, owners)
    usual, most = buffer_rows(id_T.size, owners, factor)
    is_overflow = jax.lax.pmax(jnp.max(requested_P), everywhere) > usual
    exchange = _Exchange(owners, axes, (usual, most))
    x_TD = _rows_back(rows_RD, id_T, place_T, is_overflow, exchange)
    return jnp.where(is_id_T[:, None], x_TD, jnp.nan)


@dataclasses.dataclass(frozen=True)
class _Exchange:
    """The settings of an exchange that are known at tracing; `sizes` are from `buffer_rows`."""

    owners: RowOwners
    axes: MeshAxes
    sizes: tuple[int, int]

    def with_buffer(self, run, is_overflow, *operands):
        """`run(C, *operands)` with the buffer that is large enough."""
        small, large = (functools.partial(run, size) for size in self.sizes)
        if self.sizes[0] == self.sizes[1]:
            return large(*operands)
        return jax.lax.cond(is_overflow, large, small, *operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _rows_back(rows_RD, id_T, place_T, is_overflow, exchange: _Exchange):
    return _forward(rows_RD, id_T, place_T, is_overflow, exchange)[0]


def _forward(rows_RD, id_T, place_T, is_overflow, exchange: _Exchange):
    owners, axes, (_, most) = exchange.owners, exchange.axes, exchange.sizes
    owner_T, row_T = owners.of(id_T)

    def run(C, rows_RD):
        # A place without a request asks for a row past the last, which is filled with zeros.
        row_PC = jnp.full((owners.num_parts, C), owners.places, jnp.int32)
        row_PC = row_PC.at[owner_T, place_T].set(row_T, mode="drop")
        row_PC = all_to_all(row_PC, axes)
        rows_PCD = jnp.take(rows_RD, row_PC, axis=0, mode="fill", fill_value=0)
        x_TD = all_to_all(rows_PCD, axes)[owner_T, place_T]
        # Kept for the backward pass, in the same shape for either buffer.
        padding = ((0, 0), (0, most - C))
        return x_TD, jnp.pad(row_PC, padding, constant_values=owners.places)

    x_TD, row_PC = exchange.with_buffer(run, is_overflow, rows_RD)
    return x_TD, (owner_T, place_T, row_PC, is_overflow)


def _backward(exchange: _Exchange, kept, dx_TD):
    owner_T, place_T, row_PC, is_overflow = kept
    owners, axes = exchange.owners, exchange.axes

    def run(C, dx_TD):
        drows_PCD = jnp.zeros((owners.num_parts, C, dx_TD.shape[1]), dx_TD.dtype)
        drows_PCD = all_to_all(drows_PCD.at[owner_T, place_T].add(dx_TD, mode="drop"), axes)
        drows_RD = jnp.zeros((owners.places, dx_TD.shape[1]), dx_TD.dtype)
        return drows_RD.at[row_PC[:, :C]].add(drows_PCD, mode="drop")

    drows_RD = exchange.with_buffer(run, is_overflow, dx_TD)
    zeros = (
        np.zeros(each.shape, jax.dtypes.float0) for each in (owner_T, place_T, is_overflow)
    )
    return drows_RD, *zeros


_rows_back.defvjp(_forward, _backward)
