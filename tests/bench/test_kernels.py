# SPDX-License-Identifier: Apache-2.0
"""`switchx bench kernels` as a report; what is measured is tested in tests/kernels/bench."""

from pallas_kernels.bench import kernels as core
from pallas_kernels.bench import products
from pallas_kernels.bench.cells import Cell
from switchx.bench import kernels


def test_rows_and_checks_become_a_report(monkeypatch):
    monkeypatch.setattr(core, "cells_of_a_cpu", lambda: [Cell(8, 12, 4, 4, 3)])
    monkeypatch.setitem(products.ROTATED_BYTES, "cpu", 2**11)
    notes = []
    report = kernels.run(1, notes.append)
    assert report.command == "bench kernels"
    assert report.results[0]["matrix"] == "8x12"
    assert [check.name for check in report.checks][:2] == [
        "reference_vs_batched_einsum",
        "int8_bytes_vs_f32",
    ]
    assert report.checks[1].holds
    assert notes[0].startswith("1/1  8x12 4 4 3 balanced: float32 ")
