# SPDX-License-Identifier: Apache-2.0
"""Random products through the public functions, every kernel interpreted, against loops.

Drawn are parts of D, groups of scales, gates of units and rows, R and its remainder by 8, 1 to
200 experts, and sizes of groups that sum to less, the same or more than R. Rows past the
groups, their gates and gradients, and matrices of experts without rows are NaN.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import QTensor, grouped_matmul, quantized_grouped_matmul
from pallas_kernels.tiling import gpu, tpu, triton
from tests.cases import slow
from tests.kernels import loops

KERNELS = ("tpu", "gpu", "triton")
# Of float32 sums that are rounded once, and of gradients, whose residual was rounded too.
TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 2e-5}


@dataclasses.dataclass(frozen=True)
class Product:
    """One program: what is compiled for all sizes of groups."""

    kernel: str
    R: int
    E: int
    D: int
    F: int
    dtype: str
    bits: int | None = None
    group_size: int | None = None
    activation: str | None = None
    is_gated_unit: bool = False
    has_bias: bool = True
    has_gate: bool = True
    transpose_w: bool = False
    splits: int = 1

    @property
    def tiling(self):
        if self.kernel == "gpu":
            tiling = gpu.Tiling(64, 16, 64, warpgroups=1, stages=2, splits=self.splits)
            # Blocks enough for the parts of few tiles.
            tiling = dataclasses.replace(tiling, num_sms=2 if self.splits == 1 else 8)
            return dataclasses.replace(tiling, panel=1)
        if self.kernel == "tpu":
            return tpu.Tiling(16, self.D, 128 if self.F > 128 else self.F)
        return triton.Tiling(16, 32, 32)


def draw(kernel: str, seed: int) -> Product:
    rng = np.random.default_rng([seed, KERNELS.index(kernel)])

    def one_of(*values):
        return values[rng.integers(len(values))]

    bits = one_of(None, 8, 4)
    group_size = None if bits is None else one_of(None, 128 if kernel == "tpu" else 64)
    splits = one_of(1, 2) if kernel == "gpu" else 1
    D = one_of(128, 256) if group_size or splits > 1 else one_of(64, 100, 130)
    dtypes = {"tpu": ("bfloat16", "float32"), "gpu": ("bfloat16", "float16")}
    return Product(
        kernel, R=int(rng.integers(1, 42)), E=one_of(1, 3, 8, 130, 200), D=D,
        F=one_of(64, 90, 192), dtype=one_of(*dtypes.get(kernel, ("bfloat16", "float32"))),
        bits=bits, group_size=None if group_size == D else group_size,
        activation=one_of(None, "relu", "gelu", "gelu_exact", "silu"),
        is_gated_unit=one_of(False, True), has_bias=one_of(False, True),
        has_gate=one_of(False, True), transpose_w=bits is None and one_of(False, True),
        splits=splits,
    )  # fmt: skip


def draw_sizes(R: int, E: int, total: int, seed: int) -> np.ndarray:
    """Sizes that sum to `total`, of about half of the experts."""
    rng = np.random.default_rng([seed, R, E])
    share_E = rng.random(E) * (rng.random(E) < 0.5)
    share_E[rng.integers(E)] += 0.1
    return rng.multinomial(total, share_E / share_E.sum()).astype(np.int32)


def operands(case: Product, sizes_E, seed: int):
    """The parts as the call takes them, w apart; and in float64 as loops take them."""
    rng = np.random.default_rng(seed)
    shapes = {"x_RD": (case.R, case.D)}
    shapes |= {"bias_EF": (case.E, case.F)} if case.has_bias else {}
    shapes |= {"gate_R": (case.R,)} if case.has_gate else {}
    given = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    given["x_RD"] /= np.float32(np.sqrt(case.D))
    is_without = sizes_E == 0
    if case.has_bias:
        given["bias_EF"][is_without] = np.nan
    for name in given.keys() & {"x_RD", "gate_R"}:
        given[name][sum(sizes_E) :] = np.nan
    given["x_RD"] = jnp.asarray(given["x_RD"], case.dtype)
    exact = {name: np.asarray(each, np.float64) for name, each in given.items()}
    for name in ("w_EDF", "w_gate_EDF")[: 1 + case.is_gated_unit]:
        if case.bits is None:
            w_EDF = rng.normal(size=(case.E, case.D, case.F))
            w_EDF[is_without] = np.nan
            w_EDF = jnp.asarray(w_EDF, case.dtype)
            given[name] = w_EDF.swapaxes(1, 2) if case.transpose_w else w_EDF
            exact[name] = np.asarray(w_EDF, np.float64)
        else:
            given[name], exact[name] = quantized(case, rng, is_without)
    return given, exact


def quantized(case: Product, rng, is_without):
    E, F, D = case.E, case.F, case.D
    G, most = D // (case.group_size or D), 1 << (case.bits - 1)
    values_EFD = rng.integers(-most, most, (E, F, D))
    scales_EFG = (rng.uniform(0.5, 1, (E, F, G)) / most).astype(np.float32)
    scales_EFG[is_without] = np.nan
    exact = values_EFD.reshape(E, F, G, -1) * np.float64(scales_EFG)[..., None]
    native = jnp.asarray(values_EFD, jnp.int8 if case.bits == 8 else jnp.int4)
    q = QTensor(native, jnp.asarray(scales_EFG), case.bits, case.group_size)
    q = q.packed() if case.kernel == "triton" else q
    return q, exact.reshape(E, F, D).swapaxes(1, 2)


def call(case: Product, parts: dict, sizes_E, **options):
    options |= {"activation": case.activation, "implementation": case.kernel}
    options |= {"interpret": loops.interprets(case.kernel)}
    named = {key: each for key, each in parts.items() if key in ("bias_EF", "gate_R")}
    if case.bits is not None:
        return quantized_grouped_matmul(
            parts["x_RD"], parts["w_EDF"], sizes_E, w_gate=parts.get("w_gate_EDF"), **named,
            **options,
        )  # fmt: skip
    return grouped_matmul(
        parts["x_RD"], parts["w_EDF"], sizes_E, w_gate_EDF=parts.get("w_gate_EDF"),
        transpose_w=case.transpose_w, **named, **options,
    )  # fmt: skip


@functools.cache
def compiled(case: Product):
    return jax.jit(lambda parts, sizes_E: call(case, parts, sizes_E, tiling=case.tiling))


@functools.cache
def compiled_gradients(case: Product):
    def run(parts, sizes_E, dy_RF):
        y_RF, pull_back = jax.vjp(lambda parts: call(case, parts, sizes_E), parts)
        return y_RF, pull_back(dy_RF)[0]

    return jax.jit(run)


def assert_near(got, want, dtype: str, message):
    got = np.asarray(jnp.asarray(got).astype(jnp.float32), np.float64)
    assert got.shape == want.shape, message
    error = np.abs(got - want).max(initial=0)
    assert error <= TOLERANCE[dtype] * max(1, np.abs(want).max(initial=0)), (error, message)


def by_loops(case: Product, exact, sizes_E) -> np.ndarray:
    matrices = [exact[name] for name in ("w_EDF", "w_gate_EDF") if name in exact]
    sums = [loops.product(exact["x_RD"], each, sizes_E) for each in matrices]
    bias_EF, gate_R = exact.get("bias_EF"), exact.get("gate_R")
    return loops.with_epilogue(sums, sizes_E, bias_EF, case.activation, gate_R)[0]


def check(case: Product, total: int, seed: int) -> None:
    sizes_E = draw_sizes(case.R, case.E, total, seed)
    given, exact = operands(case, sizes_E, seed)
    y_RF = compiled(case)(given, jnp.asarray(sizes_E))
    assert y_RF.dtype == case.dtype
    assert_near(y_RF, by_loops(case, exact, sizes_E), case.dtype, (case, sizes_E))


# More experts than threads of a warpgroup, R % 8 = 5, quantized and in a gated unit.
MANY = {
    "tpu": Product("tpu", 21, 130, 128, 64, "float32", 8, None, "silu", is_gated_unit=True),
    "gpu": Product(
        "gpu", 21, 130, 128, 64, "bfloat16", 4, 64, "silu", is_gated_unit=True, splits=2
    ),
    "triton": Product("triton", 21, 130, 64, 44, "float32", 4, 32, "silu", is_gated_unit=True),
}


# Hopper's kernels take the interpreter longest.
by_kernel = pytest.mark.parametrize("kernel", ["tpu", "triton", slow("gpu")])


@by_kernel
def test_130_experts_and_sizes_below_at_and_above_the_rows(kernel):
    case = MANY[kernel]
    for seed, total in enumerate((13, case.R, 3 * case.R)):
        check(case, total, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kernel", KERNELS)
def test_random_products(kernel, seed):
    case = draw(kernel, seed)
    for total in (case.R - case.R // 3, case.R, case.R + 9):
        check(case, total, seed)


def check_gradients(case: Product, total: int, seed: int) -> None:
    sizes_E = draw_sizes(case.R, case.E, total, seed)
    given, exact = operands(case, sizes_E, seed)
    dy_RF = np.random.default_rng(seed + 1).normal(size=(case.R, case.F))
    dy_RF[sum(sizes_E) :] = np.nan
    dy_RF = jnp.asarray(dy_RF, case.dtype)
    y_RF, gradients = compiled_gradients(case)(given, jnp.asarray(sizes_E), dy_RF)
    assert_near(y_RF, by_loops(case, exact, sizes_E), case.dtype, (case, sizes_E))
    want = loops.gradients(exact, sizes_E, np.asarray(dy_RF, np.float64), case.activation)
    assert gradients.keys() == want.keys()
    for name, got in gradients.items():
        assert got.dtype == given[name].dtype
        if case.transpose_w and name.startswith("w_"):
            got = got.swapaxes(1, 2)
        assert_near(got, want[name], case.dtype, (name, case, sizes_E))


DIFFERENTIATED = {
    "tpu": Product("tpu", 13, 3, 128, 64, "float32", None, None, "gelu", is_gated_unit=True),
    "gpu": Product("gpu", 13, 3, 64, 64, "bfloat16", None, None, "gelu"),
    "triton": Product("triton", 13, 3, 40, 44, "float32", None, None, "gelu", True),
}


@by_kernel
def test_raw_gradients_through_the_public_function(kernel):
    """Of rows, both matrices, bias and gates, for sizes below and above the rows."""
    for seed, total in enumerate((9, 20)):
        check_gradients(DIFFERENTIATED[kernel], total, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kernel", KERNELS)
def test_random_raw_gradients(kernel, seed):
    case = dataclasses.replace(draw(kernel, seed), bits=None, group_size=None)
    for total in (case.R - case.R // 3, case.R + 9):
        check_gradients(case, total, seed)
