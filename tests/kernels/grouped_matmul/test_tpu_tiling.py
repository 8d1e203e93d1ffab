# SPDX-License-Identifier: Apache-2.0
import pytest

from pallas_kernels.grouped_matmul.tpu_tiling import (
    Problem,
    Tiling,
    candidates,
    default_tiling,
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
        assert default_tiling(decoding(14336, 4096)).block_D == 14336
    with described_tpu("TPU v4"):
        assert default_tiling(decoding(14336, 4096)).block_D < 14336


def test_rows_of_a_block_follow_the_rows_of_an_expert():
    with described_tpu("TPU v6 lite"):
        blocks = [
            default_tiling(Problem(32 * rows, 1024, 4096, 32, 2, 16)).block_R
            for rows in (1, 8, 64, 256)
        ]
    assert blocks == sorted(blocks)
    assert blocks[0] <= 32
    assert blocks[-1] >= 128


def test_blocks_follow_small_sizes():
    assert default_tiling(Problem(3, 20, 24, 2, 4, 32)) == Tiling(16, 20, 24)


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
