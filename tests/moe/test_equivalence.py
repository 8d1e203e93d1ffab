# SPDX-License-Identifier: Apache-2.0
"""The check of all routers, dispatchers and meshes: its cells, its oracle, its eyes."""

import dataclasses
import re

import numpy as np
import pytest

from switchx.bench import equivalence
from switchx.bench.equivalence import ROUTERS, all_cells, largest_errors, run_cell
from switchx.moe.copy_placement import place_copies
from switchx.moe.dispatcher_traits import DISPATCHERS
from tests.processes import ROOT


def test_every_pair_is_compared_and_every_other_cell_has_a_reason():
    cells, refused = all_cells()
    assert len(cells) == len(set(cells)) == equivalence.ALL_CELLS
    assert {(cell.router, cell.dispatcher) for cell in cells} == {
        (router, dispatcher) for router in ROUTERS for dispatcher in DISPATCHERS
    }
    # 2^3 over five axes: C(7, 4) products. Each is compared for all routers or refused.
    compared = {(cell.dispatcher, cell.mesh_name) for cell in cells}
    assert len(compared) + len(refused) == 35 * len(DISPATCHERS)
    assert not compared & refused.keys()
    assert all("; use " in reason for reason in refused.values())


@pytest.mark.parametrize(
    ("router", "place"),
    [("top 1, biased", 1), ("top 1, rerouted", 4), ("top 1, loads of the batch", 7)],
)
def test_a_sample_of_cells_equals_one_device(router, place):
    """Each router with another dispatcher; `switchx check equivalence` runs all pairs."""
    cells = [each for each in equivalence.sample_of(all_cells()[0]) if each.router == router]
    errors = largest_errors(run_cell(cells[place]), equivalence.run_on_one_device(router))
    assert max(errors.values()) < equivalence.TOLERANCE, (cells[place], errors)


@pytest.mark.slow
@pytest.mark.parametrize("dispatcher", ["all_to_all", "ragged_all_to_all", "sliced"])
def test_given_experts_are_numbers_before_copies(dispatcher):
    router, load_E = "top 2, replayed", 1 / np.arange(1, equivalence.NUM_EXPERTS + 1)
    cell = max(
        (
            each
            for each in all_cells()[0]
            if (each.router, each.dispatcher) == (router, dispatcher)
        ),
        key=lambda cell: (cell.mesh.expert, cell.mesh.model, cell.mesh_name),
    )
    table_R = place_copies([load_E], 8, 8)[0]
    errors = largest_errors(run_cell(cell, table_R), equivalence.run_on_one_device(router))
    assert max(errors.values()) < equivalence.TOLERANCE, (cell, errors)


def test_a_wrong_number_of_any_kind_is_seen():
    want = {
        "forward": np.ones((2, 2)),
        "aux_loss": {"balance": np.float32(1.0)},
        "gradient": ({"w": np.ones(3)}, np.ones(2)),
        "grad_norm": np.float32(5.0),
    }
    assert largest_errors(want, want) == dict.fromkeys(want, 0.0)
    doubled = want | {"gradient": ({"w": np.ones(3)}, 2 * np.ones(2))}
    assert largest_errors(doubled, want)["gradient"] == 1.0
    poisoned = want | {"forward": np.full((2, 2), np.nan)}
    assert largest_errors(poisoned, want)["forward"] == np.inf


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
def test_all_cells_equal_one_device():
    report = equivalence.run()
    assert [check.name for check in report.checks if not check.holds] == []


def test_docs_say_what_is_checked():
    page = (ROOT / "docs/equivalence.md").read_text(encoding="utf-8")
    assert "switchx check equivalence --sample\nswitchx check equivalence --json" in page
    assert f"{equivalence.ALL_CELLS:,} cells" in page
    assert f"{equivalence.TOLERANCE:.0e}".replace("e-0", "e-") in page


def test_docs_say_which_pairs_are_refused_and_what_to_use():
    """A condition of the table is of a mesh's sizes. `gather` has a cell on each mesh."""
    page = (ROOT / "docs/equivalence.md").read_text(encoding="utf-8")
    cells, refused = all_cells()
    rows = re.findall(r"^\| (`\w+`.*) \| (\w+ [=>] 1.*) \| (.*) \|$", page, re.MULTILINE)
    rules = {
        name: (condition.partition(",")[0].replace(" = ", " == "), re.findall(r"`(\w+)`", ways))
        for names, condition, ways in rows
        for name in re.findall(r"`(\w+)`", names)
    }
    meshes = {cell.mesh_name: dataclasses.asdict(cell.mesh) for cell in cells}
    assert {
        (name, mesh)
        for name, (condition, _) in rules.items()
        for mesh, sizes in meshes.items()
        if eval(condition, sizes)
    } == refused.keys()
    for (name, _), reason in refused.items():
        assert any(f"dispatcher={way!r}" in reason for way in rules[name][1]), reason
    assert f"{len(refused)} pairs of dispatcher and mesh" in page
