# SPDX-License-Identifier: Apache-2.0
"""The weights' gradient on Hopper: interpreted, and on a GPU where there is one."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.grouped_matmul import gpu
from pallas_kernels.grouped_matmul.gpu_weight_gradient import default_tiling
from tests.kernels import loops
from tests.kernels.gpu_cases import (
    GROUPS,
    assert_agrees,
    in_float64,
    interpreted,
    rows,
)

SMALL = gpu.Tiling(tile_m=64, tile_n=64, tile_k=64, stages=2)


def check(run, sizes, dtype, out_dtype, tiling, D=192, F=128):
    x, dy = rows(sizes, D, dtype), rows(sizes, F, dtype, seed=3)
    dw = run(
        functools.partial(gpu.weight_gradient, out_dtype=out_dtype, tiling=tiling),
        x, dy, jnp.asarray(sizes, jnp.int32),
    )  # fmt: skip
    want = loops.weight_gradient(in_float64(x), in_float64(dy), sizes)
    assert dw.dtype == out_dtype
    assert_agrees(dw, want, out_dtype)


def interpret(run, *operands):
    return interpreted(functools.partial(run, interpret=True), *operands)


@pytest.mark.parametrize("groups", ["ragged", "too_many"])
def test_ragged_groups_and_a_tail_of_nan(groups):
    check(interpret, GROUPS[groups], jnp.bfloat16, jnp.float32, SMALL, D=128, F=64)


@pytest.mark.slow
@pytest.mark.parametrize("out_dtype", [jnp.float32, None])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("groups", [*GROUPS.values(), (70, 0, 3, 131, 64)])
@pytest.mark.parametrize(
    "tiling",
    [SMALL, gpu.Tiling(tile_m=64, tile_n=256, tile_k=64, warpgroups=1, stages=3, panel=1)],
    ids=["small", "wide"],
)
def test_every_edge(tiling, groups, dtype, out_dtype):
    check(interpret, groups, dtype, out_dtype or dtype, tiling)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("groups", [*GROUPS.values(), (300, 0, 129, 7, 1000)])
def test_on_the_gpu(groups, dtype):
    run = jax.jit(gpu.weight_gradient, static_argnames=("out_dtype", "tiling", "interpret"))
    check(
        lambda bound, *operands: run(*operands, **bound.keywords),
        groups, dtype, jnp.float32, None, D=384, F=320,
    )  # fmt: skip


def test_default_tiles_are_no_wider_than_the_gradient():
    assert [default_tiling(1024, F).tile_n for F in (64, 128, 192, 4096)] == [64, 128, 128, 256]
