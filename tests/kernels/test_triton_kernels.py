# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels against loops in float64, interpreted where there is no GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_kernels import quantize, quantized_grouped_matmul
from pallas_kernels.grouped_matmul import triton
from pallas_kernels.quantized_grouped_matmul import triton as quantized
from pallas_kernels.tiling.triton import Tiling
from tests.kernels import loops

# Neither D nor F is a multiple of the tiles.
D, F = 70, 44
SMALL = Tiling(16, 32, 32)
TOLERANCE = {"bfloat16": 4e-3, "float32": 1e-5}


def near(got, want, dtype):
    got = np.asarray(got.astype(jnp.float32), np.float64)
    assert got.shape == want.shape
    bound = TOLERANCE[dtype] * max(1.0, np.abs(want).max())
    assert np.abs(got - want).max() <= bound


@functools.cache
def compiled(activation, is_gated_unit, dtype):
    def run(x_RD, w_EDF, w_gate_EDF, bias_EF, gate_R, sizes_E):
        return triton.forward(
            x_RD, w_EDF, sizes_E, w_gate=w_gate_EDF if is_gated_unit else None,
            bias_EF=bias_EF, activation=activation, gate_R=gate_R, has_residual=True,
            tiling=SMALL, interpret=loops.interprets("triton"),
        )  # fmt: skip

    return jax.jit(run)


@pytest.mark.parametrize("groups", loops.GROUPS)
@pytest.mark.parametrize(
    ("activation", "is_gated_unit", "dtype"),
    [("gelu", True, "bfloat16"), ("relu", False, "float32")],
)
def test_epilogue_and_residual(groups, activation, is_gated_unit, dtype):
    sizes_E = loops.GROUPS[groups]
    x_RD, w_EDF, _ = loops.operands(sizes_E, D, F)
    w_gate_EDF = loops.operands(sizes_E, D, F, seed=1)[1]
    rng = np.random.default_rng(2)
    bias_EF = rng.normal(size=(loops.E, F)).astype(np.float32)
    bias_EF[np.asarray(sizes_E) == 0] = np.nan
    gate_R = rng.uniform(size=loops.R).astype(np.float32)
    gate_R[sum(sizes_E) :] = np.nan
    arrays = [jnp.asarray(each, dtype) for each in (x_RD / 8, w_EDF, w_gate_EDF)]
    got, residual = compiled(activation, is_gated_unit, dtype)(
        *arrays, bias_EF, gate_R, jnp.asarray(sizes_E)
    )
    x_RD, *matrices = (np.asarray(each.astype(jnp.float32), np.float64) for each in arrays)
    sums = [loops.product(x_RD, w, sizes_E) for w in matrices[: 1 + is_gated_unit]]
    want, kept = loops.with_epilogue(sums, sizes_E, bias_EF, activation, gate_R)
    near(got, want, dtype)
    for one, other in zip(residual, kept, strict=True):
        near(one, other, dtype)


@functools.cache
def quantized_product(activation):
    def run(x_RD, w, sizes_E, bias_EF, gate_R):
        return quantized_grouped_matmul(
            x_RD, w, sizes_E, bias_EF=bias_EF, activation=activation, gate_R=gate_R,
            implementation="triton", interpret=loops.interprets("triton"), tiling=SMALL,
        )  # fmt: skip

    return jax.jit(run)


@pytest.mark.parametrize(("bits", "group_size"), [(8, None), (4, None), (4, 32), (8, 64)])
@pytest.mark.parametrize("groups", ["empty_groups", "pruned_tail", "nothing"])
def test_quantized(groups, bits, group_size):
    sizes_E, depth = loops.GROUPS[groups], 70 if group_size is None else 192
    x_RD, w_EDF, _ = loops.operands(sizes_E, depth, F)
    rng = np.random.default_rng(3)
    w_EDF = rng.normal(size=w_EDF.shape).astype(np.float32)
    bias_EF = rng.normal(size=(loops.E, F)).astype(np.float32)
    gate_R = rng.uniform(size=loops.R).astype(np.float32)
    q = quantize(w_EDF, bits, "absmax", group_size).packed()
    values = np.asarray(q.native().values.astype(jnp.int8)).astype(np.float64)
    scales = np.repeat(q.scales_EFG, depth // q.scales_EFG.shape[2], axis=2)
    got = quantized_product("relu")(x_RD, q, jnp.asarray(sizes_E), bias_EF, gate_R)
    sums = loops.product(x_RD, (values * scales).swapaxes(1, 2), sizes_E)
    want, _ = loops.with_epilogue([sums], sizes_E, bias_EF, "relu", gate_R)
    near(got, want, "float32")


def test_groups_end_at_the_last_row():
    """Interpreted arrays are longer than a GPU's, so a kernel's result would not show it."""
    sizes_E, R = [9, 0, 30, 4], 23

    def body(sizes_ref, begin_ref, end_ref):
        _, begin_ref[...], end_ref[...] = triton._bounds(sizes_ref, R)

    bounds = jax.ShapeDtypeStruct((8,), jnp.int32)
    begin_G, end_G = pl.pallas_call(body, out_shape=(bounds, bounds), interpret=True)(
        jnp.array(sizes_E)
    )
    # Four experts, the rows of none, and what fills a power of 2.
    assert begin_G.tolist()[:5] == [0, 9, 9, 23, 23]
    assert end_G.tolist() == [9, 9, *[23] * 6]


def test_what_cannot_run_is_refused_with_a_way_out():
    for reason, said in (
        (triton.refusal(jnp.int8, jnp.int8, 8, 64, 64, 2), "cast both to float32"),
        (triton.refusal(jnp.float32, jnp.float32, 0, 64, 64, 2), "nothing to multiply"),
        (quantized.refusal(jnp.bfloat16, 4, 8, 65, 64, 2), "an even D"),
        (quantized.refusal(jnp.bfloat16, 8, 8, 96, 64, 2, 48), "multiple of 32"),
        (quantized.refusal(jnp.bfloat16, 8, 8, 4096, 8192, 64), "split the experts"),
    ):
        assert said in reason
    assert quantized.refusal(jnp.float16, 4, 1, 768, 3072, 32, 64) is None
    for tiling in (Tiling(8, 32, 32), Tiling(16, 48, 32), Tiling(16, 32, 32, warps=3)):
        with pytest.raises(ValueError, match="expected"):
            triton.forward(
                jnp.ones((8, 64)), jnp.ones((1, 64, 64)), jnp.array([8]), tiling=tiling
            )
