# SPDX-License-Identifier: Apache-2.0
"""`quantized_grouped_matmul` as it is called: forms of weights, refusals, other back ends."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    dequantize,
    grouped_matmul,
    quantize,
    quantized_grouped_matmul,
)
from pallas_kernels.grouped_matmul.reference import Tiling
from tests.kernels import loops
from tests.kernels.loops import GROUPS, E, R

D, F = 8, 12
SIZES = GROUPS["pruned_tail"]


def call(**changes):
    x_RD, w_EDF, _ = loops.operands(SIZES, D, F, tail=0)
    operands = {"x_RD": jnp.array(x_RD), "w": quantize(w_EDF, 4)}
    return quantized_grouped_matmul(**operands | {"group_sizes_E": jnp.array(SIZES)} | changes)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("jit", [False, True])
def test_it_is_the_product_with_dequantized_weights(bits, jit):
    x_RD, w_EDF, _ = loops.operands(SIZES, D, F, tail=0)
    q = quantize(w_EDF, bits)
    function = jax.jit(quantized_grouped_matmul) if jit else quantized_grouped_matmul
    y_RF = function(x_RD, q, jnp.array(SIZES))
    expected_RF = loops.product(x_RD, np.asarray(dequantize(q)), SIZES)
    np.testing.assert_allclose(np.asarray(y_RF), expected_RF, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("argument", ["x_RD", "gate_R", "bias_EF"])
def test_differentiating_it_says_what_to_do(argument):
    values = {"x_RD": jnp.ones((R, D)), "gate_R": jnp.ones(R), "bias_EF": jnp.ones((E, F))}
    with pytest.raises(TypeError, match="no gradient: put jax.lax.stop_gradient around"):
        jax.grad(lambda value: call(**{argument: value}).sum())(values[argument])


def test_what_it_says_to_do_works():
    def stopped(x_RD):
        return jnp.sum(x_RD) + call(x_RD=jax.lax.stop_gradient(x_RD)).sum()

    np.testing.assert_array_equal(np.asarray(jax.grad(stopped)(jnp.ones((R, D)))), 1)
    q = quantize(loops.operands(SIZES, D, F, tail=0)[1], 4)
    dx_RD = jax.grad(lambda x_RD: grouped_matmul(x_RD, dequantize(q), jnp.array(SIZES)).sum())(
        jnp.ones((R, D))
    )
    assert np.any(np.asarray(dx_RD) != 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_RD": jnp.ones((R, D + 2))}, "10 columns, and the weights are E=5, D=8, F=12"),
        ({"w": jnp.ones((E, D, F))}, "expected a QTensor"),
        ({"group_sizes_E": jnp.full(E, 5, jnp.int32)}, "sum to 25, and x_RD has 23 rows"),
        ({"activation": "gelu"}, "use None or 'relu'"),
        ({"implementation": "triton"}, "use None or one of"),
        ({"interpret": True}, "only kernels are interpreted"),
        ({"tiling": Tiling(0, 1)}, "rows=0; use 1"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        call(**changes)


def test_another_layout_is_refused_before_anything_runs():
    q = dataclasses.replace(quantize(np.ones((E, D, F), np.float32), 8), layout_version=7)
    with pytest.raises(ValueError, match="layout version 7; this code reads version 1"):
        call(w=q)
    with pytest.raises(ValueError, match="layout version 7"):
        jax.jit(quantized_grouped_matmul).lower(jnp.ones((R, D)), q, jnp.array(SIZES))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_kernel_gets_native_plain_arrays(bits, monkeypatch):
    seen = {}

    def forward(x_RD, values_EFD, scales_EFG, group_sizes_E, **options):
        seen.update(options, values=values_EFD, scales=scales_EFG)
        return jnp.zeros((R, F))

    kernel = types.ModuleType("pallas_kernels.quantized_grouped_matmul.gpu")
    kernel.forward, kernel.refusal = forward, lambda *operands: seen.update(asked=operands)
    monkeypatch.setattr("pallas_kernels.implementations._module", lambda op, name: kernel)
    q = quantize(np.ones((E, D, F), np.float32), bits, group_size=4)
    call(w=q, implementation="gpu", interpret=True, activation="relu", gate_R=jnp.ones(R))
    assert seen["values"].dtype == (jnp.int8 if bits == 8 else jnp.int4)
    assert seen["values"].shape == (E, F, D)
    assert seen["scales"].shape == (E, F, 2)
    assert (seen["activation"], seen["interpret"], seen["tiling"]) == ("relu", True, None)
    assert seen["bias_EF"] is None
    assert seen["gate_R"].shape == (R,)
    assert seen["asked"] == (jnp.float32, bits, R, D, F, E, 4)
