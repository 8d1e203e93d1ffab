# SPDX-License-Identifier: Apache-2.0
"""Refusals that both operations share; the rest is refused through their own tests."""

import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_matmul, quantized_grouped_matmul
from pallas_kernels.operands import check_group_sizes, check_quantized
from pallas_kernels.quantization.quantize import quantize


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
    with pytest.raises(
        ValueError, match="sum to 9, and x_RD has 4 rows; expected at most 4: pad"
    ):
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
        ({"w": np.ones((2, 4, 3), np.float32)}, "w is a ndarray; expected a QTensor: use quan"),
        ({"w_gate": np.ones((2, 4, 3))}, "w_gate is a ndarray; expected a QTensor"),
        (
            {"w_gate": quantize(np.ones((2, 4, 3), np.float32), 8)},
            "bits=8, group_size=None and no zero .*; expected those of w, .*, 4, None and no",
        ),
        ({"gate_R": jnp.ones((5, 1))}, "gate_R has shape"),
        ({"gate_R": jnp.ones(5, jnp.int32)}, "gate_R has dtype int32"),
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


X_RD, W_EDF, SIZES_E = np.ones((5, 4)), np.ones((2, 4, 3)), np.array([2, 3])
# (changes of the call, the operand, what it was, what was expected, the way out)
BAD = [
    ({"x_RD": jnp.ones((5, 3))}, "x_RD", "3 columns", "expected 4", "transpose_w"),
    ({"x_RD": jnp.ones((5, 4), jnp.int32)}, "x_RD", "int32", "expected float32", "astype"),
    ({"x_RD": [[1.0]]}, "x_RD", "list", "expected an array", "jnp.asarray"),
    ({"group_sizes_E": np.ones(2)}, "group_sizes_E", "float64", "expected int32", "astype"),
    ({"group_sizes_E": np.array([1])}, "group_sizes_E", "1 elements", "expected 2", "group_of"),
    ({"group_sizes_E": np.array([4, 4])}, "group_sizes_E", "8", "expected at most 5", "pad"),
    ({"group_sizes_E": np.array([-1, 4])}, "group_sizes_E[0]", "-1", "expected sizes", "use 0"),
    ({"group_offset": 1}, "group_offset", "1 ", "expected an offset of 0 to 0", "sizes of all"),
    ({"bias_EF": jnp.ones((2, 4))}, "bias_EF", "(2, 4)", "expected (2, 3)", "reshape"),
    ({"gate_R": jnp.ones(4)}, "gate_R", "(4,)", "expected (5,)", "reshape"),
    ({"activation": "tanh"}, "activation", "tanh", "expected None", "use one"),
    ({"preferred_element_type": "int8"}, "preferred", "int8", "expected float32", "use one"),
]
IMPLEMENTATIONS = [{"implementation": "reference"}] + [
    {"implementation": name, "interpret": True} for name in ("tpu", "gpu")
]


@pytest.mark.parametrize("options", IMPLEMENTATIONS, ids=lambda each: each["implementation"])
@pytest.mark.parametrize("is_quantized", [False, True])
def test_every_back_end_refuses_before_launch_with_the_way_out(
    options, is_quantized, monkeypatch
):
    """No module is even chosen: `choose` would fail."""

    def chosen(*operands, **named):
        raise AssertionError("a module was chosen")

    for api in ("grouped_matmul.api", "quantized_grouped_matmul.api"):
        monkeypatch.setattr(importlib.import_module(f"pallas_kernels.{api}"), "choose", chosen)
    w = quantize(W_EDF, 8) if is_quantized else jnp.asarray(W_EDF)
    call = quantized_grouped_matmul if is_quantized else grouped_matmul
    operands = {"x_RD": jnp.asarray(X_RD), "group_sizes_E": SIZES_E}
    for changes, operand, got, expected, way_out in BAD:
        with pytest.raises(ValueError, match=re.escape(operand)) as caught:
            named = operands | options | changes
            call(named.pop("x_RD"), w, named.pop("group_sizes_E"), **named)
        said = str(caught.value)
        assert got in said
        assert expected in said
        assert way_out in said.partition(expected)[2], said
