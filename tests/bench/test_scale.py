# SPDX-License-Identifier: Apache-2.0
"""The report of many devices: every part in a table of its own, the fixed names of checks."""

import pytest

from pallas_kernels.aot import tpu_compiler
from switchx.bench import (
    compiled,
    layer_collectives,
    loss_parity,
    memory_sharding,
    pipeline,
    planned_bytes,
    scale,
)


@pytest.fixture
def small(monkeypatch, tmp_path):
    parity = {"case": "a mesh", "max_relative_difference": 1e-7}
    monkeypatch.setattr(loss_parity, "measured_rows", lambda note: [parity])
    memory = [
        {"schedule": kind, "microbatches": M, "temporary_bytes": size}
        for kind, sizes in {"gpipe": (100, 900), "1f1b": (100, 101)}.items()
        for M, size in zip((8, 128), sizes, strict=True)
    ]
    monkeypatch.setattr(pipeline, "memory_rows", lambda: memory)
    layers = [{"case": name, "collectives": 2} for name in ("dense", "sliced")]
    monkeypatch.setattr(layer_collectives, "measured_rows", lambda note: layers)
    planned = [{"case": "a mesh", "relative_error": 0.01}]
    off = [{"case": "left over", "relative_error": 0.3}]
    monkeypatch.setattr(
        planned_bytes,
        "measured_rows",
        lambda cases=planned_bytes.CASES, note=None: (
            off if cases is planned_bytes.LEFT_OVER else planned
        ),
    )
    monkeypatch.setattr(memory_sharding, "embedding_bytes", lambda: (0.125, [{"case": "x"}]))
    monkeypatch.setattr(memory_sharding, "bucket_collectives", lambda: (1.0, [{"case": "y"}]))
    monkeypatch.setenv(tpu_compiler.FOLDER_VARIABLE, str(tmp_path))  # which has none


def test_names_of_the_checks_are_fixed(small):
    report = scale.run()
    assert {check.name: check.holds for check in report.checks} == {
        "mesh_loss_parity": True,
        "memory_1f1b_m128_vs_m8": True,
        "hlo_vs_planner_bytes": True,
        "hlo_vs_planner_bytes_left_over": False,
        "ppmoe_extra_collectives": True,
        "embedding_bytes_vs_replicated": True,
        "buckets_vs_collectives": True,
    }


def test_each_part_has_a_table_of_its_own(small, capsys):
    report = scale.run()
    first = dict.fromkeys(next(iter(row)) for row in report.results)
    assert [*first][:6] == ["training", "schedule", "layer", "communication", "table", "fused"]
    assert any("left over" in str(row) for row in report.results)
    report.print(as_json=False)
    assert "microbatches" in capsys.readouterr().out


def test_memory_that_grows_is_seen(small):
    assert scale.growth(pipeline.memory_rows(), "gpipe") == 9.0


def test_what_is_left_out_is_said(small):
    notes = []
    scale.run(notes.append)
    assert "SWITCHX_AOT_TPU" in notes[-1]


def test_pods_have_their_rows_and_their_checks(small, tmp_path, monkeypatch):
    """Wherever a compiler is found, by its variable or in its own folder."""
    (tmp_path / tpu_compiler.DEFAULT_FOLDER / "libtpu").mkdir(parents=True)
    monkeypatch.delenv(tpu_compiler.FOLDER_VARIABLE)
    monkeypatch.chdir(tmp_path)
    row = {"run": "configs/runs/pretrain_switch_c.gin", "tokens_per_batch": 1 << 20}
    check = {"name": "fits", "value": 0, "bound": "==1", "holds": False}
    monkeypatch.setattr(
        compiled, "compiled_reports", lambda note: [{"results": [row], "checks": [check]}]
    )
    report = scale.run()
    assert report.results[-1] == row
    assert {check.name: check.holds for check in report.checks[-2:]} == {
        "switch_c_fits": False,
        "switch_c_tokens_off_aim": True,
    }
