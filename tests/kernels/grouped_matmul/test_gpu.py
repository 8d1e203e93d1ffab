# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernel of the grouped product: interpreted, and on a GPU where there is one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import gpu
from tests.kernels import loops
from tests.kernels.gpu_cases import (
    GROUPS,
    assert_agrees,
    in_float64,
    interpreted,
    matrices,
    rows,
)

D, F, E = 128, 192, 5
# F is a block and a half; D two steps.
SMALL = gpu.Tiling(tile_m=64, tile_n=16, tile_k=64, stages=2)


def check_forward(run, sizes, dtype, *, transpose_w=False, tiling=SMALL, depth=D, features=F):
    x = rows(sizes, depth, dtype)
    w = matrices(
        (len(sizes), *((features, depth) if transpose_w else (depth, features))), dtype
    )
    y = run(
        functools.partial(gpu.forward, transpose_w=transpose_w, tiling=tiling),
        x, w, jnp.asarray(sizes, jnp.int32),
    )  # fmt: skip
    w_EDF = in_float64(w).swapaxes(1, 2) if transpose_w else in_float64(w)
    want = loops.product(in_float64(x), w_EDF, sizes)
    assert y.dtype == dtype
    assert_agrees(y, want, dtype)


def interpret(run, *operands):
    return interpreted(functools.partial(run, interpret=True), *operands)


@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("groups", ["ragged", "too_many"])
def test_ragged_groups_and_a_tail_of_nan(groups, transpose_w):
    check_forward(interpret, GROUPS[groups], jnp.bfloat16, transpose_w=transpose_w)


def test_large_tiles_with_few_rows_are_cut():
    tiling = gpu.Tiling(tile_m=64, tile_n=128, tile_k=64, warpgroups=1, stages=2)
    check_forward(
        interpret, GROUPS["halves_of_tiles"], jnp.bfloat16, tiling=tiling, depth=64, features=64
    )


def test_sum_in_parts():
    tiling = gpu.Tiling(tile_m=64, tile_n=16, tile_k=64, stages=2, splits=2)
    check_forward(interpret, GROUPS["ragged"], jnp.bfloat16, tiling=tiling)


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
        gpu.Tiling(tile_m=64, tile_n=16, tile_k=64, stages=2, splits=2),
        gpu.Tiling(tile_m=64, tile_n=256, tile_k=64, stages=2, panel=1),
    ],
    ids=["small", "one_warpgroup", "wide", "parts", "many_rows"],
)
def test_every_edge(tiling, groups, dtype, transpose_w):
    check_forward(interpret, GROUPS[groups], dtype, transpose_w=transpose_w, tiling=tiling)


@pytest.mark.gpu
@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("groups", [*GROUPS.values(), (300, 0, 129, 7, 1000), (2, 9, 1, 8, 4)])
def test_on_the_gpu(groups, dtype, transpose_w):
    run = jax.jit(gpu.forward, static_argnames=("transpose_w", "tiling", "interpret"))
    check_forward(
        lambda bound, *operands: run(*operands, **bound.keywords),
        groups, dtype, transpose_w=transpose_w, tiling=None, depth=384, features=320,
    )  # fmt: skip
    x, w = rows(groups, D, dtype), matrices((E, D, F), dtype)
    sizes = jnp.asarray(groups, jnp.int32)
    shipped = in_float64(run(x, w, sizes, tiling=SMALL))
    other = in_float64(interpreted(functools.partial(gpu.forward, interpret=True), x, w, sizes))
    assert np.abs(shipped - other).max() <= 2e-2 * max(1.0, np.abs(other).max())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((jnp.float32, jnp.float32, 8, 64, 64, 2), "cast them, or use implementation="),
        ((jnp.bfloat16, jnp.float16, 8, 64, 64, 2), "cast one to the other's dtype"),
        ((jnp.bfloat16, jnp.bfloat16, 8, 100, 64, 2), "pad the weights once to D=128"),
        ((jnp.bfloat16, jnp.bfloat16, 8, 64, 65, 2), "pad the weights once to F=128"),
        ((jnp.bfloat16, jnp.bfloat16, 0, 64, 64, 2), "nothing to multiply"),
    ],
)
def test_refuses_with_a_way_out(arguments, reason):
    assert reason in gpu.refusal(*arguments)


def test_accepts_what_it_runs():
    assert gpu.refusal(jnp.bfloat16, jnp.bfloat16, 1, 64, 192, 3) is None
    assert gpu.refusal(jnp.float16, jnp.float16, 7, 768, 3072, 128) is None


def test_refused_arguments_raise():
    x, w = rows((8,), 64, jnp.float32), matrices((1, 64, 64), jnp.float32)
    with pytest.raises(ValueError, match="tensor cores take bfloat16"):
        gpu.forward(x, w, jnp.asarray([8]))
    with pytest.raises(ValueError, match="tensor cores take bfloat16"):
        gpu.weight_gradient(x, x, jnp.asarray([8]), out_dtype=jnp.float32)


def test_candidates_run_and_start_with_the_default():
    for R in (1, 32, 256, 8192):
        found = gpu.candidates(R, 1024, 4096, 32)
        assert found[0] == gpu.default_tiling(R, 1024, 4096, 32)
        assert len(set(found)) == len(found) >= 4
        assert all(gpu.checked(t, 1024, jnp.bfloat16, jnp.bfloat16) == t for t in found)
