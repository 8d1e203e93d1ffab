# SPDX-License-Identifier: Apache-2.0
"""Tilings that cannot run are refused, and the heuristic's can."""

import dataclasses

import jax.numpy as jnp
import pytest

from pallas_kernels.grouped_matmul.gpu_tiling import (
    SHARED_BYTES,
    Tiling,
    checked,
    fitted,
    shared_bytes,
    sm_count,
    tile_of_rows,
)

GOOD = Tiling(tile_m=64, tile_n=16, tile_k=64)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tile_n": 24}, "expected tile_m 64 or 128 and tile_n 8, 16"),
        ({"tile_m": 32}, "expected tile_m 64 or 128"),
        ({"tile_m": 128, "tile_n": 256}, r"tile_m \* tile_n <= 16384"),
        ({"tile_k": 96}, "multiple of 64 that divides D=256; use tile_k=128"),
        ({"tile_k": 512}, "divides D=256"),
        ({"splits": 3}, "must divide the 4 steps"),
        ({"splits": 2, "tile_m": 128}, "takes tile_m=64"),
        ({"warpgroups": 4}, "1 to 3 warpgroups"),
        ({"stages": 1}, "2 stages or more"),
        ({"stages": 40}, f"Hopper has {SHARED_BYTES}; use fewer than 40 stages"),
    ],
)
def test_refuses_with_a_way_out(change, reason):
    with pytest.raises(ValueError, match=reason):
        checked(dataclasses.replace(GOOD, **change), 256, jnp.bfloat16, jnp.bfloat16)


def test_accepts_and_returns():
    assert checked(GOOD, 256, jnp.bfloat16, jnp.int4) is GOOD


def test_stages_fill_shared_memory():
    full = fitted(dataclasses.replace(GOOD, tile_n=256), jnp.bfloat16, jnp.bfloat16, most=99)
    one_more = dataclasses.replace(full, stages=full.stages + 1)
    assert shared_bytes(full, jnp.bfloat16, jnp.bfloat16) < SHARED_BYTES
    assert shared_bytes(one_more, jnp.bfloat16, jnp.bfloat16) > SHARED_BYTES - 1024
    assert fitted(GOOD, jnp.bfloat16, jnp.bfloat16, most=3).stages == 3


@pytest.mark.parametrize(
    ("rows", "experts", "tile"),
    [
        (1, 32, 16),
        (32, 32, 16),
        (256, 32, 32),
        (512, 32, 32),
        (2048, 32, 128),
        (10**6, 32, 256),
    ],
)
def test_a_tile_holds_most_experts_rows(rows, experts, tile):
    assert tile_of_rows(rows, experts) == tile


def test_interpreters_have_two_blocks():
    assert sm_count(True) == 2
