# SPDX-License-Identifier: Apache-2.0
"""What the TPU back end takes, and its entry points; the kernels have tests of their own."""

import functools

import jax
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import tpu
from pallas_kernels.grouped_matmul.tpu_tiling import Tiling
from tests.kernels import loops
from tests.kernels.tpu_interpreter import (
    assert_close,
    matrices_of,
    rows_of,
)

GROUP_SIZES = (9, 0, 12)
R, D, F = 24, 160, 136


def operands():
    x_RD = rows_of(0, R, D, GROUP_SIZES, "float32")
    w_EDF = matrices_of(1, (3, D, F), GROUP_SIZES, "float32")
    return x_RD, w_EDF, rows_of(2, R, F, GROUP_SIZES, "float32")


def test_default_tilings_serve_all_three_products():
    x_RD, w_EDF, dy_RF = operands()
    counts = np.array(GROUP_SIZES, np.int32)
    y_RF = tpu.forward(x_RD, w_EDF, counts, interpret=True)
    assert_close(np.asarray(y_RF), loops.product(x_RD, w_EDF, GROUP_SIZES), "float32")
    # The same array, contracted over its other axis: no transposed copy is handed in.
    dx_RD = tpu.forward(dy_RF, w_EDF, counts, transpose_w=True, interpret=True)
    expected = loops.product(dy_RF, w_EDF.swapaxes(1, 2), GROUP_SIZES)
    assert_close(np.asarray(dx_RD), expected, "float32")
    dw_EDF = tpu.weight_gradient(x_RD, dy_RF, counts, out_dtype="float32", interpret=True)
    expected = loops.weight_gradient(x_RD, dy_RF, GROUP_SIZES)
    assert_close(np.asarray(dw_EDF), expected, "float32")


@pytest.mark.parametrize("transpose_w", [False, True])
def test_no_operand_is_transposed(transpose_w):
    x_RD, w_EDF, dy_RF = operands()
    rows = dy_RF if transpose_w else x_RD
    forward = functools.partial(tpu.forward, transpose_w=transpose_w)
    program = str(jax.make_jaxpr(forward)(rows, w_EDF, np.array(GROUP_SIZES, np.int32)))
    outer = program.partition("pallas_call")[0]
    assert "pallas_call" in program
    assert "transpose[" not in outer


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("float16", "float16", 8, 8, 8, 2), "rows are float16.*use bfloat16 or float32"),
        (("int8", "int8", 8, 8, 8, 2), "rows are int8"),
        (("bfloat16", "float32", 8, 8, 8, 2), "weights are float32 .* to bfloat16"),
        (("bfloat16", "bfloat16", 0, 8, 8, 2), "R=0, .* has a size of 0"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(arguments, message):
    with pytest.raises(ValueError, match=message):
        raise ValueError(tpu.refusal(*arguments))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_any_size_is_taken(dtype):
    assert tpu.refusal(dtype, dtype, 1, 3, 5, 7) is None


def test_tiling_that_no_tpu_can_address_raises():
    x_RD, w_EDF, dy_RF = operands()
    counts = np.array(GROUP_SIZES, np.int32)
    with pytest.raises(ValueError, match="block_D=100 is neither 160 nor a smaller multiple"):
        tpu.forward(x_RD, w_EDF, counts, tiling=Tiling(16, 100, F), interpret=True)
    with pytest.raises(ValueError, match="block_R=8 is not a multiple of 16"):
        tpu.weight_gradient(
            x_RD, dy_RF, counts, out_dtype="float32", tiling=Tiling(8, D, F), interpret=True
        )
