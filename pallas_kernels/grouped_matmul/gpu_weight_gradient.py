# SPDX-License-Identifier: Apache-2.0
"""The weights' gradient on Hopper: `dw_e = x_e^T dy_e`, contracted over each expert's rows.

The rows of an expert are a range of any length at any place. Steps of K rows start at a
multiple of 8; where the first or the last step reaches into a neighbour, its rows are set to
zero in both operands (a NaN of another expert times zero would be a NaN), and only there. x is
read transposed by the tensor core itself.
Dims: R rows, D inputs, F outputs, E experts; K rows of a step, M of D of a warpgroup,
N of F of a tile
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.gpu_schedule import schedule
from pallas_kernels.grouped_matmul.tile_schedule import ROW_ALIGNMENT
from pallas_kernels.launches import Cache, num_bytes, record
from pallas_kernels.mosaic_gpu import (
    copy_and_multiply,
    load_as,
    mosaic_gpu_kernel,
    release_before,
    tiled_smem,
    transposed,
    turns_of,
)
from pallas_kernels.sorted_rows import group_bounds
from pallas_kernels.tiling.gpu import Tiling, checked, fitted, sm_count, tile_of_rows

# Columns that are masked or stored at a time.
CHUNK = 64


def default_tiling(D: int, F: int) -> Tiling:
    tile_n = 256 if F % 256 == 0 or F > 512 else 128 if F >= 128 else 64
    return Tiling(tile_m=64, tile_n=tile_n, tile_k=64, stages=3, panel=8)


def weight_gradient(x_RD, dy_RF, group_sizes_E, *, out_dtype, tiling, interpret):
    """`[E, D, F]` in `out_dtype`, of bfloat16 or float16 rows; D and F multiples of 64.

    Raises:
        ValueError: the tiling cannot run.
    """
    (num_rows, D), F = x_RD.shape, dy_RF.shape[1]
    tiling = _tiling(tiling, D, F, x_RD.dtype, out_dtype)
    tile_d = tiling.tile_m * tiling.warpgroups
    row_block = num_rows + (tiling.tile_k if interpret else 0)
    row_block += -row_block % ROW_ALIGNMENT
    # Only interpreted do copies out of bounds need something there.
    d_block, f_block = (-D % tile_d, -F % tiling.tile_n) if interpret else (0, 0)
    x_RD = jnp.pad(x_RD, ((0, row_block - num_rows), (0, d_block)))
    dy_RF = jnp.pad(dy_RF, ((0, row_block - num_rows), (0, f_block)))

    # Of tiles as the product of these rows has them: its schedule is this one.
    E = group_sizes_E.shape[0]
    _, bound_B = schedule(
        group_sizes_E, num_rows, tile_of_rows(num_rows, E), interpret=interpret
    )
    walk = _Walk(
        tiling=dataclasses.replace(tiling, num_sms=tiling.num_sms or sm_count(interpret)),
        num_experts=E,
        D=x_RD.shape[1],
        F=dy_RF.shape[1],
    )
    result = jax.ShapeDtypeStruct((walk.num_experts, walk.D, walk.F), out_dtype)
    operands = x_RD, dy_RF, bound_B
    record(
        "grouped_matmul_weight_gradient", operands, [result],
        functools.partial(_copied, walk=walk, num_rows=num_rows, x=x_RD.dtype, result=result),
    )  # fmt: skip
    run = mosaic_gpu_kernel(
        functools.partial(_body, walk=walk, interpret=interpret),
        out_type=[result],
        scratch_types=_scratch(tiling, x_RD.dtype, out_dtype, interpret),
        grid=walk.tiling.num_sms,
        num_threads=tiling.warpgroups + 1,
        interpret=interpret,
        name="grouped_matmul_weight_gradient",
    )
    [dw_EDF] = run(*operands)
    return dw_EDF[:, :D, :F]


def _tiling(tiling: Tiling | None, D: int, F: int, dtype, out_dtype) -> Tiling:
    """The tiling, or the default one, with two chunks of results in shared memory."""
    first = tiling or default_tiling(D, F)
    size = jnp.dtype(out_dtype).itemsize
    stored_bytes = first.warpgroups * 2 * first.tile_m * CHUNK * size
    if tiling is None:
        return fitted(first, dtype, dtype, 4, stored_bytes)
    return checked(tiling, tiling.tile_k, dtype, dtype, stored_bytes)


def _scratch(tiling: Tiling, dtype, out_dtype, interpret: bool) -> dict:
    m, n, k, groups = tiling.tile_m, tiling.tile_n, tiling.tile_k, tiling.warpgroups

    smem = functools.partial(tiled_smem, interpret=interpret)
    return dict(
        x_smem=smem((tiling.stages, groups, k, m), dtype),
        # In chunks of columns, which are masked one by one.
        dy_smem=smem((tiling.stages, k, n), dtype),
        dw_smem=smem((groups, 2, m, CHUNK), out_dtype),
        full=plgpu.Barrier(num_arrivals=1 + groups, num_barriers=tiling.stages),
        empty=plgpu.Barrier(num_arrivals=groups, num_barriers=tiling.stages),
        masked=plgpu.Barrier(num_arrivals=groups),
        own=[smem((groups, m, k), dtype)] if interpret else [],
    )


@dataclasses.dataclass(frozen=True)
class _Walk:
    """The order in which the blocks of the GPU take tiles of the experts' gradients."""

    tiling: Tiling
    num_experts: int
    D: int
    F: int

    @property
    def tiles(self) -> tuple[int, int]:
        return pl.cdiv(self.D, self.tiling.tile_m * self.tiling.warpgroups), pl.cdiv(
            self.F, self.tiling.tile_n
        )

    def turns(self):
        return turns_of(self.num_experts * math.prod(self.tiles), self.tiling.num_sms)

    def tile(self, turn):
        """(expert, tile of D, tile of F): panels of F, all of D in each."""
        return self.place(lax.axis_index("sm") + turn * self.tiling.num_sms)

    def rows(self, bound_gmem, expert):
        """(first, begin, end, steps): the first step's first row, relative to it the expert's
        first row and the one after its last, and how many steps they take."""
        first_row, end_row = bound_gmem[expert], bound_gmem[expert + 1]
        first = first_row & -ROW_ALIGNMENT
        steps = lax.div(
            end_row - first + (self.tiling.tile_k - 1), jnp.int32(self.tiling.tile_k)
        )
        steps = lax.select(end_row > first_row, steps, 0)
        return first, first_row - first, end_row - first, steps

    def place(self, index):
        """(expert, tile of D, tile of F) of the index-th tile of all blocks."""
        d_tiles, f_tiles = self.tiles
        expert = lax.div(index, d_tiles * f_tiles)
        rest = index - expert * (d_tiles * f_tiles)
        panel = min(self.tiling.panel, f_tiles)
        which = lax.div(rest, d_tiles * panel)
        rest = rest - which * (d_tiles * panel)
        width = lax.min(jnp.int32(panel), f_tiles - which * panel)
        d_tile = lax.div(rest, width)
        return expert, d_tile, which * panel + rest - d_tile * width


def _copied(group_sizes_E, *, walk: _Walk, num_rows: int, x, result):
    """Bytes of each operand and result, from and to memory behind a `launches.Cache`."""
    tiling, cache = walk.tiling, Cache()
    begin_E, end_E = map(np.asarray, group_bounds(jnp.asarray(group_sizes_E), num_rows))
    first_E = begin_E // ROW_ALIGNMENT * ROW_ALIGNMENT
    steps_E = np.where(end_E > begin_E, -(-(end_E - first_E) // tiling.tile_k), 0)
    total = walk.num_experts * math.prod(walk.tiles)
    places = jax.vmap(walk.place)(jnp.arange(total, dtype=jnp.int32))
    tile_d, read = tiling.tile_m * tiling.warpgroups, [0, 0]
    for expert, *tile in zip(*map(np.asarray, places), strict=True):
        for i, width in enumerate((tile_d, tiling.tile_n)):
            rows = min(int(steps_E[expert]) * tiling.tile_k, num_rows - int(first_E[expert]))
            read[i] += cache.read((i, expert, tile[i]), num_bytes((rows, width), x))
        block = num_bytes((tile_d, tiling.tile_n), result.dtype)
        cache.write(("dw", expert, *tile), block)
    return [*read, num_bytes((walk.num_experts + 1,), jnp.int32)], [
        num_bytes(result.shape, result.dtype)
    ]


def _body(
    x_gmem, dy_gmem, bound_gmem, dw_gmem, *, walk, interpret,
    x_smem, dy_smem, dw_smem, full, empty, masked, own,
):  # fmt: skip
    def tile_loop(warpgroup):
        return _Consumer(
            walk=walk, bound_gmem=bound_gmem, dw_gmem=dw_gmem, x_smem=x_smem, dy_smem=dy_smem,
            dw_smem=dw_smem, full=full, empty=empty, masked=masked,
            own=own[0].at[warpgroup] if own else None, warpgroup=warpgroup,
            interpret=interpret,
        ).compute_tile  # fmt: skip

    copy_and_multiply(
        walk.tiling.warpgroups,
        walk.tiling.stages,
        empty,
        _copies(x_gmem, dy_gmem, bound_gmem, x_smem, dy_smem, full, empty, walk),
        tile_loop,
        walk.turns,
    )


def _copies(x_gmem, dy_gmem, bound_gmem, x_smem, dy_smem, full, empty, walk):
    tiling = walk.tiling
    k = tiling.tile_k

    def copy_tile(turn, step):
        expert, d_tile, f_tile = walk.tile(turn)
        first, _, _, steps = walk.rows(bound_gmem, expert)

        def copy_step(i, step):
            slot = lax.rem(step, tiling.stages)
            pl.when(step >= tiling.stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
            rows = pl.ds(pl.multiple_of(first + i * k, ROW_ALIGNMENT), k)
            f_slice = pl.ds(f_tile * tiling.tile_n, tiling.tile_n)
            plgpu.copy_gmem_to_smem(dy_gmem.at[rows, f_slice], dy_smem.at[slot], full.at[slot])
            for warpgroup in range(tiling.warpgroups):
                d = (d_tile * tiling.warpgroups + warpgroup) * tiling.tile_m
                plgpu.copy_gmem_to_smem(
                    x_gmem.at[rows, pl.ds(d, tiling.tile_m)],
                    x_smem.at[slot, warpgroup],
                    full.at[slot],
                )
            return step + 1

        return lax.fori_loop(0, steps, copy_step, step)

    return copy_tile


@dataclasses.dataclass(frozen=True)
class _Consumer:
    """One warpgroup that multiplies."""

    walk: _Walk
    bound_gmem: Any
    dw_gmem: Any
    x_smem: Any
    dy_smem: Any
    dw_smem: Any
    full: Any
    empty: Any
    masked: Any
    own: Any
    warpgroup: Any
    interpret: bool

    def compute_tile(self, turn, first_step):
        expert, d_tile, f_tile = self.walk.tile(turn)
        tiling = self.walk.tiling
        stages, k = tiling.stages, tiling.tile_k
        _, begin, end, steps = self.walk.rows(self.bound_gmem, expert)

        def accumulate(acc):
            def multiply(i, step):
                slot = lax.rem(step, stages)
                plgpu.barrier_wait(self.full.at[slot])
                is_edge = (i * k < begin) | ((i + 1) * k > end)
                pl.when(is_edge)(lambda: self._mask(slot, begin - i * k, end - i * k))
                x_MK = transposed(
                    self.x_smem.at[slot, self.warpgroup], self.own, self.interpret
                )
                plgpu.wgmma(acc, x_MK, self.dy_smem.at[slot])
                plgpu.wgmma_wait(1)
                pl.when(i > 0)(lambda: release_before(self.empty, step, stages))
                return step + 1

            end_step = lax.fori_loop(0, steps, multiply, first_step)
            result = acc[...]
            pl.when(steps > 0)(lambda: release_before(self.empty, end_step, stages))
            return result

        dw_MN = pl.run_scoped(accumulate, plgpu.ACC((tiling.tile_m, tiling.tile_n)))
        row = (d_tile * tiling.warpgroups + self.warpgroup) * tiling.tile_m
        self._store(dw_MN, expert, row, f_tile * tiling.tile_n)
        return first_step + steps

    def _mask(self, slot, begin, end):
        """Zeros in the rows of a step outside [begin, end), once for all warpgroups."""
        self._mask_tile(self.x_smem.at[slot, self.warpgroup], begin, end)

        @pl.when(self.warpgroup == 0)
        def _():
            self._mask_tile(self.dy_smem.at[slot], begin, end)

        plgpu.commit_smem()
        plgpu.barrier_arrive(self.masked)
        plgpu.barrier_wait(self.masked)

    def _mask_tile(self, ref, begin, end):
        for first in range(0, ref.shape[1], CHUNK):
            part = ref.at[:, first : first + CHUNK]
            if self.interpret:
                values = part[...]
                row = lax.broadcasted_iota(jnp.int32, part.shape, 0)
            else:
                layout = plgpu.Layout.WGMMA
                values = load_as(part, layout)
                row = plgpu.broadcasted_iota(jnp.int32, part.shape, 0, layout=layout)
            is_own = (row >= begin) & (row < end)
            part[...] = jnp.where(is_own, values, jnp.zeros_like(values))

    def _store(self, dw_MN, expert, row, column):
        chunks = range(0, self.walk.tiling.tile_n, CHUNK)
        places = min(2, len(chunks))
        for i, first in enumerate(chunks):
            # What was in this place, of this tile or the last one, has left shared memory.
            plgpu.wait_smem_to_gmem(places - 1, wait_read_only=True)
            smem = self.dw_smem.at[self.warpgroup, i % places]
            smem[...] = dw_MN[:, first : first + CHUNK].astype(smem.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                smem,
                self.dw_gmem.at[
                    expert, pl.ds(row, self.walk.tiling.tile_m), pl.ds(column + first, CHUNK)
                ],
            )
