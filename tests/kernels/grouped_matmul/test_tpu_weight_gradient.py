# SPDX-License-Identifier: Apache-2.0
"""The gradient of the matrices, interpreted: every edge, held against a loop."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul.tpu_tiling import Tiling
from pallas_kernels.grouped_matmul.tpu_weight_gradient import sum_outer_products
from tests.kernels import loops
from tests.kernels.tpu_interpreter import (
    EDGES,
    ROWS,
    assert_close,
    compiled,
    rows_of,
    run_without_races,
)

SIZES = {"even": (256, 256), "uneven": (200, 190)}
DEFAULT = {("float32", "float32", "uneven"), ("bfloat16", "bfloat16", "even")}
GRID = [
    pytest.param(*key, marks=() if key in DEFAULT else pytest.mark.slow)
    for key in (
        (dtype, out_dtype, size)
        for dtype in ("float32", "bfloat16")
        for out_dtype in ("float32", "bfloat16")
        for size in SIZES
    )
]


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize(("dtype", "out_dtype", "size"), GRID)
def test_every_expert_sums_over_its_rows(dtype, out_dtype, size, edge):
    D, F = SIZES[size]
    group_sizes = EDGES[edge]
    x_RD = rows_of(0, ROWS, D, group_sizes, dtype)
    dy_RF = rows_of(1, ROWS, F, group_sizes, dtype)
    run = compiled(sum_outer_products, tiling=Tiling(16, 128, 128), out_dtype=out_dtype)
    dw_EDF = run_without_races(run, x_RD, dy_RF, np.array(group_sizes, np.int32))
    assert dw_EDF.dtype == jnp.dtype(out_dtype)
    assert_close(dw_EDF, loops.weight_gradient(x_RD, dy_RF, group_sizes), out_dtype)
    assert not dw_EDF[np.array(group_sizes) == 0].any()


def test_two_cores_share_the_blocks():
    group_sizes = (10, 0, 17, 9)
    x_RD = rows_of(0, 37, 128, group_sizes, "float32")
    dy_RF = rows_of(1, 37, 384, group_sizes, "float32")
    tiling = Tiling(16, 128, 128, cores=2)
    run = compiled(sum_outer_products, num_cores=2, tiling=tiling, out_dtype="float32")
    dw_EDF = run_without_races(run, x_RD, dy_RF, np.array(group_sizes, np.int32))
    assert_close(dw_EDF, loops.weight_gradient(x_RD, dy_RF, group_sizes), "float32")
