# SPDX-License-Identifier: Apache-2.0
"""The launch of both TPU kernels: a pipeline over a tile schedule, on a TPU or interpreted.

Interpret mode runs for a TPU that is only described, on arrays that are padded as they lie in
a TPU's memory (`pallas_kernels/tpu_chip.py`); nothing else of a kernel knows of it.
Dims: E experts
"""

import functools
import math
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul.tile_schedule import BlockTiles
from pallas_kernels.launches import num_bytes, pipelined_bytes, record
from pallas_kernels.operands import result_type
from pallas_kernels.tiling.tpu import Problem, Tiling, vmem_limit_bytes
from pallas_kernels.tpu_chip import interpret_mode, on_some_tpu, padded_shape, padded_to_tiles


def run_pipeline(
    body: Callable,
    pipeline: Callable,
    schedule: Callable,
    group_sizes_E,
    arrays,
    results,
    problem: Problem,
    tiling: Tiling,
    *,
    scratch,
    bytes_accessed: int,
    semantics,
    interpret,
    name: str,
    rows_of_tiles: Callable | None = None,
):
    """Runs a body over the tiles of a schedule and returns results of given shapes and dtypes.

    Args:
        body: `(tiles, scratch, *blocks of arrays and results)`, the work of one step.
        pipeline: tiles -> the grid and the `pl.BlockSpec`s of arrays and of results.
        schedule: sizes of the groups -> their `BlockTiles`.
        scratch: scratch memory of the kernel.
        bytes_accessed: bytes that the kernel reads and writes, for XLA's scheduler.
        semantics: dimension semantics of the axes of the grid.
        rows_of_tiles: `(begin_P, end_P)` -> the number of rows that the body multiplies in each
            tile; None if it multiplies whole blocks.
    """
    tiles = schedule(group_sizes_E)
    shapes = [shape for shape, _ in results]
    if interpret:
        _, *specs = pipeline(tiles)
        of_arrays, of_results = ([each.block_shape[-2:] for each in group] for group in specs)
        arrays = [padded_to_tiles(*pair) for pair in zip(arrays, of_arrays, strict=True)]
        results = [
            (padded_shape(shape, block), dtype)
            for (shape, dtype), block in zip(results, of_results, strict=True)
        ]
    out_shape = [result_type(*each, *tiles, *arrays) for each in results]
    copied, flops = _counts(
        pipeline, schedule, tiles, arrays, out_shape, problem, tiling, rows_of_tiles
    )
    record(name, [*tiles, *arrays], out_shape, copied, flops)
    any_space = pl.BlockSpec(memory_space=pl.ANY)
    call = pl.pallas_call(
        functools.partial(_kernel, body, pipeline, semantics, tiling.cores),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tiles),
            grid=(tiling.cores,),
            in_specs=[any_space] * len(arrays),
            out_specs=[any_space] * len(results),
            scratch_shapes=scratch,
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            vmem_limit_bytes=vmem_limit_bytes(problem, tiling),
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * problem.R * problem.D * problem.F * problem.num_matrices,
            bytes_accessed=bytes_accessed,
            transcendentals=0,
        ),
        interpret=interpret_mode(interpret),
        name=name,
    )
    with on_some_tpu(tiling.cores):
        found = call(*tiles, *arrays)
    return [each[tuple(map(slice, shape))] for each, shape in zip(found, shapes, strict=True)]


def _counts(
    pipeline,
    schedule,
    tiles,
    arrays,
    out_shape,
    problem: Problem,
    tiling: Tiling,
    rows_of_tiles: Callable | None,
):
    """Functions of the group sizes: the pipeline's copies and its FLOPs (see `launches.py`)."""
    tiles_like, arrays_like = (
        [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in group]
        for group in (tiles, arrays)
    )

    def scheduled(group_sizes_E):
        tiles = schedule(np.asarray(group_sizes_E, np.int32))
        grid, *specs = pipeline(tiles)
        return tiles, [int(size) for size in grid], specs

    def copied(group_sizes_E):
        _, grid, specs = scheduled(group_sizes_E)
        read, written = (
            [pipelined_bytes(grid, *pair) for pair in zip(blocks, like, strict=True)]
            for blocks, like in zip(specs, (arrays_like, out_shape), strict=True)
        )
        return [num_bytes(each.shape, each.dtype) for each in tiles_like] + read, written

    def flops(group_sizes_E):
        tiles, grid, _ = scheduled(group_sizes_E)
        P = int(tiles.count[0])
        begin_P, end_P = (np.asarray(each)[:P] for each in (tiles.begin_P, tiles.end_P))
        rows = P * tiling.block_R
        if rows_of_tiles is not None:
            rows = int(np.sum(rows_of_tiles(begin_P, end_P)))
        blocks_of_a_tile = math.prod(grid) // P
        block = tiling.block_D * tiling.block_F
        return 2 * rows * block * blocks_of_a_tile * problem.num_matrices

    return copied, flops


def _kernel(body, pipeline, semantics, cores: int, *refs):
    num_tile_arrays = len(BlockTiles._fields)
    tiles, refs = BlockTiles(*refs[:num_tile_arrays]), refs[num_tile_arrays:]
    grid, in_specs, out_specs = pipeline(tiles)
    num_copied = len(in_specs) + len(out_specs)
    copied, scratch = refs[:num_copied], refs[num_copied:]
    pltpu.emit_pipeline(
        functools.partial(body, tiles, scratch),
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        core_axis=0 if cores > 1 else None,
        dimension_semantics=semantics,
    )(*copied)
