# SPDX-License-Identifier: Apache-2.0
"""`switchx tune kernels`: what is measured, dropped, refused and written."""

import types

import jax
import pytest

from pallas_kernels.bench import products, tune
from pallas_kernels.bench.cells import Cell
from pallas_kernels.grouped_matmul import reference
from pallas_kernels.grouped_matmul.reference import Tiling
from pallas_kernels.tiling.tuned import read

CELL = Cell(8, 12, 4, 4, 3)


@pytest.fixture(autouse=True)
def few_sets(monkeypatch):
    monkeypatch.setitem(products.ROTATED_BYTES, "cpu", 2**11)


def test_the_best_of_every_product_is_written(tilings_file):
    notes = []
    rows = tune.run(1, [CELL], notes.append)
    assert [row["weights"] for row in rows] == ["float32", "int8", "int4"]
    assert all(row["measured"] > 1 and row["did_not_compile"] == 0 for row in rows)
    assert len(notes) == 3
    entries = read(tilings_file)
    assert {(key.op, key.bits, key.implementation) for key in entries} == {
        ("grouped_matmul", None, "reference"),
        ("quantized_grouped_matmul", 8, "reference"),
        ("quantized_grouped_matmul", 4, "reference"),
    }


@pytest.fixture
def candidates(monkeypatch):
    """Three of `reference`, the second of which does not fit."""
    tilings = [Tiling(3, 8), Tiling(3, 5), Tiling(3, 4)]
    monkeypatch.setattr(tune, "candidates", lambda *options: tilings)
    return tilings


def times(monkeypatch, **seconds):
    def take_turns(contenders, rounds):
        for each in contenders:
            each.times_s = [seconds[each.name.partition("weight_rows=")[2][0]]] * rounds

    monkeypatch.setattr(tune, "take_turns", take_turns)


@pytest.mark.parametrize(
    ("time_s", "best"),
    [(1.0, Tiling(3, 4)), (1.99, Tiling(3, 8)), (3.0, Tiling(3, 8))],
)
def test_the_quickest_wins_by_more_than_noise(candidates, monkeypatch, time_s, best):
    times(monkeypatch, **{"8": 2.0, "4": time_s})
    key, tiling, row = tune.tune_one(CELL, None, 1, {})
    assert tiling == best
    assert (row["measured"], row["did_not_compile"]) == (2, 1)
    assert row["speedup"] == pytest.approx(2.0 if time_s == 1.0 else 1.0)
    assert (key.rows, key.D, key.F, key.E) == (16, 8, 12, 4)


def test_a_wrong_result_is_never_tuned_for(candidates, monkeypatch):
    def wrong(x_RD, w_EDF, sizes_E, *, tiling):
        y_RF = reference.forward(x_RD, w_EDF, sizes_E, tiling=tiling)
        return y_RF * 1.1 if tiling.weight_rows == 4 else y_RF

    monkeypatch.setattr(tune, "grouped_matmul", wrong)
    with pytest.raises(RuntimeError, match="weight_rows=4. has a relative error of 0.1"):
        tune.tune_one(CELL, None, 1, {})


def test_a_default_that_does_not_compile_is_a_bug(candidates, monkeypatch):
    monkeypatch.setattr(tune, "candidates", lambda *options: [Tiling(3, 5), Tiling(3, 4)])
    with pytest.raises(RuntimeError, match="default tiling .* does not compile.*divisor of 8"):
        tune.tune_one(CELL, None, 1, {})


def test_back_ends_are_asked_with_what_they_depend_on():
    asked = []

    def of(R, D, F, E, bits, dtype):
        asked.append((R, D, F, E, bits, dtype))
        return ["first"]

    backend = types.SimpleNamespace(candidates=of)
    assert tune.candidates(backend, (1, 2, 3, 4), "bfloat16", 8) == ["first"]
    assert asked == [(1, 2, 3, 4, 8, "bfloat16")]


def test_the_grid_of_an_accelerator_has_all_experts_active(monkeypatch):
    assert len(tune.cells_to_tune()) == 3
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    cells = tune.cells_to_tune()
    assert len(cells) == 4 * 2 * 10
    assert {cell.E for cell in cells if cell.active == cell.E} == {32, 128}
