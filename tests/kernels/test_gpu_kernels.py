# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernels against NumPy in float64: interpreted, and on a GPU where there is one.

Interpreted they run inside `jax.shard_map` on one device, where the types of arrays name a mesh
axis, and look for races.
"""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from pallas_kernels.grouped_matmul import gpu, gpu_walk
from pallas_kernels.grouped_matmul.tile_schedule import row_tiles
from pallas_kernels.launches import recorded_launches
from pallas_kernels.quantization.qtensor import QTensor
from pallas_kernels.quantized_grouped_matmul import gpu as quantized
from pallas_kernels.tiling.gpu import checked, with_parts
from tests.cases import slow
from tests.kernels import loops

# Rows of 5 experts: empty ones first and in the middle, single rows, sizes of no tile.
GROUPS = {
    "ragged": (0, 3, 0, 17, 1),
    "one_has_all": (0, 0, 24, 0, 0),
    "none": (0, 0, 0, 0, 0),
    "single_rows": (1, 1, 1, 1, 1),
    # More rows than there are, which only traced sizes can say: cut at the last row.
    "too_many": (9, 0, 11, 7, 5),
    "whole_tiles": (16, 0, 16, 32, 16),
    # The last of their tiles of 256 reach to rows 64, 106, 42, 182 and 72.
    "parts_of_tiles": (320, 106, 40, 180, 66),
}
LARGE_GROUPS = [*GROUPS.values(), (300, 0, 129, 7, 1000), (2, 9, 1, 8, 4)]
# What a float32 sum, rounded once to this dtype, may be off by, relative to the largest.
TOLERANCE = {"bfloat16": 4e-3, "float16": 5e-4, "float32": 1e-5}
# F is a block and a half; D two steps.
D, F, E = 128, 192, 5
SMALL = gpu.Tiling(tile_m=64, tile_n=16, tile_k=64, stages=2)
# Blocks enough for two parts of the tiles of one expert, one of several experts.
PARTS = dataclasses.replace(SMALL, splits=2, num_sms=8)


def rows(sizes, columns: int, dtype, *, seed: int = 0):
    """Sorted rows, 26 where that is enough, and at least 5 of no expert that hold NaN."""
    used = sum(sizes)
    number = 26 if used < 33 else used + 5
    values = np.random.default_rng(seed).standard_normal((number, columns))
    values[used:] = np.nan
    return jnp.asarray(values, dtype)


def in_float64(array) -> np.ndarray:
    return np.asarray(jnp.asarray(array).astype(jnp.float32), np.float64)


def assert_agrees(got, want: np.ndarray, dtype):
    assert got.dtype == dtype
    got = in_float64(got)
    bound = TOLERANCE[jnp.dtype(dtype).name] * max(1.0, np.abs(want).max())
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= bound


@functools.cache
def interpreted(kernel, **settings):
    """A kernel interpreted on the CPU, compiled once for all sizes of groups."""
    try:
        device = jax.devices("cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS names the GPU alone.
        device = jax.devices()[0]
    mesh = jax.sharding.Mesh([device], ("data",))
    spec = jax.sharding.PartitionSpec("data")

    def on_device(operands, named):
        return kernel(*operands, **named, **settings, interpret=True)

    mapped = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=spec, out_specs=spec))

    def run(*operands, **named):
        result = jax.block_until_ready(mapped(operands, named))
        assert not gpu_callbacks.get_races().races_found
        return result

    return run


def shipped(kernel, **settings):
    """A kernel as it runs on a GPU."""
    return jax.jit(functools.partial(kernel, **settings))


# A grid that runs interpreted and, where there is one, on a GPU.
everywhere = pytest.mark.parametrize(
    "make", [interpreted, pytest.param(shipped, marks=pytest.mark.gpu)]
)


def check_forward(
    make, sizes, dtype, *, transpose_w=False, tiling=SMALL, D=D, F=F, out_dtype=None
):
    x_RD = rows(sizes, D, dtype)
    shape = (len(sizes), F, D) if transpose_w else (len(sizes), D, F)
    w = jnp.asarray(np.random.default_rng(1).standard_normal(shape), dtype)
    out_dtype = jnp.dtype(out_dtype or dtype)
    run = make(gpu.forward, transpose_w=transpose_w, tiling=tiling, out_dtype=out_dtype)
    y_RF = run(x_RD, w, jnp.asarray(sizes, jnp.int32))
    w_EDF = in_float64(w).swapaxes(1, 2) if transpose_w else in_float64(w)
    assert y_RF.dtype == out_dtype
    assert_agrees(y_RF, loops.product(in_float64(x_RD), w_EDF, sizes), out_dtype)


def test_float32_results_have_steps_that_fit_beside_them():
    """Of tilings that fit results of 16 bits, as a file of tuned ones may have them."""
    for tiling, dtypes in (
        (gpu.Tiling(64, 128, 128, warpgroups=3, stages=2), ("bfloat16", "bfloat16")),
        (gpu.Tiling(64, 256, 128, stages=2), ("bfloat16", "int8")),
    ):
        checked(tiling, 1024, *map(jnp.dtype, dtypes))
        parts = with_parts(tiling, 1024, *map(jnp.dtype, dtypes))
        assert checked(parts, 1024, *map(jnp.dtype, dtypes)).splits == 2


@pytest.mark.slow
@pytest.mark.parametrize("D", [64, 192])
def test_float32_results_are_sums_in_parts(D):
    """One step, or three, is padded to two parts."""
    check_forward(interpreted, GROUPS["ragged"], jnp.bfloat16, D=D, F=64, out_dtype=jnp.float32)


@pytest.mark.parametrize("transpose_w", [slow(False), True])
def test_ragged_groups_and_a_tail_of_nan(transpose_w):
    check_forward(interpreted, GROUPS["ragged"], jnp.bfloat16, transpose_w=transpose_w)


def test_tiles_are_multiplied_as_high_as_their_rows_reach():
    tiling = gpu.Tiling(tile_m=64, tile_n=256, tile_k=64, warpgroups=1, stages=2)
    sizes = GROUPS["parts_of_tiles"]
    check_forward(interpreted, sizes, jnp.bfloat16, tiling=tiling, D=64, F=64)
    tiles = row_tiles(jnp.asarray(sizes), sum(sizes), tiling.tile_n)
    ends = (tiles.offset_P + tiles.size_P)[: tiles.count[0]].tolist()
    assert ends == [256, 64, 106, 42, 182, 72]
    copied = [gpu_walk.copied_rows(tiling, end) for end in ends]
    assert copied == [256, 64, 128, 64, 192, 96]
    assert gpu_walk.copied_rows(tiling, 129) == 160


@pytest.mark.slow
@pytest.mark.parametrize("bits", [None, 4])
def test_one_program_has_as_many_parts_as_active_experts_leave_blocks_idle(bits):
    """Known at run time only; what is not written is NaN when it is interpreted."""
    tiling = gpu.Tiling(64, 16, 64, warpgroups=1, stages=2, splits=4, num_sms=4)
    walk = gpu_walk.Walk(tiling=tiling, features=64, depth_steps=4, num_experts=8)
    for sizes, parts in (
        ((0, 0, 0, 0, 0, 0, 8, 0), 4),
        ((0, 3, 0, 0, 0, 5, 0, 0), 2),
        ((1, 1, 1, 1, 1, 1, 1, 1), 1),
        ((0, 0, 0, 0, 0, 0, 0, 0), 1),
    ):
        tiles = row_tiles(jnp.asarray(sizes), 26, 16)
        assert walk.of_run(tiles).parts == parts
        if bits is None:
            check_forward(interpreted, sizes, jnp.bfloat16, tiling=tiling, D=256, F=64)
        else:
            check_quantized(
                interpreted, sizes, bits, jnp.bfloat16, groups_of_d=2, epilogue=True,
                tiling=tiling, D=256, F=64,
            )  # fmt: skip


def test_bytes_of_parts_are_those_that_a_run_writes():
    tiling = gpu.Tiling(64, 16, 64, warpgroups=1, stages=2, splits=4, num_sms=4)
    shapes = [((8, 256), jnp.bfloat16), ((8, 256, 64), jnp.bfloat16), ((8,), jnp.int32)]
    with recorded_launches() as recorded:
        jax.eval_shape(
            functools.partial(gpu.forward, tiling=tiling),
            *(jax.ShapeDtypeStruct(*each) for each in shapes),
        )
    product = recorded[-1]
    # One expert has four parts, two have two parts each, eight have one.
    for sizes, experts, parts in (
        ((8, *[0] * 7), 1, 4),
        ((4, 4, *[0] * 6), 2, 2),
        ([1] * 8, 8, 1),
    ):
        (x_bytes, w_bytes, *_), written = product.copied(np.asarray(sizes))
        assert (x_bytes, w_bytes) == (8 * 256 * 2, experts * 256 * 64 * 2)
        assert written == [parts * 8 * 64 * 4]


def test_sums_in_parts_have_the_features_of_whole_tiles():
    """A copy of one row goes past the row's end, which a GPU does not cut off."""
    block = PARTS.tile_m * PARTS.warpgroups
    assert F % block
    operands = rows(GROUPS["ragged"], D, jnp.bfloat16), jnp.ones((E, D, F), jnp.bfloat16)
    with recorded_launches() as recorded:
        y_RF = jax.eval_shape(
            functools.partial(gpu.forward, tiling=PARTS), *operands, jnp.zeros(E, jnp.int32)
        )
    [stored] = recorded[-1].results
    assert stored.shape[-1] == -(-F // block) * block
    assert y_RF.shape[-1] == F


@pytest.mark.slow
@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("groups", list(GROUPS))
@pytest.mark.parametrize(
    "tiling",
    [
        SMALL,
        gpu.Tiling(tile_m=64, tile_n=8, tile_k=128, warpgroups=1, stages=2, panel=1),
        gpu.Tiling(tile_m=128, tile_n=32, tile_k=64, stages=3, splits=1, num_sms=3),
        PARTS,
        gpu.Tiling(tile_m=64, tile_n=256, tile_k=64, stages=2, panel=1),
    ],
    ids=["small", "one_warpgroup", "wide", "parts", "many_rows"],
)
@everywhere
def test_every_edge(make, tiling, groups, dtype, transpose_w):
    check_forward(make, GROUPS[groups], dtype, transpose_w=transpose_w, tiling=tiling)


@pytest.mark.gpu
@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("sizes", LARGE_GROUPS)
def test_on_the_gpu(sizes, dtype, transpose_w):
    check_forward(shipped, sizes, dtype, transpose_w=transpose_w, tiling=None, D=384, F=320)
    x_RD, w_EDF = rows(sizes, D, dtype), jnp.ones((E, D, F), dtype)
    operands = x_RD, w_EDF, jnp.asarray(sizes, jnp.int32)
    found = in_float64(shipped(gpu.forward, tiling=SMALL)(*operands))
    other = in_float64(interpreted(gpu.forward)(*operands))
    assert np.abs(found - other).max() <= 2e-2 * max(1.0, np.abs(other).max())


def check_gradient(make, sizes, dtype, out_dtype, tiling, D=192, F=128):
    x_RD, dy_RF = rows(sizes, D, dtype), rows(sizes, F, dtype, seed=3)
    run = make(gpu.weight_gradient, out_dtype=out_dtype, tiling=tiling)
    dw_EDF = run(x_RD, dy_RF, jnp.asarray(sizes, jnp.int32))
    want = loops.weight_gradient(in_float64(x_RD), in_float64(dy_RF), sizes)
    assert_agrees(dw_EDF, want, out_dtype)


GRADIENT = gpu.Tiling(tile_m=64, tile_n=64, tile_k=64, stages=2)


@pytest.mark.parametrize("groups", ["ragged", slow("too_many")])
def test_weight_gradient_of_ragged_groups_and_a_tail_of_nan(groups):
    check_gradient(
        interpreted, GROUPS[groups], jnp.bfloat16, jnp.float32, GRADIENT, D=128, F=64
    )


@pytest.mark.slow
@pytest.mark.parametrize("out_dtype", [jnp.float32, None])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("sizes", [*GROUPS.values(), (70, 0, 3, 131, 64)])
@pytest.mark.parametrize(
    "tiling",
    [GRADIENT, gpu.Tiling(tile_m=64, tile_n=256, tile_k=64, warpgroups=1, stages=3, panel=1)],
    ids=["small", "wide"],
)
@everywhere
def test_every_edge_of_the_weight_gradient(make, tiling, sizes, dtype, out_dtype):
    check_gradient(make, sizes, dtype, out_dtype or dtype, tiling)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("sizes", LARGE_GROUPS)
def test_weight_gradient_on_the_gpu(sizes, dtype):
    check_gradient(shipped, sizes, dtype, jnp.float32, None, D=384, F=320)


def check_epilogue(make, sizes, activation, *, is_gated_unit, tiling=SMALL, D=D, F=F):
    rng = np.random.default_rng(5)
    E, x_RD = len(sizes), rows(sizes, D, jnp.bfloat16) / 8
    matrices = [
        jnp.asarray(rng.standard_normal((E, D, F)), jnp.bfloat16)
        for _ in range(1 + is_gated_unit)
    ]
    bias_EF = rng.standard_normal((E, F)).astype(np.float32)
    gate_R = rng.uniform(0.1, 1.0, len(x_RD)).astype(np.float32)
    gate_R[sum(sizes) :] = np.nan
    sums = [loops.product(in_float64(x_RD), in_float64(w), sizes) for w in matrices]
    want, residual = loops.with_epilogue(sums, sizes, bias_EF, activation, gate_R)
    run = make(gpu.forward, tiling=tiling, activation=activation, has_residual=True)
    named = {"w_gate": matrices[1]} if is_gated_unit else {}
    got, kept = run(
        x_RD, matrices[0], jnp.asarray(sizes, jnp.int32), bias_EF=jnp.asarray(bias_EF),
        gate_R=jnp.asarray(gate_R), **named,
    )  # fmt: skip
    assert_agrees(got, want, jnp.bfloat16)
    for one, other in zip(kept, residual, strict=True):
        assert_agrees(one, other, jnp.bfloat16)


@pytest.mark.parametrize(
    ("activation", "is_gated_unit", "tiling", "groups"),
    [
        ("gelu", True, SMALL, "ragged"),
        *(
            slow(*each, groups)
            for each in (
                ("silu", True, SMALL),
                ("relu", False, PARTS),
                ("gelu", True, PARTS),
                ("gelu_exact", False, SMALL),
                (None, True, gpu.Tiling(64, 128, 64, stages=2)),
            )
            for groups in GROUPS
        ),
    ],
)
def test_epilogue_and_residual(activation, is_gated_unit, tiling, groups):
    # Sizes that the copies do not take: 128 and 192 within.
    check_epilogue(
        interpreted, GROUPS[groups], activation, is_gated_unit=is_gated_unit, tiling=tiling,
        D=100, F=150,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_exact", "silu", None])
@pytest.mark.parametrize("sizes", LARGE_GROUPS)
def test_epilogue_on_the_gpu(sizes, activation):
    for is_gated_unit in (False, True):
        for tiling in (None, PARTS):
            check_epilogue(
                shipped, sizes, activation, is_gated_unit=is_gated_unit, tiling=tiling
            )


def integers(shape, bits: int):
    """Any value of the width, the outermost among them, in NumPy and on the device."""
    most = 2 ** (bits - 1)
    values = np.random.default_rng(2).integers(-most, most, shape)
    values.flat[:2] = (-most, most - 1)
    return values, jnp.asarray(values, jnp.int8 if bits == 8 else jnp.int4)


def check_quantized(
    make, sizes, bits, dtype, *, groups_of_d=1, epilogue=False, tiling=SMALL, D=D, F=F,
    is_native=False,
):  # fmt: skip
    """With the weights in fragments, where they can be, or `is_native`."""
    E, G = len(sizes), groups_of_d
    rng = np.random.default_rng(5)
    x_RD = rows(sizes, D, dtype)
    q, values_EFD = integers((E, F, D), bits)
    scales_EFG = rng.uniform(0.01, 0.1, (E, F, G)).astype(np.float32)
    w_EFD = (q.reshape(E, F, G, D // G) * np.float64(scales_EFG)[..., None]).reshape(E, F, D)
    want = loops.product(in_float64(x_RD), w_EFD.swapaxes(1, 2), sizes)
    extras = {}
    if epilogue:
        gate_R = rng.uniform(0.1, 1.0, len(x_RD)).astype(np.float32)
        gate_R[sum(sizes) :] = np.nan
        bias_EF = rng.standard_normal((E, F)).astype(np.float32)
        for r, e in enumerate(loops.expert_of_rows(sizes, len(x_RD))):
            want[r] = gate_R[r] * np.maximum(want[r] + bias_EF[e], 0)
        extras = {"bias_EF": jnp.asarray(bias_EF), "gate_R": jnp.asarray(gate_R)}
        # Nothing is looked up for experts without rows.
        scales_EFG[np.asarray(sizes) == 0] = np.nan
    w = QTensor(values_EFD, jnp.asarray(scales_EFG), bits, None if G == 1 else D // G)
    w = w if is_native else w.fragments()
    run = make(
        quantized.forward, tiling=tiling, activation="relu" if epilogue else None,
        is_fragments=w.is_fragments,
    )  # fmt: skip
    y_RF = run(x_RD, w.values, w.scales_EFG, jnp.asarray(sizes, jnp.int32), **extras)
    assert_agrees(y_RF, want, dtype)


@pytest.mark.parametrize(
    ("bits", "groups_of_d", "is_native"),
    [(4, 2, False), (8, 1, False), *(slow(bits, 1, True) for bits in (8, 4))],
)
def test_quantized_with_bias_relu_and_gate(bits, groups_of_d, is_native):
    check_quantized(
        interpreted, GROUPS["ragged"], bits, jnp.bfloat16, groups_of_d=groups_of_d,
        epilogue=True, is_native=is_native,
    )  # fmt: skip


def test_quantized_sum_in_parts_of_too_many_rows():
    check_quantized(
        interpreted, GROUPS["too_many"], 4, jnp.bfloat16, epilogue=True, tiling=PARTS
    )


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("groups", list(GROUPS))
@pytest.mark.parametrize(
    ("tiling", "groups_of_d", "epilogue"),
    [
        pytest.param(SMALL, 1, False, id="small"),
        pytest.param(SMALL, 2, True, id="scales"),
        pytest.param(PARTS, 1, True, id="parts"),
        pytest.param(PARTS, 2, False, id="parts_scales"),
        pytest.param(gpu.Tiling(128, 32, 128, stages=3, num_sms=3), 1, True, id="wide"),
        pytest.param(
            gpu.Tiling(64, 8, 64, warpgroups=1, stages=2, panel=1), 2, True,
            id="one_warpgroup",
        ),
        pytest.param(gpu.Tiling(64, 256, 64, stages=2), 1, True, id="many_rows"),
        pytest.param(gpu.Tiling(64, 128, 64, stages=2), 2, True, id="many_rows_scales"),
    ],
)  # fmt: skip
@everywhere
def test_every_edge_of_quantized(make, tiling, groups_of_d, epilogue, groups, dtype, bits):
    check_quantized(
        make, GROUPS[groups], bits, dtype, groups_of_d=groups_of_d, epilogue=epilogue,
        tiling=tiling,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("groups_of_d", [1, 3])
@pytest.mark.parametrize("sizes", LARGE_GROUPS)
def test_quantized_on_the_gpu(sizes, groups_of_d, dtype, bits):
    for through_smem, is_native in itertools.product((None, 0, 1), (False, True)):
        tiling = None
        if through_smem is not None:
            tiling = dataclasses.replace(SMALL, tile_k=128, through_smem=through_smem)
        check_quantized(
            shipped, sizes, bits, dtype, groups_of_d=groups_of_d, epilogue=True, tiling=tiling,
            D=384, F=320, is_native=is_native,
        )  # fmt: skip
    x_RD, (_, values_EFD) = rows(sizes, D, dtype), integers((E, F, D), bits)
    operands = x_RD, values_EFD, jnp.full((E, F, 1), 0.1), jnp.asarray(sizes, jnp.int32)
    found = in_float64(shipped(quantized.forward, tiling=SMALL)(*operands))
    other = in_float64(interpreted(quantized.forward)(*operands))
    assert np.abs(found - other).max() <= 2e-2 * max(1.0, np.abs(other).max())


@pytest.mark.parametrize(
    ("D", "groups_of_d", "bias", "prefetched"),
    # One scale a feature: 64 numbers in a row. Six are 24 bytes, which the copy engine refuses.
    [(256, 4, False, 2), (384, 6, False, 0), (384, 6, True, 2), (256, 1, True, 4)],
)
def test_scales_and_biases_are_prefetched(D, groups_of_d, bias, prefetched):
    """An array by two warpgroups, by the program that a GPU would compile."""
    E, F = 3, 128
    spec = jax.ShapeDtypeStruct
    named = {"bias_EF": spec((E, F), jnp.float32)} if bias else {}
    program = jax.make_jaxpr(functools.partial(quantized.forward, tiling=SMALL))(
        spec((16, D), jnp.bfloat16), spec((E, F, D), jnp.int4),
        spec((E, F, groups_of_d), jnp.float32), spec((E,), jnp.int32), **named,
    )  # fmt: skip
    assert len(re.findall(r"\basync_prefetch\b", str(program))) == prefetched


@pytest.mark.parametrize("groups_of_d", [1, 2])
def test_the_place_of_loaded_weights_is_released_before_their_products_are_done(groups_of_d):
    spec = jax.ShapeDtypeStruct
    program = jax.make_jaxpr(functools.partial(quantized.forward, tiling=SMALL))(
        spec((16, D), jnp.bfloat16), spec((3, 128, D), jnp.int8),
        spec((3, 128, groups_of_d), jnp.float32), spec((3,), jnp.int32),
    )  # fmt: skip
    found = re.findall("wgmma_ref|wgmma_wait|barrier_arrive|commit_smem", str(program))
    assert found[found.index("wgmma_ref") :][:4] == [
        "wgmma_ref", "commit_smem", "barrier_arrive", "wgmma_wait",
    ]  # fmt: skip
    assert found[-1] == "barrier_arrive"  # the rows' place


BFLOAT16 = (jnp.bfloat16, jnp.bfloat16)


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        (
            gpu.refusal(jnp.float32, jnp.float32, 8, 64, 64, 2),
            "cast them, or use implementation=",
        ),
        (
            gpu.refusal(jnp.bfloat16, jnp.float16, 8, 64, 64, 2),
            "weights are float16 and rows bfl",
        ),
        (gpu.refusal(*BFLOAT16, 0, 64, 64, 2), "R=0, D=64, F=64, E=2; nothing to multiply"),
        (quantized.refusal(jnp.float32, 8, 8, 64, 64, 2), "cast them, or use implementation="),
        (quantized.refusal(jnp.bfloat16, 2, 8, 64, 64, 2), "quantize to one of these"),
        (quantized.refusal(jnp.bfloat16, 4, 8, 128, 64, 2, 32), "divides D=128"),
        (quantized.refusal(jnp.bfloat16, 4, 8, 192, 64, 2, 128), "divides D=192"),
    ],
)
def test_what_cannot_run_is_refused_with_a_way_out(reason, said):
    assert said in reason


def test_bad_arguments_raise():
    x_RD, (_, values_EFD) = rows((8,), 128, jnp.bfloat16), integers((1, 64, 128), 8)
    for x, G, message, options in (
        (x_RD, 1, "expected None, 'relu'", {"activation": "tanh"}),
        (x_RD, 2, "over groups of 64 channels", {"tiling": gpu.Tiling(64, 16, 128, stages=2)}),
        (x_RD, 2, "leaves no registers", {"tiling": gpu.Tiling(64, 256, 64, stages=2)}),
        (x_RD.astype(jnp.float32), 1, "tensor cores take bfloat16", {}),
    ):
        with pytest.raises(ValueError, match=message):
            quantized.forward(x, values_EFD, jnp.ones((1, 64, G)), jnp.asarray([8]), **options)
    x_RD = x_RD.astype(jnp.float32)
    with pytest.raises(ValueError, match="tensor cores take bfloat16"):
        gpu.forward(x_RD, jnp.ones((1, 128, 64)), jnp.asarray([8]))
    with pytest.raises(ValueError, match="tensor cores take bfloat16"):
        gpu.weight_gradient(x_RD, x_RD, jnp.asarray([8]), out_dtype=jnp.float32)
