# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernel of both products: features on the rows of wgmma, tokens on its columns.

The tensor core takes at least 64 rows and at least 8 columns, so with the weights first
(`acc_MT = w_MK x_TK^T`) one to eight tokens of an expert cost 8 columns instead of 64 rows, and
many tokens lose nothing. One warpgroup copies (TMA), the others multiply; a ring of stages
runs through the tiles of a block without a stop, so the next tile's weights are on their way
while the last one is stored. Blocks stay on their SM and take tiles in turn.

Three variants were counted and are not implemented: a ping-pong schedule of warpgroups, whose
copies take longer than the epilogue that it hides; TMA copies of group scales into the stages'
shared memory, for which every call would transpose the scales (they are prefetched into the L2
cache); results staged in halves for a fourth stage, which takes 3% of a tile with D 1,024.
Loading weights ahead is faster only with many rows (H200, int8: 120.6 us instead of 127.4 at
256 rows, 5% slower at 4). Rows that two blocks copy once, by multicast in clusters, would help
tiles of many rows, by the count of their copies, and are not implemented.
Dims: R rows, D inputs, F outputs, E experts; P tiles of rows, T rows of a tile,
K one step of D, M features of a warpgroup,
N tiles of M features, C warpgroups that multiply, G groups of D with a scale
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.epilogue import Epilogue, finite, result_of
from pallas_kernels.grouped_matmul.gpu_schedule import (
    fits_inside,
    schedule,
    schedule_inside,
    table_shape,
)
from pallas_kernels.grouped_matmul.gpu_walk import Walk, copied_bytes, for_rows
from pallas_kernels.grouped_matmul.tile_schedule import RowTiles
from pallas_kernels.launches import record
from pallas_kernels.mosaic_gpu import Consumer, Mosaic, Ring, copy_and_multiply, erf, padded
from pallas_kernels.tiling.gpu import FEW_ROWS, STORED, Tiling

# Elements of a warpgroup's accumulators beside which a tile's scales and bias fit; with twice
# as many, gated units spill.
LOADED_BEFORE = 64 * 128
# Elements of one accumulator and a step's weights, beside which the next step's weights fit
# into a warpgroup's registers.
LOADED_AHEAD = 64 * (256 + 64)


@dataclasses.dataclass(frozen=True)
class Weights:
    """How the weights of a step get from shared memory into the tensor core.

    Attributes:
        is_depth_minor: whether the weights are `[E, F, D]`; else they are `[E, D, F]`.
        multiply: `(acc_MT, w, x_TK, scratch)` issues the products of one step; `w` is one
            warpgroup's `[M, K]` or, with features minor, `[K, M]`, or what `load` returned.
        scratch: shared memory of `multiply` for each warpgroup, name -> (shape, dtype).
        load: loads `[M, K]` into registers, so that no product reads them in shared memory and
            their place is free before they are multiplied. None if the tensor core reads
            shared memory.
        may_load_ahead: whether the weights of the next step may be carried in registers.
        depth_per_scale: channels of D that share a scale, a multiple of K; None for one
            scale, which the epilogue applies.
    """

    is_depth_minor: bool
    multiply: Callable
    scratch: dict[str, Any]
    load: Callable | None = None
    may_load_ahead: bool = False
    depth_per_scale: int | None = None


def swap_ab(
    x_RD,
    matrices,
    group_sizes_E,
    tiling: Tiling,
    weights: Weights,
    epilogue: Epilogue,
    mosaic: Mosaic,
    *,
    num_rows: int,
    name: str,
):
    """(results, end_E): the product and, with `has_residual`, the residual, `[R, F]` in the
    dtype of x; the row after each expert's last one, None if it was not computed.

    With splits, the float32 sums of each matrix instead, for the features of whole tiles: the
    kernel has as many of their parts `[splits, R, F]` as the run has tiles for, and XLA adds
    them. Only whole sums have a bias and an activation. Rows of no expert are then undefined.

    Args:
        x_RD: the rows, padded with further rows up to a multiple of 8.
        num_rows: R, the number of rows with and without a group; no more rows are written.
        matrices: one matrix, or two of a gated linear unit. A warpgroup has the same features
            of both, in an accumulator each, so that a tile of rows is copied once for both.
    """
    [w, *_] = matrices
    walk = Walk(
        tiling=tiling,
        features=w.shape[1] if weights.is_depth_minor else w.shape[2],
        depth_steps=x_RD.shape[1] // tiling.tile_k,
        num_experts=w.shape[0],
    )
    table = table_shape(num_rows, w.shape[0], tiling.tile_n)
    is_inside = fits_inside(table, tiling, x_RD.dtype, w.dtype, len(matrices))
    scheduled, end_E = [group_sizes_E], None
    if not is_inside:
        tiles, bound_B = schedule(group_sizes_E, num_rows, tiling.tile_n, mosaic)
        scheduled, end_E = list(tiles), bound_B[1 : w.shape[0] + 1]
    shape = (num_rows, walk.features)
    dtype, num_results = x_RD.dtype, 1
    if tiling.splits > 1:
        epilogue = Epilogue(scales=epilogue.scales)
        shape = (tiling.splits, num_rows, walk.stored_features)
        dtype, num_results = jnp.float32, len(matrices)
    elif epilogue.has_residual:
        num_results += len(matrices)
    extras = _operands(epilogue, tiling)
    results = [jax.ShapeDtypeStruct(shape, dtype)] * num_results
    record(
        name,
        [x_RD, *matrices, *scheduled, *extras.values()],
        results,
        functools.partial(
            copied_bytes,
            walk=walk,
            num_rows=num_rows,
            x=x_RD.dtype,
            w=w.dtype,
            num_matrices=len(matrices),
            once=[(a.shape, a.dtype) for a in [*scheduled, *extras.values()]],
            results=results,
        ),
    )
    body = functools.partial(
        _body,
        walk=walk,
        weights=weights,
        num_matrices=len(matrices),
        activation=epilogue.activation,
        extras=tuple(extras),
        num_rows=num_rows,
        mosaic=mosaic,
    )
    dtypes = x_RD.dtype, w.dtype, dtype
    run = mosaic.kernel(
        body,
        out_type=results,
        scratch_types=_scratch(
            tiling, weights, dtypes, len(matrices), table, is_inside, mosaic
        ),
        grid=tiling.num_sms,
        num_threads=tiling.warpgroups + 1,
        name=name,
    )
    results = run(x_RD, *matrices, *scheduled, *extras.values())
    if tiling.splits > 1:
        results = [walk.sum_of_parts(each, tiles) for each in results]
    return results, end_E


def _operands(epilogue: Epilogue, tiling: Tiling) -> dict:
    """The arrays of an epilogue by name, in float32, cut as the kernel reads them.

    Scales are `[E, N, M, G]`, or `[E, N, M]` with one group, a bias is `[E, N, M]`, gates are
    `[R + T]`: a tile may reach past the last row.
    """
    block = tiling.tile_m * tiling.warpgroups

    def by_warpgroup(value_EFx):
        value_EFx = padded(value_EFx.astype(jnp.float32), 1, block)
        E, F, *rest = value_EFx.shape
        rest = [] if rest == [1] else rest
        return value_EFx.reshape(E, F // tiling.tile_m, tiling.tile_m, *rest)

    named = {f"scale{i}": by_warpgroup(each) for i, each in enumerate(epilogue.scales)}
    if epilogue.bias_EF is not None:
        named["bias"] = by_warpgroup(epilogue.bias_EF)
    if (gate_R := epilogue.gate_R) is not None:
        named["gate"] = jnp.pad(gate_R.astype(jnp.float32), (0, tiling.tile_n))
    return named


def _scratch(
    tiling, weights, dtypes, num_matrices, table, is_inside: bool, mosaic: Mosaic
) -> dict:
    x_dtype, w_dtype, y_dtype = dtypes
    stages = tiling.stages
    rows = tiling.tile_n
    depth = tiling.tile_k
    groups = tiling.warpgroups
    minor = (tiling.tile_m, depth) if weights.is_depth_minor else (depth, tiling.tile_m)
    own = weights.scratch
    places = ("x",) if weights.load is None else ("x", "w")
    made = {"table_smem": plgpu.SMEM(table, jnp.int32), "is_made": plgpu.Barrier()}
    return dict(
        made=made if is_inside else {},
        x_smem=mosaic.smem((stages, rows, depth), x_dtype),
        w_smem=mosaic.smem((stages, groups, num_matrices, *minor), w_dtype),
        y_smem=mosaic.smem_of_rows(
            (groups, tiling.tile_m // STORED, rows, STORED),
            y_dtype,
            is_swizzled=tiling.splits == 1,
        ),
        # One for each copy: the rows, and every matrix's features of every warpgroup.
        full=plgpu.Barrier(num_arrivals=1 + groups * num_matrices, num_barriers=stages),
        empty={
            name: plgpu.Barrier(num_arrivals=groups, num_barriers=stages) for name in places
        },
        own={name: mosaic.smem((groups, *shape), each) for name, (shape, each) in own.items()},
    )


def _body(
    x_gmem,
    *refs,
    walk,
    weights,
    num_matrices,
    activation,
    extras,
    num_rows,
    mosaic,
    made,
    x_smem,
    w_smem,
    y_smem,
    full,
    empty,
    own,
):
    w_gmem, refs = refs[:num_matrices], refs[num_matrices:]
    if made:
        sizes_gmem, *refs = refs
        tiles = schedule_inside(
            sizes_gmem,
            **made,
            maker=walk.tiling.warpgroups,
            num_rows=num_rows,
            block=walk.tiling.tile_n,
            mosaic=mosaic,
        )
    else:
        num_fields = len(RowTiles._fields)
        tiles, refs = RowTiles(*refs[:num_fields]), refs[num_fields:]
    extra_gmem = dict(zip(extras, refs, strict=False))
    walk = walk.of_run(tiles)
    rings = {name: Ring(walk.tiling.stages, full, each) for name, each in empty.items()}
    ring, w_ring = rings["x"], rings.get("w")

    def tile_loop(warpgroup):
        return _Consumer(
            mosaic=mosaic,
            walk=walk,
            ring=ring,
            w_ring=w_ring,
            warpgroup=warpgroup,
            own={name: ref.at[warpgroup] for name, ref in own.items()},
            rows=walk.tiling.tile_n,
            tiles=tiles,
            weights=weights,
            num_matrices=num_matrices,
            extra_gmem=extra_gmem,
            activation=activation,
            results_gmem=refs[len(extras) :],
            x_smem=x_smem,
            w_smem=w_smem,
            y_smem=y_smem,
        ).compute_tile

    of_features = [extra_gmem[name] for name in extras if name.startswith(("scale", "bias"))]
    copies = _copies(
        x_gmem, w_gmem, of_features, x_smem, w_smem, rings, tiles, walk, weights, mosaic
    )
    copy_and_multiply(
        walk.tiling.warpgroups, rings.values(), copies, tile_loop, lambda: walk.turns(tiles)
    )


def _copies(
    x_gmem,
    w_gmem,
    of_features,
    x_smem,
    w_smem,
    rings,
    tiles,
    walk: Walk,
    weights: Weights,
    mosaic: Mosaic,
):
    tiling = walk.tiling
    ring = rings["x"]
    w_ring = rings.get("w")

    def copy_tile(turn, step):
        row_tile, feature_tile, split = walk.tile(turn, tiles)
        expert = tiles.expert_P[row_tile]
        start = pl.multiple_of(tiles.start_P[row_tile], 8)
        end = tiles.offset_P[row_tile] + tiles.size_P[row_tile]

        @pl.when(expert < walk.num_experts)
        def _():
            for warpgroup in range(tiling.warpgroups):
                column = feature_tile * tiling.warpgroups + warpgroup
                for each in of_features:
                    mosaic.prefetch(each.at[expert, column])

        first_step, steps = split * walk.part_steps, walk.steps(expert)

        def copy_step(k, step):
            # The weights' place is free before the rows' place: the weights come first.
            slot = (w_ring or ring).slot_to_fill(step)
            full = ring.full.at[slot]
            k_slice = pl.ds((first_step + k) * tiling.tile_k, tiling.tile_k)
            for warpgroup in range(tiling.warpgroups):
                first = (feature_tile * tiling.warpgroups + warpgroup) * tiling.tile_m
                f_slice = pl.ds(first, tiling.tile_m)
                window = (f_slice, k_slice) if weights.is_depth_minor else (k_slice, f_slice)
                for i, w in enumerate(w_gmem):
                    plgpu.copy_gmem_to_smem(
                        w.at[(expert, *window)], w_smem.at[slot, warpgroup, i], full
                    )
            if w_ring is not None:
                ring.slot_to_fill(step)
            for_rows(
                tiling,
                end,
                lambda rows: plgpu.copy_gmem_to_smem(
                    x_gmem.at[pl.ds(start, rows), k_slice],
                    x_smem.at[slot, pl.ds(0, rows)],
                    full,
                ),
            )
            return step + 1

        return lax.fori_loop(0, steps, copy_step, step)

    return copy_tile


@dataclasses.dataclass(frozen=True)
class _Tile:
    """A tile of the result, and what was loaded for it.

    Attributes:
        expert: its group.
        column, split: its place; columns are those of warpgroups.
        rows_of: function that returns start, offset and size, as in `RowTiles`.
        of_features: scales and bias of the features, in registers.
    """

    expert: Any
    column: Any
    split: Any
    rows_of: Callable
    of_features: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Consumer(Consumer):
    """A warpgroup that multiplies the first `rows` rows of tiles.

    Attributes:
        w_ring: ring of the stages of weights that are loaded into registers; None if `ring`
            has the weights' stages, too.
    """

    rows: int
    w_ring: Ring | None
    tiles: RowTiles
    weights: Weights
    num_matrices: int
    extra_gmem: dict
    activation: str | None
    results_gmem: Any
    x_smem: Any
    w_smem: Any
    y_smem: Any

    def compute_tile(self, turn, step):
        row_tile, feature_tile, split = self.walk.tile(turn, self.tiles)
        expert = self.tiles.expert_P[row_tile]
        steps = self.walk.steps(expert)
        column = feature_tile * self.walk.tiling.warpgroups + self.warpgroup
        start_P = self.tiles.start_P
        offset_P = self.tiles.offset_P
        size_P = self.tiles.size_P

        def rows_of():
            return start_P[row_tile], offset_P[row_tile], size_P[row_tile]

        def tile_of(rows_of):
            features = self._of_features(expert, column)
            return _Tile(expert, column, split, rows_of, features)

        # Before the products, which hide memory's latency, if there are registers left.
        tiling = self.walk.tiling
        is_small = self.num_matrices * tiling.tile_m * tiling.tile_n <= LOADED_BEFORE
        loaded = rows_of() if is_small else None
        tile = tile_of(lambda: loaded) if is_small else None

        def compute(rows):
            part = dataclasses.replace(self, rows=rows)
            if self.weights.depth_per_scale is not None:
                sums = part._accumulate_scaled(steps, step, expert, column, split)
            elif self.loads_ahead:
                sums = part.accumulate_ahead(
                    part.accumulators,
                    steps,
                    step,
                    part._load_ahead,
                    part._multiply,
                    number=expert,
                )
            else:
                sums = part.accumulate(part.accumulators, steps, step, part.multiply)
            part._store_results(sums, tile or tile_of(rows_of))

        for_rows(tiling, offset_P[row_tile] + size_P[row_tile], compute)
        return step + steps

    @property
    def accumulators(self) -> list[tuple[int, int]]:
        return [(self.walk.tiling.tile_m, self.rows)] * self.num_matrices

    @property
    def loads_ahead(self) -> bool:
        """Whether the next step's weights are loaded while the products of this one run.

        They are not with few rows, whose products are short: a step would take longer (by 5% on
        an H200, experiments/accelerator).
        """
        tiling = self.walk.tiling
        held = tiling.tile_m * (tiling.tile_n + tiling.tile_k)
        may_load_ahead = self.weights.may_load_ahead and self.num_matrices == 1
        return may_load_ahead and tiling.tile_n > FEW_ROWS and held <= LOADED_AHEAD

    def multiply(self, accumulators, k, slot):
        """Issues the products of one step; those from registers are done when it returns."""
        if self.w_ring is None:
            w = [self.w_smem.at[slot, self.warpgroup, i] for i in range(self.num_matrices)]
            self._multiply(accumulators, w, slot)
        else:
            self._multiply(accumulators, self._load_weights(slot), slot)
            self._release_weights(slot)
            plgpu.wgmma_wait(0)

    def _multiply(self, accumulators, weights, slot):
        x_TK = self.x_smem.at[slot, pl.ds(0, self.rows)]
        for acc, w in zip(accumulators, weights, strict=True):
            self.weights.multiply(acc, w, x_TK, self.own)

    def _load_weights(self, slot) -> list:
        places = [self.w_smem.at[slot, self.warpgroup, i] for i in range(self.num_matrices)]
        return [self.weights.load(place) for place in places]

    def _release_weights(self, slot) -> None:
        """Signals that this warpgroup has loaded the weights of a stage."""
        # The next copy into their place must come after they were read.
        plgpu.commit_smem()
        self.w_ring.release(slot)

    def _load_ahead(self, slot) -> list:
        loaded = self._load_weights(slot)
        self._release_weights(slot)
        return loaded

    def _accumulate_scaled(self, steps, first_step, expert, column, split):
        """The accumulators with a scale for each group of D, applied to each step's own sum."""
        walk = self.walk
        per_group = self.weights.depth_per_scale // walk.tiling.tile_k
        names = [f"scale{i}" for i in range(self.num_matrices)]
        some_expert = lax.min(expert, jnp.int32(walk.num_experts - 1))

        def scales_of(k):
            group = lax.div(split * walk.part_steps + k, per_group)
            index = (some_expert, column, slice(None), group)
            return [self._load(self.extra_gmem[name].at[index], axis=0) for name in names]

        def multiply(k, carry):
            totals, scales = carry
            # The next step's scales, on their way during this one's products.
            next_scales = scales_of(lax.min(k + 1, walk.part_steps - 1))
            slot = self.ring.slot(first_step + k)

            def once(*accumulators):
                self.ring.wait_until_full(slot)
                self.multiply(accumulators, k, slot)
                return [acc[...] for acc in accumulators]

            parts = pl.run_scoped(once, *map(plgpu.ACC, self.accumulators))
            self.ring.release(slot)
            totals = [
                total_MT + part_MT * self._down_rows(scale_M)
                for total_MT, part_MT, scale_M in zip(totals, parts, scales, strict=True)
            ]
            return totals, next_scales

        zero_MT = jnp.zeros((walk.tiling.tile_m, self.rows), jnp.float32)
        zero_MT = self.mosaic.as_layout(zero_MT, plgpu.Layout.WGMMA)
        first = [zero_MT] * self.num_matrices, scales_of(0)
        return lax.fori_loop(0, steps, multiply, first)[0]

    def _down_rows(self, value_M):
        """Values of this warpgroup's features, down the rows of the accumulator."""
        return lax.broadcast_in_dim(value_M, (self.walk.tiling.tile_m, self.rows), [0])

    def _of_features(self, expert, column) -> dict[str, Any]:
        """The bias of a tile, and the scales that the epilogue applies."""
        return {
            name: self._vector_of_features(name, expert, column)
            for name in self.extra_gmem
            if name == "bias" or (name != "gate" and self.weights.depth_per_scale is None)
        }

    def _vector_of_features(self, name, expert, column):
        """Values of this warpgroup's features by name; zero for tiles of no expert."""
        # Another expert's values are loaded and dropped. Not a `lax.cond`: inside
        # `jax.shard_map` the type of a loaded value names mesh axes, that of a zero does not.
        some_expert = lax.min(expert, jnp.int32(self.walk.num_experts - 1))
        value_M = self._load(self.extra_gmem[name].at[some_expert, column], axis=0)
        return self._if_used(expert, value_M, axis=0)

    def _if_used(self, expert, value, axis):
        """Values along an axis of the accumulator; zeros for the rows of no expert."""
        zero = jnp.zeros(value.shape, jnp.float32)
        zero = self.mosaic.as_layout(zero, plgpu.Layout.WGMMA.reduce(1 - axis))
        is_used = lax.broadcast(expert < self.walk.num_experts, zero.shape)
        return lax.select(is_used, value, zero)

    def _load(self, ref, axis):
        return self.mosaic.load(ref, plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False)

    def _store_results(self, sums, tile: "_Tile"):
        """Stores the residual, then the result; with splits the sums, scaled."""
        store = functools.partial(self._store, tile=tile)
        if "scale0" in tile.of_features:
            sums = [
                acc_MT * self._down_rows(tile.of_features[f"scale{i}"])
                for i, acc_MT in enumerate(sums)
            ]
        if self.walk.tiling.splits > 1:
            for parts_gmem, acc_MT in zip(self.results_gmem, sums, strict=True):
                store(parts_gmem, acc_MT)
            return
        z_MT, *others = sums
        if "bias" in tile.of_features:
            z_MT = z_MT + self._down_rows(tile.of_features["bias"])
        y_gmem, *residual_gmem = self.results_gmem
        # Before the result takes registers.
        for residual, value_MT in zip(residual_gmem, [z_MT, *others], strict=False):
            store(residual, finite(value_MT, self.y_smem.dtype))
        y_MT = result_of(self.activation, (z_MT, *others), erf)
        if "gate" in self.extra_gmem:
            start, _, _ = tile.rows_of()
            rows = pl.ds(pl.multiple_of(start, 8), self.rows)
            gate_T = self._load(self.extra_gmem["gate"].at[rows], axis=1)
            gate_T = self._if_used(tile.expert, gate_T, axis=1)
            y_MT = y_MT * lax.broadcast_in_dim(gate_T, y_MT.shape, [1])
        store(y_gmem, y_MT)

    def _store(self, y_gmem, y_MT, *, tile: "_Tile"):
        # The last tile has left shared memory before this one overwrites it.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        y_MT = y_MT.astype(self.y_smem.dtype)
        if self.walk.tiling.splits > 1:
            y_gmem = y_gmem.at[tile.split]
        y_MT = self.mosaic.as_layout(y_MT, plgpu.Layout.WGMMA_TRANSPOSED)
        for chunk in range(self.y_smem.shape[1]):
            y_smem = self.y_smem.at[self.warpgroup, chunk, pl.ds(0, self.rows)]
            self.mosaic.store_transposed(y_smem, y_MT[chunk * STORED : (chunk + 1) * STORED])
        plgpu.commit_smem()
        self._copy_group(y_gmem, tile)
        plgpu.commit_smem_to_gmem_group()

    def _copy_group(self, y_gmem, tile: "_Tile"):
        """Copies the group's rows of a tile and no others.

        A copy has a fixed number of rows: one of 2^i rows for each bit of their number.
        """
        start, offset, size = tile.rows_of()
        length = 1 << (self.rows.bit_length() - 1)
        while length:

            @pl.when((size & length) != 0)
            def _(length=length, offset=offset):
                self._copy_rows(y_gmem, start + offset, offset, length, tile.column)

            offset = offset + (size & length)
            length //= 2

    def _copy_rows(self, y_gmem, first, offset, length, column):
        chunks = self.y_smem.shape[1]
        for chunk in range(chunks):
            features = pl.ds((column * chunks + chunk) * STORED, STORED)
            plgpu.copy_smem_to_gmem(
                self.y_smem.at[self.warpgroup, chunk, pl.ds(offset, length)],
                y_gmem.at[pl.ds(first, length), features],
                commit_group=False,
            )
