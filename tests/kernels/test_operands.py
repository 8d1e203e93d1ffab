# SPDX-License-Identifier: Apache-2.0
"""Refusals that both operations share; the rest is refused through their own tests."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.operands import check_group_sizes, check_quantized
from pallas_kernels.quantization.quantize import quantize


@pytest.mark.parametrize("sizes", [[0, 0], [4, 0], [1, 3]])
def test_sizes_that_fit(sizes):
    check_group_sizes(np.array(sizes, np.int32), 4, 2)
    check_group_sizes(jnp.array(sizes, jnp.int32), 4, 2)


def test_sums_beyond_int32_are_seen():
    with pytest.raises(ValueError, match="sum to 4294967294"):
        check_group_sizes(np.full(2, 2**31 - 1, np.int32), 4, 2)


def test_traced_sizes_are_checked_for_shape_alone():
    jax.jit(lambda sizes_E: check_group_sizes(sizes_E, 4, 2))(jnp.array([9, 9]))
    with pytest.raises(ValueError, match="2 elements; expected 3"):
        jax.jit(lambda sizes_E: check_group_sizes(sizes_E, 4, 3))(jnp.array([9, 9]))


@pytest.mark.parametrize("dtype", ["uint8", "uint32", "int16", "int64", "uint64"])
def test_sizes_of_any_integers(dtype):
    check_group_sizes(np.array([1, 3], dtype), 4, 2)
    with pytest.raises(ValueError, match="sum to 9, and x_RD has 4 rows; pad"):
        check_group_sizes(np.array([6, 3], dtype), 4, 2)


@pytest.mark.parametrize(
    ("sizes", "offset", "message"),
    [
        ([1, 1, 1], 2, "group_offset=2 with 3 elements .* weights of 2 experts; expected an "
         "offset of 0 to 1"),
        ([1, 1, 1], -1, "group_offset=-1"),
        ([1], 0, "group_offset=0 with 1 elements"),
        ([1, 1, 1], 0.5, "group_offset is 0.5; expected the number of the first expert"),
        ([1, 1, 1], np.zeros(1, np.int32), "group_offset is array"),
        ([1, 1, 1], None, "3 elements; expected 2, .* or group_offset"),
        ([1.0, 1.0], None, "group_sizes_E has dtype float64; expected int32"),
        ([2, -1], None, r"group_sizes_E\[1\]=-1; expected sizes of 0 or more: use 0"),
    ],
)  # fmt: skip
def test_groups_that_are_not_there(sizes, offset, message):
    with pytest.raises(ValueError, match=message):
        check_group_sizes(np.array(sizes), 4, 2, offset)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"w": np.ones((2, 4, 3), np.float32)},
            r"w is a ndarray; expected a QTensor: use quan",
        ),
        ({"activation": "tanh"}, "activation='tanh'; use None, 'relu', .* or 'silu'"),
        (
            {"gate_R": jnp.ones(4)},
            r"gate_R has shape \(4,\); expected \(5,\), one for each row",
        ),
        ({"w_gate": np.ones((2, 4, 3))}, "w_gate is a ndarray; expected a QTensor"),
        (
            {"w_gate": quantize(np.ones((2, 4, 3), np.float32), 8)},
            "bits=8, group_size=None and no zero .*; expected those of w, .*, 4, None and no",
        ),
        ({"gate_R": jnp.ones((5, 1))}, "gate_R has shape"),
        ({"gate_R": jnp.ones(5, jnp.int32)}, "gate_R has dtype int32"),
        ({"bias_EF": jnp.ones((2, 4))}, r"bias_EF has shape \(2, 4\); expected \(2, 3\)"),
        ({"x_RD": jnp.ones((5, 3))}, "3 columns, and the weights are E=2, D=4, F=3"),
    ],
)
def test_quantized_operands_that_do_not_fit(changes, message):
    operands = {
        "x_RD": jnp.ones((5, 4)), "w": quantize(np.ones((2, 4, 3), np.float32), 4),
        "group_sizes_E": jnp.array([2, 3]), "bias_EF": None, "activation": None, "gate_R": None,
    }  # fmt: skip
    check_quantized(**operands)
    with pytest.raises(ValueError, match=message):
        check_quantized(**operands | changes)
