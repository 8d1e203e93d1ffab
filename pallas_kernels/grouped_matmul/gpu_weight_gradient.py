# SPDX-License-Identifier: Apache-2.0
"""The weights' gradient on Hopper: `dw_e = x_e^T dy_e`, contracted over each expert's rows.

The rows of an expert are a range of any length at any place. Steps of K rows start at a
multiple of 8; if the first or the last step reaches into a neighbour, the neighbour's rows are
set to zero in both operands (another expert's NaN times zero would be NaN), and only there. The
tensor core itself reads x transposed.
Dims: R rows, D inputs, F outputs, E experts; K rows of a step, M of D of a warpgroup,
N of F of a tile
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.gpu_schedule import schedule
from pallas_kernels.grouped_matmul.gpu_walk import GradientWalk, copied_bytes_of_gradient
from pallas_kernels.launches import record
from pallas_kernels.mosaic_gpu import Consumer, Mosaic, Ring, copy_and_multiply
from pallas_kernels.tiling.gpu import ROW_ALIGNMENT, Tiling, checked, fitted, tile_of_rows

# Columns that are masked or stored at a time.
CHUNK = 64


def default_tiling(D: int, F: int) -> Tiling:
    tile_n = 256 if F % 256 == 0 or F > 512 else 128 if F >= 128 else 64
    return Tiling(tile_m=64, tile_n=tile_n, tile_k=64, stages=3, panel=8)


def weight_gradient(x_RD, dy_RF, group_sizes_E, *, out_dtype, tiling, mosaic: Mosaic):
    """`[E, D, F]` in `out_dtype`, of bfloat16 or float16 rows; D and F multiples of 64.

    Raises:
        ValueError: the tiling cannot run.
    """
    (num_rows, D), F = x_RD.shape, dy_RF.shape[1]
    tiling = _tiling(tiling, D, F, x_RD.dtype, out_dtype)
    x_RD, dy_RF = (mosaic.rows(each, tiling.tile_k) for each in (x_RD, dy_RF))
    x_RD = mosaic.blocks(x_RD, 1, tiling.tile_m * tiling.warpgroups)
    dy_RF = mosaic.blocks(dy_RF, 1, tiling.tile_n)

    # The tiles are those of the product with these rows, so that the schedule is the same.
    E = group_sizes_E.shape[0]
    _, bound_B = schedule(group_sizes_E, num_rows, tile_of_rows(num_rows, E), mosaic)
    walk = GradientWalk(
        tiling=dataclasses.replace(tiling, num_sms=tiling.num_sms or mosaic.num_sms),
        num_experts=E,
        D=x_RD.shape[1],
        F=dy_RF.shape[1],
    )
    result = jax.ShapeDtypeStruct((walk.num_experts, walk.D, walk.F), out_dtype)
    operands = x_RD, dy_RF, bound_B
    record(
        "grouped_matmul_weight_gradient",
        operands,
        [result],
        functools.partial(
            copied_bytes_of_gradient, walk=walk, num_rows=num_rows, x=x_RD.dtype, result=result
        ),
    )
    run = mosaic.kernel(
        functools.partial(_body, walk=walk, mosaic=mosaic),
        out_type=[result],
        scratch_types=_scratch(tiling, x_RD.dtype, out_dtype, mosaic),
        grid=walk.tiling.num_sms,
        num_threads=tiling.warpgroups + 1,
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


def _scratch(tiling: Tiling, dtype, out_dtype, mosaic: Mosaic) -> dict:
    m = tiling.tile_m
    n = tiling.tile_n
    k = tiling.tile_k
    groups = tiling.warpgroups
    own = mosaic.scratch_of_transposes(x=((m, k), dtype))
    return dict(
        x_smem=mosaic.smem((tiling.stages, groups, k, m), dtype),
        # In chunks of columns, which are masked one by one.
        dy_smem=mosaic.smem((tiling.stages, k, n), dtype),
        dw_smem=mosaic.smem((groups, 2, m, CHUNK), out_dtype),
        full=plgpu.Barrier(num_arrivals=1 + groups, num_barriers=tiling.stages),
        empty=plgpu.Barrier(num_arrivals=groups, num_barriers=tiling.stages),
        masked=plgpu.Barrier(num_arrivals=groups),
        own={name: mosaic.smem((groups, *shape), each) for name, (shape, each) in own.items()},
    )


def _body(
    x_gmem,
    dy_gmem,
    bound_gmem,
    dw_gmem,
    *,
    walk,
    mosaic,
    x_smem,
    dy_smem,
    dw_smem,
    full,
    empty,
    masked,
    own,
):
    ring = Ring(walk.tiling.stages, full, empty)

    def tile_loop(warpgroup):
        return _Consumer(
            mosaic=mosaic,
            walk=walk,
            ring=ring,
            warpgroup=warpgroup,
            own={name: ref.at[warpgroup] for name, ref in own.items()},
            bound_gmem=bound_gmem,
            dw_gmem=dw_gmem,
            x_smem=x_smem,
            dy_smem=dy_smem,
            dw_smem=dw_smem,
            masked=masked,
        ).compute_tile

    copies = _copies(x_gmem, dy_gmem, bound_gmem, x_smem, dy_smem, ring, walk)
    copy_and_multiply(walk.tiling.warpgroups, [ring], copies, tile_loop, walk.turns)


def _copies(x_gmem, dy_gmem, bound_gmem, x_smem, dy_smem, ring: Ring, walk: GradientWalk):
    tiling = walk.tiling
    k = tiling.tile_k

    def copy_tile(turn, step):
        expert, d_tile, f_tile = walk.tile(turn)
        first, _, _, steps = walk.rows(bound_gmem, expert)

        def copy_step(i, step):
            slot = ring.slot_to_fill(step)
            full = ring.full.at[slot]
            rows = pl.ds(pl.multiple_of(first + i * k, ROW_ALIGNMENT), k)
            f_slice = pl.ds(f_tile * tiling.tile_n, tiling.tile_n)
            plgpu.copy_gmem_to_smem(dy_gmem.at[rows, f_slice], dy_smem.at[slot], full)
            for warpgroup in range(tiling.warpgroups):
                d = (d_tile * tiling.warpgroups + warpgroup) * tiling.tile_m
                plgpu.copy_gmem_to_smem(
                    x_gmem.at[rows, pl.ds(d, tiling.tile_m)], x_smem.at[slot, warpgroup], full
                )
            return step + 1

        return lax.fori_loop(0, steps, copy_step, step)

    return copy_tile


@dataclasses.dataclass(frozen=True)
class _Consumer(Consumer):
    bound_gmem: Any
    dw_gmem: Any
    x_smem: Any
    dy_smem: Any
    dw_smem: Any
    masked: Any

    def compute_tile(self, turn, first_step):
        expert, d_tile, f_tile = self.walk.tile(turn)
        tiling = self.walk.tiling
        k = tiling.tile_k
        _, begin, end, steps = self.walk.rows(self.bound_gmem, expert)

        def multiply(accumulators, i, slot):
            is_edge = (i * k < begin) | ((i + 1) * k > end)
            pl.when(is_edge)(lambda: self._mask(slot, begin - i * k, end - i * k))
            x_KM = self.x_smem.at[slot, self.warpgroup]
            x_MK = self.mosaic.transposed(x_KM, self.own.get("x"))
            plgpu.wgmma(accumulators[0], x_MK, self.dy_smem.at[slot])

        shape = tiling.tile_m, tiling.tile_n
        [dw_MN] = self.accumulate([shape], steps, first_step, multiply)
        row = (d_tile * tiling.warpgroups + self.warpgroup) * tiling.tile_m
        self._store(dw_MN, expert, row, f_tile * tiling.tile_n)
        return first_step + steps

    def _mask(self, slot, begin, end):
        """Writes zeros to the rows of a step outside [begin, end), once for all warpgroups."""
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
            values = self.mosaic.load(part, plgpu.Layout.WGMMA)
            row = self.mosaic.iota(part.shape, plgpu.Layout.WGMMA)
            is_own = (row >= begin) & (row < end)
            part[...] = jnp.where(is_own, values, jnp.zeros_like(values))

    def _store(self, dw_MN, expert, row, column):
        chunks = range(0, self.walk.tiling.tile_n, CHUNK)
        places = min(2, len(chunks))
        for i, first in enumerate(chunks):
            # What was in this place, from this tile or the last one, has left shared memory.
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
