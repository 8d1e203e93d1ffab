# SPDX-License-Identifier: Apache-2.0
import numpy as np

from pallas_kernels.bench.cells import Cell, all_cells, cells_of_a_cpu


def test_every_cell_has_its_rows_and_its_active_experts():
    for cell in all_cells() + cells_of_a_cpu():
        for first in (0, 1, cell.E - 1):
            sizes_E = cell.group_sizes(first)
            assert sizes_E.sum() == cell.R == cell.active * cell.tokens
            assert (sizes_E > 0).sum() == cell.active
            is_balanced = sizes_E.max() == sizes_E[sizes_E > 0].min()
            assert is_balanced == (cell.load == "balanced"), cell


def test_shares_of_a_skewed_load_fall_as_ranks_grow():
    sizes_E = Cell(8, 8, 4, 8, 25, "skewed").group_sizes(1)
    # Of 96 rows beside one each: 46, 23, 15 and 11 by 1, 1/2, 1/3, 1/4; one is left.
    assert sizes_E.tolist() == [0, 48, 24, 16, 12, 0, 0, 0]


def test_the_grid_of_an_accelerator_is_the_issues():
    cells = all_cells()
    assert {(c.active, c.E) for c in cells} == {
        (1, 32), (4, 32), (8, 32), (16, 32), (24, 32), (32, 32), (128, 128),
    }  # fmt: skip
    assert {c.tokens for c in cells} == {2**i for i in range(10)}
    assert {(c.D, c.F) for c in cells} == {
        (1024, 4096), (4096, 1024), (768, 3072), (4096, 14336),
    }  # fmt: skip
    assert len(set(cells)) == len(cells) == 4 * (7 * 10 + 6 * 9)


def test_other_weights_are_read_from_call_to_call():
    cell = Cell(8, 8, 4, 32, 2)
    used = np.array([cell.group_sizes(first) for first in range(0, 32, 4)]) > 0
    assert used.sum(axis=0).tolist() == [1] * 32
