# SPDX-License-Identifier: Apache-2.0
"""Matrices of AWQ and GPTQ checkpoints: against loops that pack and dequantize by the formats.

The loops follow the packing of AutoAWQ 0.2's `WQLinear_GEMM` and of AutoGPTQ 0.7's and
GPTQModel's linear layers, value by value.
"""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    dequantize,
    from_awq,
    from_gptq,
    implementations,
    quantized_grouped_matmul,
)
from pallas_kernels.implementations import Device
from pallas_kernels.quantized_grouped_matmul import api, tpu
from pallas_kernels.tiling.tpu import Tiling
from tests.cases import slow
from tests.kernels import loops

E, D, F, GROUP = 3, 256, 16, 128


def layer(seed: int, bits: int, D=D, group=GROUP, zeros=None):
    """q [D, F], z and s [G, F] of a linear layer, and float64 `[D, F]`."""
    rng = np.random.default_rng(seed)
    G = D // group
    q_DF = rng.integers(0, 1 << bits, (D, F))
    z_GF = rng.integers(1, 1 << bits, (G, F)) if zeros is None else np.full((G, F), zeros)
    s_GF = rng.uniform(0.5, 2, (G, F)).astype(np.float16)
    w_DF = np.zeros((D, F))
    for d in range(D):
        w_DF[d] = s_GF[d // group].astype(np.float64) * (q_DF[d] - z_GF[d // group])
    return q_DF, z_GF, s_GF, w_DF


def put(words, at, value: int, shift: int) -> None:
    words[at] |= np.uint32(value) << np.uint32(shift)


def awq_words(values) -> np.ndarray:
    """int32 `[rows, F / 8]`: nibble i of a word holds feature ORDER[i] of its eight."""
    words = np.zeros((len(values), values.shape[1] // 8), np.uint32)
    for row in range(len(values)):
        for word in range(words.shape[1]):
            for i, feature in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
                put(words, (row, word), values[row, 8 * word + feature], 4 * i)
    return words.view(np.int32)


def gptq_words(values, bits: int) -> np.ndarray:
    """int32 `[rows / n, F]`: part i of a word holds row i of its n."""
    n = 32 // bits
    words = np.zeros((len(values) // n, values.shape[1]), np.uint32)
    for row in range(len(values)):
        for column in range(values.shape[1]):
            put(words, (row // n, column), values[row, column], bits * (row % n))
    return words.view(np.int32)


def awq(**options):
    layers = [layer(seed, 4, **options) for seed in range(E)]
    arrays = [(awq_words(q), awq_words(z), s) for q, z, s, _ in layers]
    return from_awq(*map(np.stack, zip(*arrays, strict=True))), np.stack(
        [w for *_, w in layers]
    )


def gptq(bits: int, checkpoint_format: str, **options):
    layers = [layer(seed, bits, **options) for seed in range(E)]
    less = 1 if checkpoint_format == "gptq" else 0
    arrays = [
        (gptq_words(q, bits), gptq_words((z - less).T, bits).T, s) for q, z, s, _ in layers
    ]
    packed = [np.ascontiguousarray(np.stack(each)) for each in zip(*arrays, strict=True)]
    g_idx_ED = np.tile(np.arange(D) // GROUP, (E, 1)).astype(np.int32)
    q = from_gptq(*packed, g_idx_ED, bits=bits, checkpoint_format=checkpoint_format)
    return q, np.stack([w for *_, w in layers])


READERS = {
    "awq": awq,
    "gptq": functools.partial(gptq, 4, "gptq"),
    "gptq_v2 8 bits": functools.partial(gptq, 8, "gptq_v2"),
}


@pytest.mark.parametrize("name", READERS)
def test_weights_are_those_of_the_format(name):
    q, w_EDF = READERS[name]()
    assert q.bits == (8 if "8" in name else 4)
    assert (q.shape, q.group_size) == ((E, D, F), GROUP)
    # Eleven bits of a scale and nine of a difference: float32 has them exactly.
    np.testing.assert_array_equal(np.asarray(dequantize(q), np.float64), w_EDF)
    if q.bits == 4:
        assert q.is_packed
        folded = q.without_zeros()
        assert (folded.values.dtype, folded.zeros_EFG) == (jnp.int8, None)
        np.testing.assert_array_equal(np.asarray(dequantize(folded), np.float64), w_EDF)


@pytest.mark.parametrize(("bits", "half"), [(4, 8), (8, 128)])
def test_symmetric_weights_have_no_zero_points(bits, half):
    q, w_EDF = gptq(bits, "gptq", zeros=half)
    assert q.zeros_EFG is None
    assert q.without_zeros() is q.native()
    np.testing.assert_array_equal(np.asarray(dequantize(q), np.float64), w_EDF)


SIZES = (5, 0, 12)


@pytest.mark.parametrize("name", ["awq", "gptq_v2 8 bits"])
def test_the_reference_multiplies_them(name):
    q, w_EDF = READERS[name]()
    x_RD = np.random.default_rng(7).normal(size=(20, D)).astype(np.float32)
    run = jax.jit(functools.partial(quantized_grouped_matmul, implementation="reference"))
    y_RF = run(x_RD, q, jnp.array(SIZES), w_gate=q)
    wanted = loops.product(x_RD, w_EDF, SIZES) ** 2
    np.testing.assert_allclose(
        y_RF / np.abs(wanted).max(), wanted / np.abs(wanted).max(), atol=2e-6
    )


@pytest.mark.parametrize("group", [slow(GROUP), D])
def test_a_tpu_subtracts_zero_points_from_sums(group):
    """A group of 128 channels at a time, or one cut into two blocks."""
    q, w_EDF = awq(group=group)
    x_RD = np.random.default_rng(7).normal(size=(32, D)).astype(np.float32)
    y_RF = quantized_grouped_matmul(
        x_RD, q, jnp.array(SIZES), w_gate=q, implementation="tpu", interpret=True,
        tiling=Tiling(16, 128, F),
    )  # fmt: skip
    wanted = loops.product(x_RD, w_EDF, SIZES) ** 2
    np.testing.assert_allclose(
        y_RF / np.abs(wanted).max(), wanted / np.abs(wanted).max(), atol=3e-6
    )
    assert tpu.refusal("float32", 4, 32, D, F, E, group) is None


ARRAYS = {
    "qweight": np.zeros((E, D // 8, F), np.int32), "qzeros": np.zeros((E, 2, F // 8), np.int32),
    "scales": np.ones((E, 2, F), np.float16),
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 3}, "bits=3; expected 4 or 8"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format='marlin'; expected one of"),
        ({"qweight": np.zeros((E, D // 8, F))}, r"qweight is float64.*expected int32.*: stack"),
        ({"qweight": np.zeros((D // 8, F), np.int32)}, r"qweight is int32\[32, 16\]; expected"),
        ({"scales": np.ones((2, F), np.float16)}, "scales is .* expected floating point"),
        ({"scales": np.ones((E, 2, 8), np.float16)}, r"qweight has .*expected \(3, 32, 8"),
        ({"bits": 8}, r"qzeros has shape \(3, 2, 2\); expected \(3, 2, 4\)"),
        ({"g_idx": np.zeros((E, D), np.int32)}, r"g_idx\[0, 128\]=0; expected 1.*desc_act"),
        ({"g_idx": np.zeros(D, np.int32)}, r"g_idx has shape \(256,\); expected \(3, 256\)"),
    ],
)  # fmt: skip
def test_what_is_no_gptq_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        from_gptq(**ARRAYS | changes)


def test_what_is_no_awq_is_refused():
    with pytest.raises(ValueError, match=r"qweight has shape .*are the format and"):
        from_awq(**ARRAYS)


def test_zero_points_are_checked():
    q, _ = awq()
    with pytest.raises(ValueError, match=r"zero points float32\[3, 16\]; expected float32"):
        dataclasses.replace(q, zeros_EFG=q.zeros_EFG[..., 0]).check()
    eight, _ = gptq(8, "gptq_v2")
    with pytest.raises(ValueError, match="8 bits and zero points.*expected 4 bits.*use impl"):
        eight.without_zeros()


@pytest.mark.parametrize("zero", [0.5, -200.0, np.nan])
def test_zero_points_that_integers_do_not_hold_are_not_subtracted(zero):
    q, _ = awq()
    zeros_EFG = np.array(q.zeros_EFG)
    zeros_EFG[1, 2, 0] = zero
    said = rf"zeros_EFG\[1, 2, 0\]={zero}.*expected integers of -16 to 16"
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(q, zeros_EFG=zeros_EFG).without_zeros()


@pytest.mark.parametrize("name", ["gpu", "triton"])
def test_zero_points_of_a_compiled_program_are_subtracted_with_a_warning(name):
    q, _ = awq()
    module = importlib.import_module(f"pallas_kernels.quantized_grouped_matmul.{name}")
    form = getattr(q, getattr(module, "FORM", "native"))()
    with pytest.warns(UserWarning, match=r"give it w\.without_zeros\(\)"):
        jax.make_jaxpr(lambda w: api._weights_of(module, w))(form)
    assert q.without_zeros() is q.without_zeros()  # made once


def test_a_gpu_multiplies_zero_points_of_8_bits_without_its_kernel(monkeypatch):
    q, _ = gptq(8, "gptq_v2")
    for each in (implementations, api):
        device = Device("cuda", "NVIDIA H200", "9.0")
        monkeypatch.setattr(each, "current_device", lambda device=device: device)
    x_RD, sizes_E = jnp.ones((4, D), jnp.bfloat16), jnp.array([1, 2, 1])
    with pytest.warns(UserWarning, match="without its kernel: w has 8 bits and zero points"):
        program = jax.make_jaxpr(quantized_grouped_matmul)(x_RD, q, sizes_E)
    assert "pallas_call" not in str(program)
