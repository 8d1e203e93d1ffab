# SPDX-License-Identifier: Apache-2.0
"""The report of many devices: every part in a table of its own, the fixed names of checks."""

import pytest

from pallas_kernels.aot import tpu_compiler
from switchx.bench import (
    compiled,
    gradient_bytes,
    loss_parity,
    pipelines,
    planned_bytes,
    saves,
    scale,
)


def counted(count, more=0, read=9000):
    """What processes say of a save, the last of which hashes and reads more than the others."""
    one = {"saved_bytes": 1000, "hashed_bytes": 1000 // count, "read_bytes": 9000}
    last = {"hashed_bytes": 1000 // count + more, "read_bytes": read}
    return [one] * (count - 1) + [one | last]


@pytest.fixture
def small(monkeypatch, tmp_path):
    parity = {"case": "a mesh", "max_relative_difference": 1e-7}
    monkeypatch.setattr(loss_parity, "measured_rows", lambda note: [parity])
    memory = [
        {"schedule": kind, "microbatches": M, "temporary_bytes": size}
        for kind, sizes in {"gpipe": (100, 900), "1f1b": (100, 101)}.items()
        for M, size in zip((8, 128), sizes, strict=True)
    ]
    monkeypatch.setattr(pipelines, "memory_rows", lambda: memory)
    program = {"program": "evaluation", "temporary_bytes": 8, "model_bytes": 8}
    monkeypatch.setattr(pipelines, "program_rows", lambda: [program])
    layers = [{"case": name, "collectives": 2} for name in ("dense", "sliced")]
    monkeypatch.setattr(scale, "layer_rows", lambda note: layers)
    compared = {
        "case": "a mesh",
        "relative_error_of_bytes": 0.3,
        "relative_error_of_flops": 0.01,
    }
    monkeypatch.setattr(planned_bytes, "compare", lambda case, devices: compared)
    ratio = {"case": "a mesh", "ratio": 1.01, "across_experts_bytes": 0}
    monkeypatch.setattr(gradient_bytes, "measured_rows", lambda note: [ratio])
    monkeypatch.setattr(scale, "token_tables", lambda: (0.125, [{"case": "x"}]))
    monkeypatch.setattr(scale, "bucket_rows", lambda: (1.0, [{"case": "y"}]))
    monkeypatch.setattr(saves, "_counts", lambda count, folder: counted(count))
    monkeypatch.setenv(tpu_compiler.FOLDER_VARIABLE, str(tmp_path))  # which has none


def test_names_of_the_checks_are_fixed(small):
    report = scale.run()
    assert {check.name: check.holds for check in report.checks} == {
        "mesh_loss_parity": True,
        "memory_1f1b_m128_vs_m8": True,
        "pipeline_program_holds_whole_model": False,
        "hlo_vs_planner_bytes": False,
        "hlo_vs_planner_flops": True,
        "gradient_bytes_vs_one_reduction": True,
        "expert_gradients_across_experts": True,
        "ppmoe_extra_collectives": True,
        "embedding_bytes_vs_replicated": True,
        "buckets_vs_collectives": True,
        "checkpoint_hashed_bytes_vs_share": True,
        "checkpoint_bytes_read_back": True,
        "torus_contiguous": True,
    }


def test_a_process_that_hashes_for_others_or_reads_again_is_seen(monkeypatch):
    monkeypatch.setattr(saves, "_counts", lambda count, folder: counted(count, 50))
    assert [check.holds for check in saves.run().checks] == [False, True]  # 300 of 250 by one
    read = saves.CHUNK_BYTES + 9000
    monkeypatch.setattr(saves, "_counts", lambda count, folder: counted(count, 0, read))
    shares, back = saves.run().checks
    assert shares.holds and not back.holds and back.value == 3 * saves.CHUNK_BYTES


def test_each_part_has_a_table_of_its_own(small, capsys):
    report = scale.run()
    first = dict.fromkeys(next(iter(row)) for row in report.results)
    tables = (
        "training schedule program layer communication gradients table fused processes torus"
    )
    assert [*first] == tables.split()
    report.print(as_json=False)
    assert "microbatches" in capsys.readouterr().out


def test_what_is_left_out_is_said(small):
    notes = []
    scale.run(notes.append)
    assert "SWITCHX_AOT_TPU" in notes[-1]


def test_pods_have_their_rows_and_their_checks(small, tmp_path, monkeypatch):
    """Wherever a compiler is found, by its variable or in its own folder."""
    (tmp_path / tpu_compiler.DEFAULT_FOLDER / "libtpu").mkdir(parents=True)
    monkeypatch.delenv(tpu_compiler.FOLDER_VARIABLE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(planned_bytes, "_rows_on_tpu", lambda note: [])
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


def test_collectives_of_a_layer_are_those_of_the_paper():
    rows = scale.layer_rows()
    kinds = {
        name: {key: row[key] for key in row if key.endswith("s") and "bytes" not in key}
        for name, row in zip(scale.LAYER_MESHES, rows, strict=True)
    }
    assert kinds == {
        "dense": {"collectives": 2, "all-reduces": 2},
        "sliced": {"collectives": 2, "all-reduces": 2},
        "all_to_all": {"collectives": 4, "all-to-alls": 4},
        "hierarchical": {"collectives": 8, "all-to-alls": 8},
    }
    assert scale.extra_collectives(rows).holds
    assert not scale.extra_collectives([{"collectives": 2}, {"collectives": 3}]).holds


def test_a_split_table_takes_an_eighth_of_the_bytes():
    ratio, (replicated, split) = scale.token_tables()
    assert ratio == 1 / 8
    saved = replicated["argument_bytes"] - split["argument_bytes"]
    # Parameter and two moments of 16384 words of 32 numbers, on seven of eight devices.
    assert saved == 12 * 16384 * 32 * 7 // 8


@pytest.mark.slow
def test_collectives_are_those_of_buckets_of_every_size():
    ratio, rows = scale.bucket_rows()
    assert ratio == 1
    one_each, several, one = rows
    assert one["buckets"] == 3  # outside of blocks, the dense block, the sparse one
    assert one["buckets"] < several["buckets"] < one_each["buckets"]
    assert len({row["all_reduces"] for row in rows}) == 1
