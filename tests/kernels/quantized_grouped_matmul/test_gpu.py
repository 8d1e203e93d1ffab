# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernel of int8 and int4 weights: interpreted, and on a GPU where there is one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantized_grouped_matmul import gpu
from tests.kernels import loops
from tests.kernels.gpu_cases import (
    GROUPS,
    assert_agrees,
    in_float64,
    integers,
    interpreted,
    rows,
)

# F is a block and a half; D two steps.
D, F = 128, 192
SMALL = gpu.Tiling(tile_m=64, tile_n=16, tile_k=64, stages=2)
PARTS = dataclasses.replace(SMALL, splits=2)


def check(run, sizes, bits, dtype, *, groups_of_d=1, epilogue=False, tiling=SMALL, D=D, F=F):
    E, G = len(sizes), groups_of_d
    rng = np.random.default_rng(5)
    x = rows(sizes, D, dtype)
    q, values = integers((E, F, D), bits)
    scales = rng.uniform(0.01, 0.1, (E, F, G)).astype(np.float32)
    w = (q.reshape(E, F, G, D // G) * scales[..., None].astype(np.float64)).reshape(E, F, D)
    extra = {}
    if epilogue:
        gate = rng.uniform(0.1, 1.0, x.shape[0]).astype(np.float32)
        gate[sum(sizes) :] = np.nan
        extra = {"bias_EF": rng.standard_normal((E, F)).astype(np.float32), "gate_R": gate}
    y = run(
        functools.partial(gpu.forward, tiling=tiling, activation="relu" if epilogue else None),
        x, values, jnp.asarray(scales), jnp.asarray(sizes, jnp.int32),
        **{name: jnp.asarray(value) for name, value in extra.items()},
    )  # fmt: skip

    want = loops.product(in_float64(x), w.swapaxes(1, 2), sizes)
    if epilogue:
        for r, e in enumerate(loops.expert_of_rows(sizes, len(x))):
            want[r] = extra["gate_R"][r] * np.maximum(want[r] + extra["bias_EF"][e], 0)
    assert y.dtype == dtype
    assert_agrees(y, want, dtype)


def interpret(run, *operands, **extra):
    names = list(extra)

    def positional(x, values, scales, sizes, *extra):
        named = dict(zip(names, extra, strict=True))
        return run(x, values, scales, sizes, **named, interpret=True)

    return interpreted(positional, *operands, *extra.values())


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("groups_of_d", [1, 2])
def test_ragged_groups_with_bias_relu_and_gate(bits, groups_of_d):
    check(
        interpret, GROUPS["ragged"], bits, jnp.bfloat16, groups_of_d=groups_of_d, epilogue=True
    )


@pytest.mark.parametrize("groups", ["ragged", "too_many"])
def test_sum_in_parts(groups):
    check(interpret, GROUPS[groups], 4, jnp.bfloat16, epilogue=True, tiling=PARTS)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("groups", list(GROUPS))
@pytest.mark.parametrize(
    ("tiling", "groups_of_d", "epilogue"),
    [
        (SMALL, 1, False),
        (SMALL, 2, True),
        (PARTS, 1, True),
        (PARTS, 2, False),
        (gpu.Tiling(tile_m=128, tile_n=32, tile_k=128, stages=3, num_sms=3), 1, True),
        (gpu.Tiling(tile_m=64, tile_n=8, tile_k=64, warpgroups=1, stages=2, panel=1), 2, True),
        (gpu.Tiling(tile_m=64, tile_n=256, tile_k=64, stages=2), 1, True),
        (gpu.Tiling(tile_m=64, tile_n=128, tile_k=64, stages=2), 2, True),
    ],
    ids=[
        "small",
        "scales",
        "parts",
        "parts_scales",
        "wide",
        "one_warpgroup",
        "many_rows",
        "many_rows_scales",
    ],
)
def test_every_edge(tiling, groups_of_d, epilogue, groups, dtype, bits):
    check(
        interpret, GROUPS[groups], bits, dtype, groups_of_d=groups_of_d, epilogue=epilogue,
        tiling=tiling,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("groups_of_d", [1, 3])
@pytest.mark.parametrize("groups", [*GROUPS.values(), (300, 0, 129, 7, 1000), (2, 9, 1, 8, 4)])
def test_on_the_gpu(groups, groups_of_d, dtype, bits):
    run = jax.jit(gpu.forward, static_argnames=("activation", "tiling", "interpret"))
    for through_smem in (None, 0, 1):
        tiling = None
        if through_smem is not None:
            tiling = dataclasses.replace(SMALL, tile_k=128, through_smem=through_smem)
        check(
            lambda bound, *operands, **extra: run(*operands, **extra, **bound.keywords),
            groups, bits, dtype, groups_of_d=groups_of_d, epilogue=True, tiling=tiling,
            D=384, F=320,
        )  # fmt: skip
    x, (_, values) = rows(groups, D, dtype), integers((5, F, D), bits)
    operands = (x, values, jnp.full((5, F, 1), 0.1), jnp.asarray(groups, jnp.int32))
    shipped = in_float64(run(*operands, tiling=SMALL))
    other = in_float64(interpreted(functools.partial(gpu.forward, interpret=True), *operands))
    assert np.abs(shipped - other).max() <= 2e-2 * max(1.0, np.abs(other).max())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((jnp.float32, 8, 8, 64, 64, 2, None), "cast them, or use implementation="),
        ((jnp.bfloat16, 2, 8, 64, 64, 2, None), "quantize to one of these"),
        ((jnp.bfloat16, 4, 8, 128, 64, 2, 32), "a multiple of 64 that divides D=128"),
        ((jnp.bfloat16, 4, 8, 192, 64, 2, 128), "a multiple of 64 that divides D=192"),
        ((jnp.bfloat16, 4, 8, 100, 64, 2, None), "pad the weights once to D=128"),
    ],
)
def test_refuses_with_a_way_out(arguments, reason):
    assert reason in gpu.refusal(*arguments)


def test_accepts_what_it_runs():
    assert gpu.refusal(jnp.bfloat16, 4, 1, 768, 3072, 32, None) is None
    assert gpu.refusal(jnp.float16, 8, 1, 768, 3072, 32, 128) is None


def test_bad_arguments_raise():
    x, (_, values) = rows((8,), 128, jnp.bfloat16), integers((1, 64, 128), 8)
    sizes = jnp.asarray([8])
    with pytest.raises(ValueError, match="use None or 'relu'"):
        gpu.forward(x, values, jnp.ones((1, 64, 1)), sizes, activation="gelu")
    with pytest.raises(ValueError, match="reaches over groups of 64 channels"):
        gpu.forward(
            x, values, jnp.ones((1, 64, 2)), sizes,
            tiling=gpu.Tiling(tile_m=64, tile_n=16, tile_k=128, stages=2),
        )  # fmt: skip
    with pytest.raises(ValueError, match="leaves no registers"):
        gpu.forward(
            x, values, jnp.ones((1, 64, 2)), sizes,
            tiling=gpu.Tiling(tile_m=64, tile_n=256, tile_k=64, stages=2),
        )  # fmt: skip
    with pytest.raises(ValueError, match="tensor cores take bfloat16"):
        gpu.forward(x.astype(jnp.float32), values, jnp.ones((1, 64, 1)), sizes)


def test_candidates_run_and_start_with_the_default():
    for R in (1, 256, 8192):
        for bits in (8, 4):
            for group_size in (None, 128):
                found = gpu.candidates(R, 1024, 4096, 32, bits, jnp.bfloat16, group_size)
                assert found[0] == gpu.default_tiling(
                    R, 1024, 4096, 32, bits, jnp.bfloat16, group_size
                )
                assert len(set(found)) == len(found) >= 4
