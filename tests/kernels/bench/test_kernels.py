# SPDX-License-Identifier: Apache-2.0
"""Rows and checks of `switchx bench kernels`, of small cells and of made-up times."""

import pytest

from pallas_kernels.bench import kernels, products
from pallas_kernels.bench.cells import Cell
from pallas_kernels.bench.timing import Contender


@pytest.fixture(autouse=True)
def few_sets(monkeypatch):
    monkeypatch.setitem(products.ROTATED_BYTES, "cpu", 2**11)


def test_rows_and_checks_of_small_cells():
    cells = [Cell(8, 12, 4, 4, 3), Cell(8, 12, 1, 4, 3)]
    notes = []
    rows, checks = kernels.run(2, cells, notes.append)
    assert len(notes) == 2
    measured = [row for row in rows if "us" in row]
    assert len(measured) == 5 + 4
    assert all(
        row["us"] > 0 and row["p10_us"] <= row["us"] <= row["p90_us"] for row in measured
    )
    assert measured[0]["speedup"] == 1
    means = [row for row in rows if row["matrix"] == "geometric mean"]
    assert {(row["active"], row["tokens"]) for row in means} == {
        (4, "all"), (4, "<=16"), (1, "all"), (1, "<=16"),
    }  # fmt: skip
    assert [(check["name"], check["bound"]) for check in checks] == [
        ("reference_vs_batched_einsum", "<=1.5"), ("int8_bytes_vs_f32", "<=0.25"),
        ("int4_bytes_vs_f32", "<=0.125"), ("max_error_vs_float64", "<=1e-5"),
    ]  # fmt: skip
    assert [check["value"] for check in checks[1:3]] == [0.25, 0.125]
    assert 0 < checks[3]["value"] < 1e-6


def h200_cell(tokens, active=32, **times):
    contenders = {
        name.replace("_of_", " "): Contender(name, None, weight_bytes=1000, times_s=[time_s])
        for name, time_s in times.items()
    }
    return Cell(1024, 4096, active, 32, tokens), contenders


def test_checks_of_an_h200_are_the_worst_cells():
    ragged = "ragged_dot_of_bfloat16"
    measured = [
        h200_cell(1, bfloat16=4.0, int8=2.0, int4=1.0, **{ragged: 8.0}),
        h200_cell(16, bfloat16=5.0, int8=4.0, int4=2.0, **{ragged: 6.0}),
        h200_cell(16, active=8, bfloat16=9.0, int8=9.0, int4=9.0, **{ragged: 8.1}),
        h200_cell(
            512, bfloat16=10.0, int8=9.0, int4=9.0, dense_of_bfloat16=9.0, **{ragged: 90.0}
        ),
    ]
    checks = kernels.checks_of_an_h200(measured, copied_bytes_per_s=250.0)
    assert {check["name"]: check["value"] for check in checks} == {
        "int8_vs_bf16_32": 1.25,  # of 2 and 1.25; 8 active experts are another matter
        "int4_vs_bf16_32": 2.5,
        "bf16_vs_cublas": 0.9,
        "bf16_vs_copy_bandwidth": 0.8,  # 1000 bytes in 5 s of 250 a second
        "bf16_vs_ragged_dot": pytest.approx(0.9),
    }
    names = [check["name"] for check in kernels.checks_of_an_h200(measured[2:3], 1.0)]
    assert names == ["bf16_vs_ragged_dot"]


def test_a_nan_is_no_check():
    with pytest.raises(RuntimeError, match="max_error_vs_float64 is NaN"):
        kernels._check("max_error_vs_float64", float("nan"), "<=1e-2")
