# SPDX-License-Identifier: Apache-2.0
"""Tile sizes of both back ends: those that cannot be are refused, the heuristics' can."""

import dataclasses

import jax.numpy as jnp
import pytest

from pallas_kernels.grouped_matmul import gpu as plain_gpu
from pallas_kernels.grouped_matmul import gpu_weight_gradient
from pallas_kernels.quantized_grouped_matmul import gpu as quantized_gpu
from pallas_kernels.quantized_grouped_matmul import tpu as quantized_tpu
from pallas_kernels.quantized_grouped_matmul import triton as quantized_triton
from pallas_kernels.tiling import gpu, triton
from pallas_kernels.tiling.gpu import SHARED_BYTES, checked, fitted, shared_bytes
from pallas_kernels.tiling.tpu import (
    Problem,
    Tiling,
    candidates,
    estimated_seconds,
    multiplied_rows,
    vmem_bytes,
    vmem_limit_bytes,
)
from pallas_kernels.tpu_chip import MIB, described_tpu

SHAPES = [(1024, 4096), (4096, 1024), (768, 3072), (4096, 14336), (14336, 4096)]
CHIPS = [("TPU v4", 1), ("TPU v5 lite", 1), ("TPU v5", 2), ("TPU v6 lite", 1), ("TPU7x", 1)]


def decoding(D, F, bits=16) -> Problem:
    return Problem(8 * 32, D, F, 32, x_bytes=2, w_bits=bits)


@pytest.mark.parametrize(("kind", "cores"), CHIPS)
@pytest.mark.parametrize(("D", "F"), SHAPES)
def test_every_candidate_can_be_and_fits(kind, cores, D, F):
    with described_tpu(kind, cores):
        for problem in (decoding(D, F), decoding(D, F, bits=4)):
            tilings = candidates(problem)
            assert len(tilings) >= 8
            for tiling in tilings:
                tiling.check(D, F)
                assert tiling.cores == cores
                limit = vmem_limit_bytes(problem, tiling)
                assert vmem_bytes(problem, tiling) < limit


def test_memory_decides_whether_the_contraction_is_cut():
    # A matrix block of all 14336 channels and 128 columns, three times: 11 MB of bfloat16.
    with described_tpu("TPU v5 lite"):
        assert candidates(decoding(14336, 4096))[0].block_D == 14336
    with described_tpu("TPU v4"):
        assert candidates(decoding(14336, 4096))[0].block_D < 14336


def test_rows_of_a_block_follow_the_rows_of_an_expert():
    with described_tpu("TPU v6 lite"):
        blocks = [
            candidates(Problem(32 * rows, 1024, 4096, 32, 2, 16))[0].block_R
            for rows in (1, 8, 64, 256)
        ]
    assert blocks == sorted(blocks)
    assert blocks[0] <= 32
    assert blocks[-1] >= 64


@pytest.mark.parametrize(("kind", "most_s"), [("TPU v5 lite", 480e-6), ("TPU v5", 410e-6)])
def test_products_of_many_rows_take_little_more_than_their_own_rows(kind, most_s):
    # 256 rows of 1024 channels an expert: on a v5e the products alone take 349 us.
    with described_tpu(kind):
        seconds = [
            estimated_seconds(problem, candidates(problem)[0])
            for problem in (Problem(8192, 1024, 4096, 32, 2, bits) for bits in (16, 8, 4))
        ]
    assert max(seconds) < most_s
    assert seconds == sorted(seconds, reverse=True)  # fewer bits take no longer


@pytest.mark.parametrize(("kind", "multiplies"), [("TPU v5", False), ("TPU7x", True)])
def test_float8_is_quicker_where_the_matrix_unit_reads_or_multiplies_it(kind, multiplies):
    def seconds(x_dtype, w_dtype):
        problem = Problem.of(8192, 1024, 4096, 32, x_dtype, w_dtype, out_dtype=jnp.bfloat16)
        return estimated_seconds(problem, candidates(problem)[0])

    with described_tpu(kind):
        int8 = seconds(jnp.bfloat16, jnp.int8)
        float8 = seconds(jnp.bfloat16, jnp.float8_e4m3fn)
        rows = seconds(jnp.float8_e4m3fn, jnp.float8_e4m3fn)
    assert float8 < 0.97 * int8
    assert (rows < 0.7 * float8) == multiplies and rows <= float8


def test_rows_and_pieces_by_hand():
    problem = Problem(8192, 1024, 4096, 32, 2, 16)
    # 16 blocks of 512 rows and 31 further tiles, each with 8 rows before its own and 16 behind.
    assert multiplied_rows(problem, Tiling(512, 1024, 512)) == (8192 + 47 * 24, 47 + 64 - 23.5)
    assert multiplied_rows(problem, Tiling(32, 1024, 512)) == (287 * 32, 287)
    # 8 rows an expert: no tile has more than its block.
    few = Problem(256, 1024, 4096, 32, 2, 16)
    assert multiplied_rows(few, Tiling(16, 1024, 512)) == (47 * 16, 47)


def test_pieces_of_a_block():
    assert Tiling(16, 128, 128).first_pieces == (16,)
    assert Tiling(48, 128, 128).first_pieces == (32, 48)
    assert Tiling(512, 128, 128).first_pieces == (32, 64, 96, 128)
    assert Tiling(512, 128, 128).unrolled_rows == 320 + 128


def test_blocks_follow_small_sizes():
    assert candidates(Problem(3, 20, 24, 2, 4, 32))[0] == Tiling(16, 20, 24)


def test_a_size_without_even_pieces_is_cut_with_a_remainder():
    depths = {t.block_D for t in candidates(Problem(64, 5000, 512, 4, 2, 16))}
    assert 5000 in depths
    assert 512 in depths


def test_what_fits_nowhere_raises():
    problem = Problem(64, 128, 128, 4, 2, 16, group_size=128)
    assert candidates(problem)
    huge = Problem(64, 1 << 22, 128, 4, 2, 16, group_size=1 << 22)
    with pytest.raises(ValueError, match="no blocks of .* fit 16777216 bytes.*reference"):
        candidates(huge)


@pytest.mark.parametrize(
    ("tiling", "message"),
    [
        (Tiling(24, 256, 256), "block_R=24 is not a multiple of 16"),
        (Tiling(144, 256, 256), "block_R=144 is not a multiple of 128"),
        (Tiling(16, 100, 256), "block_D=100 is neither 256 nor a smaller multiple of 128"),
        (Tiling(16, 256, 512), "block_F=512 is neither 256 nor a smaller multiple of 128"),
        (Tiling(16, 256, 256, cores=0), "cores=0 is less than 1"),
    ],
)
def test_impossible_blocks_are_named(tiling, message):
    with pytest.raises(ValueError, match=message):
        tiling.check(256, 256)


def test_a_kernel_takes_no_more_memory_than_it_needs():
    with described_tpu("TPU v5 lite"):
        tiling = Tiling(16, 1024, 512)
        assert vmem_bytes(decoding(1024, 4096), tiling) < 4 * MIB
        assert vmem_limit_bytes(decoding(1024, 4096), tiling) < 16 * MIB


def test_groups_that_divide_no_power_of_two_are_cut_between_them():
    with described_tpu("TPU v5 lite"):
        found = quantized_tpu.candidates(64, 18432, 4096, 8, "bfloat16", 8, 384)
        assert found and all(tiling.block_D % 384 == 0 for tiling in found)
        # Of a group of which not even one fits, the kernel says so before it is chosen.
        refused = quantized_tpu.refusal("bfloat16", 8, 64, 1 << 23, 4096, 8, 1 << 22)
        assert "fit" in refused and "use the reference" in refused


def test_pieces_of_the_contraction_hold_whole_groups():
    tilings = quantized_tpu.candidates(64, 8192, 8192, 8, "bfloat16", 8, 1024)
    assert {tiling.block_D for tiling in tilings} >= {1024, 2048}
    assert all(tiling.block_D % 1024 == 0 for tiling in tilings)


GOOD = gpu.Tiling(tile_m=64, tile_n=16, tile_k=64)


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
        ({"warpgroups": 3, "tile_n": 256}, r"one of 3 warpgroups has; use .* <= 8192"),
        ({"stages": 1}, "2 stages or more"),
        ({"stages": 40}, f"Hopper has {SHARED_BYTES}; use fewer than 40 stages"),
    ],
)
def test_tilings_of_the_gpu_are_refused_with_a_way_out(change, reason):
    with pytest.raises(ValueError, match=reason):
        checked(dataclasses.replace(GOOD, **change), 256, jnp.bfloat16, jnp.bfloat16)


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
    assert gpu.tile_of_rows(rows, experts) == tile


def test_int4_steps_are_long_where_tiles_are_many():
    def depth(R, D, F, E, **options):
        return quantized_gpu.default_tiling(R, D, F, E, 4, **options).tile_k

    # 320 tiles, or 160 of 256 features: 3 and 2 for the busiest of 132 SMs.
    assert depth(256, 1024, 1280, 32) == 512
    assert depth(256, 768, 1280, 32) == 256  # does not divide
    assert depth(256, 1024, 4096, 32) == 256  # of 128 features a warpgroup
    assert depth(8, 1024, 4096, 1) == 256  # 32 tiles for 132 SMs
    assert depth(256, 1024, 4096, 32, num_matrices=2) == 256
    assert depth(256, 1024, 4096, 32, group_size=128) == 128


def test_warpgroups_have_128_features_where_that_halves_the_tiles_of_an_sm():
    def width(R, F, E, bits=8, **options):
        return quantized_gpu.default_tiling(R, 1024, F, E, bits, **options).tile_m

    assert {width(R, 4096, 32, bits) for R in (32, 128, 1024) for bits in (8, 4)} == {128}
    # A row of one of 8 experts: D is in parts.
    assert quantized_gpu.default_tiling(1, 4096, 1024, 8, 8).tile_m == 64
    assert width(8192, 4096, 32) == 64  # many rows: the registers hold no more sums
    assert width(256, 1280, 32) == 64  # 320 tiles would be 160: 3 for the busiest SM, 2
    assert width(256, 4096, 32, num_matrices=2) == 64
    assert [width(R, 4096, 32, group_size=128) for R in (256, 1024)] == [128, 64]


def test_wide_results_are_sums_of_two_parts_where_steps_can_be_even():
    tiling = dataclasses.replace(GOOD, tile_k=128)
    for D, tile_k, splits in ((1024, 128, 2), (1408, 64, 2), (1152, 64, 2), (704, 64, 11)):
        found = gpu.with_parts(tiling, D, jnp.bfloat16, jnp.bfloat16)
        assert (found.tile_k, found.splits) == (tile_k, splits)


def test_default_tiles_are_no_wider_than_the_gradient():
    widths = [gpu_weight_gradient.default_tiling(1024, F).tile_n for F in (64, 128, 192, 4096)]
    assert widths == [64, 128, 128, 256]


def test_triton_has_half_the_features_of_two_matrices():
    for found in (
        lambda n: triton.candidates(8192, 32, jnp.bfloat16, n),
        lambda n: quantized_triton.candidates(8192, 512, 512, 32, 8, num_matrices=n),
    ):
        assert [found(n)[0].features for n in (1, 2)] == [128, 64]


@pytest.mark.parametrize("R", [1, 32, 256, 8192])
def test_candidates_of_the_gpu_run_and_start_with_the_default(R):
    sizes, dtype = (R, 1024, 4096, 32), jnp.bfloat16
    found = plain_gpu.candidates(*sizes)
    assert found[0] == plain_gpu.default_tiling(*sizes)
    assert 4 <= len(set(found)) == len(found) <= 64
    assert all(checked(tiling, 1024, dtype, dtype) == tiling for tiling in found)
    for field in ("warpgroups", "panel", "stages"):
        assert len({getattr(tiling, field) for tiling in found}) >= 2, field
    for bits in (8, 4):
        for group_size in (None, 128):
            options = (*sizes, bits, dtype, group_size)
            found = quantized_gpu.candidates(*options)
            assert found[0] == quantized_gpu.default_tiling(*options)
            assert 4 <= len(set(found)) == len(found) <= 96
