# SPDX-License-Identifier: Apache-2.0
"""The TPU kernels, interpreted with race detection: every edge against loops in float64.

40 rows in blocks of 16, four experts, two blocks of each other axis; `uneven` sizes divide by
none.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul import tpu
from pallas_kernels.grouped_matmul.tpu_product import multiply_rows
from pallas_kernels.quantized_grouped_matmul import tpu as quantized
from pallas_kernels.tiling.tpu import Tiling
from tests.cases import slow, slow_unless
from tests.kernels import loops

ROWS = 40
EDGES = {
    "straddling": (10, 0, 20, 10),
    "whole_blocks": (16, 16, 0, 8),
    "all_in_one": (0, 0, 40, 0),
    "single_rows": (1, 1, 1, 1),
    "pruned_tail": (5, 0, 6, 9),
    "last_alone": (0, 0, 0, 7),
    "no_rows": (0, 0, 0, 0),
    "too_many": (12, 0, 20, 16),
}
# Blocks of one expert, blocks of several and without rows, and nothing else: the schedule
# itself has tests of its own (test_tile_schedule.py).
DEFAULT_EDGES = ("whole_blocks", "pruned_tail")
FIRST_EDGES = (*DEFAULT_EDGES, "no_rows", "too_many")
SIZES = {"even": (256, 256), "uneven": (200, 190)}
TOLERANCE = {"float32": 2e-6, "bfloat16": 8e-3}


def grid(default: list[tuple], keys):
    """Every key with every edge; slow but for the default keys, the first with more edges."""
    fast = {(default[0], edge) for edge in FIRST_EDGES}
    fast |= {(key, edge) for key in default for edge in DEFAULT_EDGES}
    return [slow_unless((key, edge) in fast, *key, edge) for key in keys for edge in EDGES]


def racing_params(**options) -> pltpu.InterpretParams:
    return pltpu.InterpretParams(detect_races=True, **options)


@functools.cache
def compiled(kernel, num_cores: int = 1, **settings):
    """A kernel, interpreted, compiled once for all that ask for the same settings."""
    interpret = racing_params(num_cores_or_threads=num_cores)
    return jax.jit(functools.partial(kernel, interpret=interpret, **settings))


@contextlib.contextmanager
def without_races():
    """Fails if the kernel that ran within raced; after an exception the next one can run."""
    try:
        yield
        assert not interpret_pallas_call.races.races_found, "race found; see the output"
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def run_without_races(function, *arrays, **named) -> np.ndarray:
    with without_races():
        return np.asarray(jax.block_until_ready(function(*arrays, **named)))


def rows_of(seed: int, R: int, D: int, group_sizes, dtype) -> np.ndarray:
    """Rows sorted by expert; NaN in those that belong to none."""
    x_RD = np.random.default_rng(seed).normal(size=(R, D)).astype(jnp.dtype(dtype))
    x_RD[sum(group_sizes) :] = np.nan
    return x_RD


def matrices_of(seed: int, shape, group_sizes, dtype) -> np.ndarray:
    """A matrix an expert; NaN in those of experts without rows."""
    w_EXX = np.random.default_rng(seed).normal(size=shape).astype(jnp.dtype(dtype))
    w_EXX[np.array(group_sizes) == 0] = np.nan
    return w_EXX


def counts(group_sizes) -> np.ndarray:
    return np.array(group_sizes, np.int32)


def assert_close(got, expected, dtype) -> None:
    """To rounding of the result, relative to the largest of it."""
    assert got.dtype == jnp.dtype(dtype)
    got = got.astype(np.float64)
    assert np.isfinite(got).all()
    scale = max(np.abs(expected).max(), 1)
    np.testing.assert_allclose(got / scale, expected / scale, atol=TOLERANCE[str(dtype)])


# A whole contraction keeps no sum between steps; a cut one does, and masks what is left over.
@pytest.mark.parametrize(
    ("dtype", "size", "depth", "is_output_major", "edge"),
    grid(
        [("float32", "uneven", "cut", False), ("bfloat16", "uneven", "cut", True)],
        [
            (dtype, size, depth, is_output_major)
            for dtype in ("float32", "bfloat16")
            for size in SIZES
            for depth in ("whole", "cut")
            for is_output_major in (False, True)
        ],
    ),
)
def test_rows_meet_the_matrix_of_their_expert(dtype, size, depth, is_output_major, edge):
    (D, F), group_sizes = SIZES[size], EDGES[edge]
    x_RD = rows_of(0, ROWS, D, group_sizes, dtype)
    w_EDF = matrices_of(1, (4, D, F), group_sizes, dtype)
    w = np.ascontiguousarray(w_EDF.swapaxes(1, 2)) if is_output_major else w_EDF
    tiling = Tiling(16, D if depth == "whole" else 128, 128)
    run = compiled(multiply_rows, tiling=tiling, is_output_major=is_output_major)
    y_RF = run_without_races(run, x_RD, w, counts(group_sizes))
    assert_close(y_RF, loops.product(x_RD, w_EDF, group_sizes), dtype)
    assert not y_RF[sum(group_sizes) :].any()


# Of a block of 256 rows: first pieces of 32, 64, 96 and 128 rows, one that would end behind the
# block, further ones of 128, and rows of no expert. Of one of 48, what is no multiple of 32.
PIECES = {
    "of 256": (256, (3, 50, 0, 70, 133, 0, 33, 200), 520),
    "of 48": (48, (17, 0, 30, 48, 0, 20, 0, 5), 130),
}


@pytest.mark.parametrize(
    "name", [slow(name) if name == "of 48" else name
             for name in PIECES],
)  # fmt: skip
def test_tiles_multiply_their_own_rows_in_pieces(name):
    block, group_sizes, R = PIECES[name]
    x_RD = rows_of(0, R, 128, group_sizes, "bfloat16")
    w_EDF = matrices_of(1, (8, 128, 128), group_sizes, "bfloat16")
    gate_R = np.random.default_rng(2).uniform(0.1, 1, R).astype(np.float32)
    gate_R[sum(group_sizes) :] = np.nan
    run = compiled(tpu.forward, tiling=Tiling(block, 128, 128))
    y_RF = run_without_races(run, x_RD, w_EDF, counts(group_sizes), gate_R=gate_R)
    want = loops.product(x_RD, w_EDF, group_sizes)
    used = sum(group_sizes)
    want[:used] *= gate_R[:used, None]
    assert_close(y_RF, want, "bfloat16")
    assert not y_RF[used:].any()


def test_two_cores_share_the_columns():
    group_sizes = EDGES["straddling"]
    x_RD = rows_of(0, ROWS, 128, group_sizes, "float32")
    # Three blocks: one core has two of them.
    w_EDF = matrices_of(1, (4, 128, 384), group_sizes, "float32")
    tiling = Tiling(16, 128, 128, cores=2)
    run = compiled(multiply_rows, num_cores=2, tiling=tiling, is_output_major=False)
    y_RF = run_without_races(run, x_RD, w_EDF, counts(group_sizes))
    assert_close(y_RF, loops.product(x_RD, w_EDF, group_sizes), "float32")


@pytest.mark.parametrize(
    ("dtype", "out_dtype", "size", "edge"),
    grid(
        [("float32", "float32", "uneven"), ("bfloat16", "bfloat16", "even")],
        [
            (dtype, out_dtype, size)
            for dtype in ("float32", "bfloat16")
            for out_dtype in ("float32", "bfloat16")
            for size in SIZES
        ],
    ),
)
def test_weight_gradient_sums_over_the_rows_of_each_expert(dtype, out_dtype, size, edge):
    (D, F), group_sizes = SIZES[size], EDGES[edge]
    x_RD = rows_of(0, ROWS, D, group_sizes, dtype)
    dy_RF = rows_of(1, ROWS, F, group_sizes, dtype)
    run = compiled(tpu.weight_gradient, tiling=Tiling(16, 128, 128), out_dtype=out_dtype)
    dw_EDF = run_without_races(run, x_RD, dy_RF, counts(group_sizes))
    assert_close(dw_EDF, loops.weight_gradient(x_RD, dy_RF, group_sizes), out_dtype)
    assert not dw_EDF[np.array(group_sizes) == 0].any()


def test_two_cores_share_the_blocks_of_the_gradient():
    group_sizes = (10, 0, 17, 9)
    x_RD = rows_of(0, 37, 128, group_sizes, "float32")
    dy_RF = rows_of(1, 37, 384, group_sizes, "float32")
    tiling = Tiling(16, 128, 128, cores=2)
    run = compiled(tpu.weight_gradient, num_cores=2, tiling=tiling, out_dtype="float32")
    dw_EDF = run_without_races(run, x_RD, dy_RF, counts(group_sizes))
    assert_close(dw_EDF, loops.weight_gradient(x_RD, dy_RF, group_sizes), "float32")


# All parts of the epilogue; with matrices cut along D, whole, and multiplied in chunks.
EPILOGUES = {
    "geglu in chunks": ("gelu", True, 128, True),
    "swiglu, cut": ("silu", True, 128, False),
    "relu, cut": ("relu", False, 128, False),
    "gelu_exact": ("gelu_exact", False, None, False),
    "linear": (None, True, None, True),
}
FAST_EPILOGUES = ("geglu in chunks", "relu, cut")


@pytest.mark.parametrize(
    ("name", "edge"),
    [
        slow_unless(name in FAST_EPILOGUES and edge == "pruned_tail", name, edge)
        for name in EPILOGUES
        for edge in EDGES
    ],
)  # fmt: skip
def test_epilogue_and_residual(name, edge, monkeypatch):
    activation, is_gated_unit, block_D, has_chunks = EPILOGUES[name]
    if has_chunks:
        monkeypatch.setattr("pallas_kernels.tiling.tpu.MAX_MATRIX", 128 * 128)
    (D, F), group_sizes = (256, 512) if has_chunks else SIZES["uneven"], EDGES[edge]
    tiling = Tiling(16, block_D or D, 256 if has_chunks else 128)
    assert not has_chunks or tiling.chunk == 128
    rng = np.random.default_rng(3)
    x_RD = rows_of(0, ROWS, D, group_sizes, "float32") / 8
    x_RD = x_RD.astype(np.float32)
    matrices = [matrices_of(seed, (4, D, F), group_sizes, "float32") for seed in (1, 2)]
    matrices = matrices[: 1 + is_gated_unit]
    bias_EF = rng.normal(size=(4, F)).astype(np.float32)
    gate_R = rng.uniform(0.1, 1, ROWS).astype(np.float32)
    gate_R[sum(group_sizes) :] = np.nan
    sums = [loops.product(x_RD, w_EDF, group_sizes) for w_EDF in matrices]
    want, residual = loops.with_epilogue(sums, group_sizes, bias_EF, activation, gate_R)
    run = compiled(tpu.forward, tiling=tiling, activation=activation, has_residual=True)
    named = {"w_gate": matrices[1]} if is_gated_unit else {}
    with without_races():
        got, kept = run(
            x_RD, matrices[0], counts(group_sizes), bias_EF=bias_EF, gate_R=gate_R, **named
        )
        jax.block_until_ready(got)
    assert_close(np.asarray(got), want, "float32")
    for one, other in zip(kept, residual, strict=True):
        assert_close(np.asarray(one), other, "float32")


def quantized_matrices(bits: int, shape, num_groups: int):
    """Values, scales of different sizes, and float64 `[E, D, F]`; -8 and -128 among them."""
    rng = np.random.default_rng(2)
    least = -(1 << (bits - 1))
    E, F, D = shape
    values_EFD = rng.integers(least, -least, shape)
    scales_EFG = rng.uniform(0.5, 2, (E, F, num_groups)).astype(np.float32)
    grouped = values_EFD.reshape(E, F, num_groups, -1) * np.float64(scales_EFG)[..., None]
    native = jnp.asarray(values_EFD, jnp.int8 if bits == 8 else jnp.int4)
    return native, scales_EFG, grouped.reshape(E, F, D).swapaxes(1, 2)


@pytest.mark.parametrize(
    ("bits", "dtype", "size", "depth", "has_epilogue", "edge"),
    grid(
        [(8, "float32", "uneven", "cut", True), (4, "bfloat16", "even", "whole", True)],
        [
            (bits, dtype, size, depth, has_epilogue)
            for bits in (8, 4)
            for dtype in ("float32", "bfloat16")
            for size in SIZES
            for depth in ("whole", "cut")
            for has_epilogue in (True, False)
        ],
    ),
)
def test_rows_meet_the_dequantized_matrix(bits, dtype, size, depth, has_epilogue, edge):
    (D, F), group_sizes = SIZES[size], EDGES[edge]
    x_RD = rows_of(0, ROWS, D, group_sizes, dtype)
    values_EFD, scales_EFG, w_EDF = quantized_matrices(bits, (4, F, D), 1)
    expected = loops.product(x_RD, w_EDF, group_sizes)
    extras = {}
    if has_epilogue:
        rng = np.random.default_rng(3)
        bias_EF = 100 * rng.normal(size=(4, F)).astype(np.float32)
        gate_R = rng.uniform(0.1, 1, ROWS).astype(np.float32)
        gate_R[sum(group_sizes) :] = np.nan
        for row, expert in enumerate(loops.expert_of_rows(group_sizes, ROWS)):
            expected[row] = gate_R[row] * np.maximum(expected[row] + bias_EF[expert], 0)
        extras = {"bias_EF": bias_EF, "gate_R": gate_R}
    tiling = Tiling(16, D if depth == "whole" else 128, 128)
    activation = "relu" if has_epilogue else None
    run = compiled(quantized.forward, tiling=tiling, activation=activation)
    y_RF = run_without_races(run, x_RD, values_EFD, scales_EFG, counts(group_sizes), **extras)
    assert_close(y_RF, expected, dtype)
    assert not y_RF[sum(group_sizes) :].any()


@pytest.mark.parametrize(
    ("bits", "block_D"), [(8, 256), *(slow(4, block_D) for block_D in (512, 128))]
)
def test_groups_of_channels_have_scales_of_their_own(bits, block_D):
    D, F, G = 512, 190, 4
    group_sizes = EDGES["pruned_tail"]
    x_RD = rows_of(0, ROWS, D, group_sizes, "float32")
    values_EFD, scales_EFG, w_EDF = quantized_matrices(bits, (4, F, D), G)
    run = compiled(quantized.forward, tiling=Tiling(16, block_D, 128))
    y_RF = run_without_races(run, x_RD, values_EFD, scales_EFG, counts(group_sizes))
    assert_close(y_RF, loops.product(x_RD, w_EDF, group_sizes), "float32")


@pytest.mark.parametrize("transpose_w", [False, True])
def test_no_operand_is_transposed(transpose_w):
    x_RD, w_EDF = np.zeros((24, 136 if transpose_w else 160)), np.zeros((3, 160, 136))
    forward = functools.partial(tpu.forward, transpose_w=transpose_w)
    operands = np.float32(x_RD), np.float32(w_EDF), counts((9, 0, 12))
    program = str(jax.make_jaxpr(forward)(*operands))
    outer = program.partition("pallas_call")[0]
    assert "pallas_call" in program
    assert "transpose[" not in outer


def test_race_detection_finds_a_race():
    def reads_before_it_waits(x_hbm, y_vmem, x_vmem, semaphore):
        copy = pltpu.make_async_copy(x_hbm, x_vmem, semaphore)
        copy.start()
        y_vmem[...] = x_vmem[...]
        copy.wait()

    racy = pl.pallas_call(
        reads_before_it_waits,
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32), pltpu.SemaphoreType.DMA],
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        interpret=racing_params(dma_execution_mode="eager"),
    )
    # JAX 0.12 raises by itself.
    with pytest.raises((AssertionError, RuntimeError), match="[Rr]ace"), without_races():
        jax.block_until_ready(racy(np.zeros((8, 128), np.float32)))


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        (
            tpu.refusal("float16", "float16", 8, 8, 8, 2),
            "x_RD is float16; expected bfloat16 or float32: ",
        ),
        (tpu.refusal("int8", "int8", 8, 8, 8, 2), "x_RD is int8; expected"),
        (
            tpu.refusal("bfloat16", "float32", 8, 8, 8, 2),
            "expected bfloat16, the dtype of x_RD: cast the weights",
        ),
        (
            tpu.refusal("bfloat16", "bfloat16", 0, 8, 8, 2),
            "R=0, D=8, F=8, E=2; expected sizes of 1",
        ),
        (
            quantized.refusal("float16", 8, 8, 256, 256, 4, None),
            "x_RD is float16; expected bfloat16 or float32: ",
        ),
        (
            quantized.refusal("bfloat16", 2, 8, 256, 256, 4, None),
            "w has 2 bits; expected 4 or 8: use",
        ),
        (quantized.refusal("bfloat16", 8, 0, 256, 256, 4, None), "R=0, D=256"),
        (
            quantized.refusal("bfloat16", 8, 8, 256, 256, 4, 64),
            "w has group_size=64; expected a mul",
        ),
        (quantized.refusal("bfloat16", 8, 8, 256, 256, 4, 384), "divides D=256"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(reason, said):
    assert said in reason


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_any_size_and_whole_groups_of_channels_are_taken(dtype):
    assert tpu.refusal(dtype, dtype, 1, 3, 5, 7) is None
    for bits, group_size in ((8, None), (4, None), (8, 128), (4, 512)):
        assert quantized.refusal(dtype, bits, 7, 1024, 190, 3, group_size) is None


def test_tilings_that_no_tpu_can_address_raise():
    x_RD, w_EDF = np.zeros((16, 512), np.float32), np.zeros((2, 512, 128), np.float32)
    sizes_E = counts((1, 2))
    with pytest.raises(ValueError, match="block_D=100 is neither 512 nor a smaller multiple"):
        tpu.forward(x_RD, w_EDF, sizes_E, tiling=Tiling(16, 100, 128), interpret=True)
    with pytest.raises(ValueError, match="block_R=8 is not a multiple of 16"):
        tpu.weight_gradient(
            x_RD, x_RD, sizes_E, out_dtype="float32", tiling=Tiling(8, 512, 512), interpret=True
        )
    values_EFD, scales_EFG, _ = quantized_matrices(8, (2, 128, 512), 2)
    with pytest.raises(ValueError, match="block_D=128 cuts groups of 256 .* a multiple of 256"):
        quantized.forward(x_RD, values_EFD, scales_EFG, sizes_E, tiling=Tiling(16, 128, 128))
