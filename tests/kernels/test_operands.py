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
            "bits=8 and group_size=None; expected those of w, .*, 4 and None",
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
