# SPDX-License-Identifier: Apache-2.0
"""The pipeline of rows times matrices, interpreted: every edge, held against a loop.

40 rows in blocks of 16 and two blocks of each other axis; `uneven` sizes divide by none.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul.tpu_rows import multiply_rows
from pallas_kernels.grouped_matmul.tpu_tiling import Tiling
from tests.kernels import loops
from tests.kernels.tpu_interpreter import (
    EDGES,
    ROWS,
    assert_close,
    compiled,
    matrices_of,
    racing_params,
    rows_of,
    run_without_races,
    without_races,
)

SIZES = {"even": (256, 256), "uneven": (200, 190)}
# A whole contraction keeps no sum between steps; a cut one does, and masks what is left over.
DEPTHS = ("whole", "cut")
DEFAULT = {
    ("float32", "uneven", "cut", False),
    ("bfloat16", "even", "whole", True),
    ("bfloat16", "uneven", "cut", True),
}
GRID = [
    pytest.param(*key, marks=() if key in DEFAULT else pytest.mark.slow)
    for dtype in ("float32", "bfloat16")
    for size in SIZES
    for depth in DEPTHS
    for is_output_major in (False, True)
    for key in [(dtype, size, depth, is_output_major)]
]


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize(("dtype", "size", "depth", "is_output_major"), GRID)
def test_rows_meet_the_matrix_of_their_expert(dtype, size, depth, is_output_major, edge):
    D, F = SIZES[size]
    group_sizes = EDGES[edge]
    x_RD = rows_of(0, ROWS, D, group_sizes, dtype)
    w_EDF = matrices_of(1, (4, D, F), group_sizes, dtype)
    w = np.ascontiguousarray(w_EDF.swapaxes(1, 2)) if is_output_major else w_EDF
    tiling = Tiling(16, D if depth == "whole" else 128, 128)
    run = compiled(multiply_rows, tiling=tiling, is_output_major=is_output_major)
    y_RF = run_without_races(run, x_RD, w, np.array(group_sizes, np.int32))
    assert y_RF.dtype == jnp.dtype(dtype)
    assert_close(y_RF, loops.product(x_RD, w_EDF, group_sizes), dtype)
    assert not y_RF[sum(group_sizes) :].any()


@pytest.mark.parametrize("R", [1, 7, 33])
def test_rows_that_fill_no_block(R):
    group_sizes = (0, R - R // 3, 0, R // 3)
    x_RD = rows_of(0, R, 128, group_sizes, "float32")
    w_EDF = matrices_of(1, (4, 128, 128), group_sizes, "float32")
    run = compiled(multiply_rows, tiling=Tiling(16, 128, 128), is_output_major=False)
    y_RF = run_without_races(run, x_RD, w_EDF, np.array(group_sizes, np.int32))
    assert_close(y_RF, loops.product(x_RD, w_EDF, group_sizes), "float32")


def test_two_cores_share_the_columns():
    group_sizes = EDGES["straddling"]
    x_RD = rows_of(0, ROWS, 128, group_sizes, "float32")
    # Three blocks: one core has two of them.
    w_EDF = matrices_of(1, (4, 128, 384), group_sizes, "float32")
    tiling = Tiling(16, 128, 128, cores=2)
    run = compiled(multiply_rows, num_cores=2, tiling=tiling, is_output_major=False)
    y_RF = run_without_races(run, x_RD, w_EDF, np.array(group_sizes, np.int32))
    assert_close(y_RF, loops.product(x_RD, w_EDF, group_sizes), "float32")


def test_race_detection_finds_a_race():
    def reads_before_it_waits(x_hbm, y_vmem, x_vmem, semaphore):
        copy = pltpu.make_async_copy(x_hbm, x_vmem, semaphore)
        copy.start()
        y_vmem[...] = x_vmem[...]
        copy.wait()

    racy = pl.pallas_call(
        reads_before_it_waits,
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32), pltpu.SemaphoreType.DMA],
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        interpret=racing_params(dma_execution_mode="eager"),
    )
    # JAX 0.12 raises by itself.
    with pytest.raises((AssertionError, RuntimeError), match="[Rr]ace"), without_races():
        jax.block_until_ready(racy(np.zeros((8, 128), np.float32)))
