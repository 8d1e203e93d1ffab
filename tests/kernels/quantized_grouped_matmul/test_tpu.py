# SPDX-License-Identifier: Apache-2.0
"""Quantized weights in the TPU kernel, interpreted, held against a float64 loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul.tpu_tiling import Tiling
from pallas_kernels.quantized_grouped_matmul import tpu
from tests.kernels import loops
from tests.kernels.tpu_interpreter import (
    EDGES,
    ROWS,
    assert_close,
    racing_params,
    rows_of,
    run_without_races,
)

SIZES = {"even": (256, 256), "uneven": (200, 190)}
DEFAULT = {
    (8, "float32", "uneven", "cut", True),
    (4, "bfloat16", "even", "whole", True),
    (4, "bfloat16", "uneven", "cut", False),
}
GRID = [
    pytest.param(*key, marks=() if key in DEFAULT else pytest.mark.slow)
    for key in (
        (bits, dtype, size, depth, has_epilogue)
        for bits in (8, 4)
        for dtype in ("float32", "bfloat16")
        for size in SIZES
        for depth in ("whole", "cut")
        for has_epilogue in (True, False)
    )
]


@functools.cache
def compiled(tiling: Tiling | None, activation: str | None):
    return jax.jit(
        functools.partial(
            tpu.forward, tiling=tiling, activation=activation, interpret=racing_params()
        )
    )


def quantized(bits: int, shape, num_groups: int):
    """Every value there is, -8 and -128 among them, and scales of different sizes."""
    rng = np.random.default_rng(2)
    least = -(1 << (bits - 1))
    values_EFD = rng.integers(least, -least, shape)
    scales_EFG = rng.uniform(0.5, 2, (*shape[:2], num_groups)).astype(np.float32)
    return values_EFD, scales_EFG


def dequantized(values_EFD, scales_EFG) -> np.ndarray:
    """[E, D, F] in float64."""
    E, F, D = values_EFD.shape
    G = scales_EFG.shape[2]
    grouped = values_EFD.reshape(E, F, G, D // G) * scales_EFG[..., None].astype(np.float64)
    return grouped.reshape(E, F, D).swapaxes(1, 2)


def device_values(values_EFD, bits: int):
    return jnp.asarray(values_EFD, jnp.int8 if bits == 8 else jnp.int4)


def epilogue_by_loop(y_RF, bias_EF, gate_R, group_sizes) -> np.ndarray:
    expected = np.zeros_like(y_RF)
    for row, expert in enumerate(loops.expert_of_rows(group_sizes, ROWS)):
        expected[row] = gate_R[row] * np.maximum(y_RF[row] + bias_EF[expert], 0)
    return expected


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize(("bits", "dtype", "size", "depth", "has_epilogue"), GRID)
def test_rows_meet_the_dequantized_matrix(bits, dtype, size, depth, has_epilogue, edge):
    D, F = SIZES[size]
    group_sizes = EDGES[edge]
    x_RD = rows_of(0, ROWS, D, group_sizes, dtype)
    values_EFD, scales_EFG = quantized(bits, (4, F, D), 1)
    expected = loops.product(x_RD, dequantized(values_EFD, scales_EFG), group_sizes)
    extras = {}
    if has_epilogue:
        rng = np.random.default_rng(3)
        bias_EF = 100 * rng.normal(size=(4, F)).astype(np.float32)
        gate_R = rng.uniform(0.1, 1, ROWS).astype(np.float32)
        gate_R[sum(group_sizes) :] = np.nan
        expected = epilogue_by_loop(expected, bias_EF, gate_R, group_sizes)
        extras = {"bias_EF": bias_EF, "gate_R": gate_R}
    tiling = Tiling(16, D if depth == "whole" else 128, 128)
    run = compiled(tiling, "relu" if has_epilogue else None)
    y_RF = run_without_races(
        functools.partial(run, **extras),
        x_RD,
        device_values(values_EFD, bits),
        scales_EFG,
        np.array(group_sizes, np.int32),
    )
    assert y_RF.dtype == jnp.dtype(dtype)
    assert_close(y_RF, expected, dtype)
    assert not y_RF[sum(group_sizes) :].any()


@pytest.mark.parametrize("edge", ["straddling", "pruned_tail"])
@pytest.mark.parametrize(
    ("bits", "block_D"),
    [(8, 256), (4, 512), pytest.param(4, 128, marks=pytest.mark.slow)],
)
def test_groups_of_channels_have_scales_of_their_own(bits, block_D, edge):
    D, F, G = 512, 190, 4
    group_sizes = EDGES[edge]
    x_RD = rows_of(0, ROWS, D, group_sizes, "float32")
    values_EFD, scales_EFG = quantized(bits, (4, F, D), G)
    y_RF = run_without_races(
        compiled(Tiling(16, block_D, 128), None),
        x_RD,
        device_values(values_EFD, bits),
        scales_EFG,
        np.array(group_sizes, np.int32),
    )
    expected = loops.product(x_RD, dequantized(values_EFD, scales_EFG), group_sizes)
    assert_close(y_RF, expected, "float32")


def test_default_tiling_serves():
    group_sizes = EDGES["straddling"]
    x_RD = rows_of(0, ROWS, 128, group_sizes, "bfloat16")
    values_EFD, scales_EFG = quantized(4, (4, 128, 128), 1)
    y_RF = run_without_races(
        compiled(None, None),
        x_RD,
        device_values(values_EFD, 4),
        scales_EFG,
        np.array(group_sizes, np.int32),
    )
    expected = loops.product(x_RD, dequantized(values_EFD, scales_EFG), group_sizes)
    assert_close(y_RF, expected, "bfloat16")


@pytest.mark.parametrize("x_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("bits", "group_size"), [(8, None), (4, None), (8, 128), (4, 512)])
def test_what_can_run_is_not_refused(x_dtype, bits, group_size):
    assert tpu.refusal(x_dtype, bits, 7, 1024, 190, 3, group_size) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("float16", 8, 8, 256, 256, 4, None), "rows are float16.*use bfloat16 or float32"),
        (("bfloat16", 2, 8, 256, 256, 4, None), "have 2 bits; use 4 or 8"),
        (("bfloat16", 8, 0, 256, 256, 4, None), "R=0, .* has a size of 0"),
        (("bfloat16", 8, 8, 256, 256, 4, 64), "group_size=64 is not a multiple of 128"),
        (("bfloat16", 8, 8, 256, 256, 4, 384), "divides D=256"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(arguments, message):
    with pytest.raises(ValueError, match=message):
        raise ValueError(tpu.refusal(*arguments))


def test_pieces_of_the_contraction_hold_whole_groups():
    tilings = tpu.candidates(64, 8192, 8192, 8, "bfloat16", 8, 1024)
    assert {tiling.block_D for tiling in tilings} >= {1024, 2048}
    assert all(tiling.block_D % 1024 == 0 for tiling in tilings)


def test_tiling_that_cuts_a_group_raises():
    values_EFD, scales_EFG = quantized(8, (2, 128, 512), 2)
    arguments = np.zeros((16, 512), np.float32), device_values(values_EFD, 8), scales_EFG
    with pytest.raises(ValueError, match="block_D=128 cuts groups of 256 .* a multiple of 256"):
        tpu.forward(*arguments, np.array([1, 2], np.int32), tiling=Tiling(16, 128, 128))
