# SPDX-License-Identifier: Apache-2.0
"""A vocabulary's rows split over devices that have different tokens: who has which, and the
exchange of ids and rows between them. All of it runs inside of `jax.shard_map`.

Shen et al. 2022 (SE-MoE, arXiv:2205.10034), section 4.3, Figure 9. Dims: V D T R; P devices
of the exchange, C rows that one device asks another one for
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
    """Which device answers for which row: `id mod P`, so that frequent low ids spread.

    The table is stored in order, a block of V / P rows a device, and that is what
    checkpoints see; `deal` takes the rows from there to their owners.

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
        """Rows that a device stores, and rows that it answers for."""
        return self.num_rows // self.num_parts

    @property
    def stripe(self) -> int:
        """Rows that one device deals to one owner, the last of which may be padding."""
        return math.ceil(self.block / self.num_parts)

    @property
    def places(self) -> int:
        """Rows that an owner has room for after `deal`: its own and padding."""
        return self.stripe * self.num_parts

    def of(self, id_T):
        """Owner of each id and the place of its row there, int32 `[T]` each."""
        block, offset = id_T // self.block, id_T % self.block
        return id_T % self.num_parts, block * self.stripe + offset // self.num_parts

    def deal(self, table_VD, axes: MeshAxes):
        """A device's stored block `[V / P, D]` -> the rows it answers for `[places, D]`.

        One all-to-all of the block; backward, gradients return by another one.
        """
        P, D = self.num_parts, table_VD.shape[1]
        table_VD = jnp.pad(table_VD, ((0, self.places - self.block), (0, 0)))
        table_PRD = table_VD.reshape(self.stripe, P, D).swapaxes(0, 1)
        # Row i of block b is id b * block + i, so it is not i's remainder that says who.
        first = jax.lax.axis_index(axes) * self.block
        return all_to_all(jnp.roll(table_PRD, first, axis=0), axes).reshape(-1, D)


def requests(id_T, owners: RowOwners):
    """Every token's place among the different ids that this device asks its owner for.

    Returns:
        Places `[T]`, equal for equal ids, and how many ids each owner is asked for `[P]`.
    """
    owner_T, row_T = owners.of(id_T)
    is_asked_PR = jnp.zeros((owners.num_parts, owners.places), jnp.int32)
    is_asked_PR = is_asked_PR.at[owner_T, row_T].set(1, mode="drop")
    place_PR = jnp.cumsum(is_asked_PR, axis=1) - 1
    return place_PR[owner_T, row_T], jnp.sum(is_asked_PR, axis=1)


def room_for(num_tokens: int, owners: RowOwners, factor: float) -> tuple[int, int]:
    """Rows of the buffer between two devices: what it has, and what it can ever need.

    Args:
        factor: times the even share of `num_tokens` different ids.
    """
    most = min(num_tokens, owners.block)
    return min(most, math.ceil(num_tokens / owners.num_parts * factor)), most


def look_up(
    rows_RD,
    id_T,
    owners: RowOwners,
    axes: MeshAxes,
    *,
    factor: float,
    everywhere: MeshAxes,
):
    """Rows `[T, D]` of the ids, from their owners: ids out and rows back, two all-to-alls.

    Each device asks once for an id however many of its tokens are that. Backward, gradients
    are added up by the device that asked and travel in one all-to-all. Where some device
    has more ids for one owner than its buffer has room for, all use the buffer that always
    suffices: nothing is dropped, and it costs one number to find out.

    Args:
        rows_RD: the rows that this device answers for (`RowOwners.deal`).
        id_T: ids from 0 to V - 1; one outside gives a row of NaN, as `jnp.take` does.
        axes: devices of the exchange.
        factor: see `room_for`.
        everywhere: all axes whose devices have other tokens, `axes` among them: they have
            to agree on the buffer.
    """
    is_id_T = (id_T >= 0) & (id_T < owners.num_rows)
    id_T = jnp.where(is_id_T, id_T, 0)
    place_T, asked_P = requests(id_T, owners)
    room, most = room_for(id_T.size, owners, factor)
    is_overflow = jax.lax.pmax(jnp.max(asked_P), everywhere) > room
    exchange = _Exchange(owners, axes, (room, most))
    x_TD = _rows_back(rows_RD, id_T, place_T, is_overflow, exchange)
    return jnp.where(is_id_T[:, None], x_TD, jnp.nan)


@dataclasses.dataclass(frozen=True)
class _Exchange:
    """What of an exchange is known before it is compiled."""

    owners: RowOwners
    axes: MeshAxes
    rooms: tuple[int, int]

    def with_room(self, run, is_overflow, *operands):
        """`run(room, *operands)` with the buffer that is large enough."""
        small, large = (functools.partial(run, room) for room in self.rooms)
        if self.rooms[0] == self.rooms[1]:
            return large(*operands)
        return jax.lax.cond(is_overflow, large, small, *operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _rows_back(rows_RD, id_T, place_T, is_overflow, exchange: _Exchange):
    return _forward(rows_RD, id_T, place_T, is_overflow, exchange)[0]


def _forward(rows_RD, id_T, place_T, is_overflow, exchange: _Exchange):
    owners, axes, (_, most) = exchange.owners, exchange.axes, exchange.rooms
    owner_T, row_T = owners.of(id_T)

    def run(room, rows_RD):
        nobody = jnp.full((owners.num_parts, room), owners.places, jnp.int32)
        wanted_PC = nobody.at[owner_T, place_T].set(row_T, mode="drop")
        wanted_PC = all_to_all(wanted_PC, axes)
        rows_PCD = jnp.take(rows_RD, wanted_PC, axis=0, mode="fill", fill_value=0)
        x_TD = all_to_all(rows_PCD, axes)[owner_T, place_T]
        # Kept for the backward pass, in one shape whichever buffer it was.
        padding = ((0, 0), (0, most - room))
        return x_TD, jnp.pad(wanted_PC, padding, constant_values=owners.places)

    x_TD, wanted_PC = exchange.with_room(run, is_overflow, rows_RD)
    return x_TD, (owner_T, place_T, wanted_PC, is_overflow)


def _backward(exchange: _Exchange, kept, dx_TD):
    owner_T, place_T, wanted_PC, is_overflow = kept
    owners, axes = exchange.owners, exchange.axes

    def run(room, dx_TD):
        nothing = jnp.zeros((owners.num_parts, room, dx_TD.shape[1]), dx_TD.dtype)
        drows_PCD = all_to_all(nothing.at[owner_T, place_T].add(dx_TD, mode="drop"), axes)
        drows_RD = jnp.zeros((owners.places, dx_TD.shape[1]), dx_TD.dtype)
        return drows_RD.at[wanted_PC[:, :room]].add(drows_PCD, mode="drop")

    drows_RD = exchange.with_room(run, is_overflow, dx_TD)
    zeros = (
        np.zeros(each.shape, jax.dtypes.float0) for each in (owner_T, place_T, is_overflow)
    )
    return drows_RD, *zeros


_rows_back.defvjp(_forward, _backward)
