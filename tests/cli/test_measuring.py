# SPDX-License-Identifier: Apache-2.0
"""`switchx bench`, `tune`, `check` and `compile`, of models shrunk to seconds."""

import dataclasses
import json
import os
import subprocess

import jax
import pytest

from experiments import scale
from pallas_kernels.aot import tpu_compiler
from pallas_kernels.bench import kernels, products, tune
from pallas_kernels.bench.cells import Cell
from pallas_kernels.tiling.tuned import read
from switchx.bench import compiled_peers, decode, equivalence, moe, storage, train
from switchx.bench.peers import torch_peer
from switchx.cli.main import main
from switchx.compiled import devices
from switchx.partitioning.mesh import MeshSpec
from switchx.results import Check, Report
from tests.processes import skip_without

# bench: a contender's compilation is tested in tests/bench; all of a bench here, slowly.


@pytest.fixture
def small_models(monkeypatch):
    """Models of the same form that compile and run in seconds."""
    small = dataclasses.replace(
        train.DENSE, d_model=8, d_ff=16, num_heads=1, d_head=8, num_encoder_layers=2,
        num_decoder_layers=2, vocab_size=64,
    )  # fmt: skip
    monkeypatch.setattr(train, "DENSE", small)
    monkeypatch.setattr(train, "BATCH", 2)
    monkeypatch.setattr(train, "NUM_EXPERTS", (8, 64))
    monkeypatch.setattr(torch_peer, "is_available", lambda: False)


@pytest.mark.parametrize("is_real", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_train_prints_one_json_object(small_models, monkeypatch, cli, is_real):
    if not is_real:

        def untimed(name, config):
            return train.Contender(name, lambda: None, peak_bytes=2**20)

        monkeypatch.setattr(train, "contender", untimed)
        monkeypatch.setattr(storage, "measured", lambda rounds: ([{"step": "resident"}], []))
    printed = cli.json("bench", "train", "--rounds=1", "--json", status=None)
    assert {"glibc_tunables", "switchx_malloc"} <= printed["environment"].keys()
    results, on_disk = printed["results"][:3], printed["results"][3:]
    assert [row["model"] for row in results] == ["dense", "switch 8", "switch 64"]
    assert all(row["step_ms"] > 0 and row["peak_mib"] > 0 for row in results)
    assert on_disk[0]["step"] == "resident"
    checks = {check["name"]: check["bound"] for check in printed["checks"]}
    of_a_disk = {"layered_vs_resident_tokens_per_s": ">=0.85", "step_vs_bound": "<=1.3"}
    bounds = {"switch8_vs_dense": ">=0.93", "switch64_vs_dense": ">=0.68"}
    assert checks == bounds | (of_a_disk if is_real else {})


@pytest.mark.slow
def test_moe_prints_one_json_object(monkeypatch, cli):
    small = dataclasses.replace(moe.DENSE, d_model=8, d_ff=16, num_heads=1, d_head=8)
    for name, value in (
        ("DENSE", small), ("ROWS", 2), ("LENGTH", 16), ("NUM_EXPERTS", (8, 32)),
        ("DECODING_EXPERTS", 8),
    ):  # fmt: skip
        monkeypatch.setattr(moe, name, value)
    printed = cli.json("bench", "moe", "--rounds=1", "--json", status=None)
    assert printed["command"] == "bench moe"
    checks = {check["name"]: check["bound"] for check in printed["checks"]}
    assert checks == {
        "default8_vs_dense": ">=0.8",
        "default32_vs_einsum": ">=2",
        "decode_flops_vs_ideal": "<=4",
        "decode_time_vs_ideal": "<=4",
    }


def test_kernels_prints_one_json_object(monkeypatch, cli):
    monkeypatch.setattr(kernels, "cells_of_a_cpu", lambda: [Cell(8, 12, 4, 4, 3)])
    monkeypatch.setitem(products.ROTATED_BYTES, "cpu", 2**11)
    output = cli("bench", "kernels", "--rounds=1", "--json", status=None)
    printed = json.loads(output.out.splitlines()[-1])
    assert printed["command"] == "bench kernels"
    assert {check["name"] for check in printed["checks"]} == {
        "reference_vs_batched_einsum", "int8_bytes_vs_f32", "int4_bytes_vs_f32",
        "max_error_vs_float64",
    }  # fmt: skip
    assert "1/1" in output.err


@pytest.mark.parametrize("what", ["train", "moe", "decode", "compiled", "kernels"])
@pytest.mark.parametrize(("value", "status"), [(2, 1), (3, 0)])
def test_a_bound_that_is_missed_is_the_exit_status(what, value, status, monkeypatch, cli):
    check = {"name": "times", "value": value, "bound": ">=3"}
    report = Report(f"bench {what}", [{"times": value}], [Check(**check)])
    module = {"compiled": compiled_peers, "kernels": kernels, "decode": decode, "moe": moe}
    measured = (report.results, [check]) if what == "kernels" else report
    monkeypatch.setattr(module.get(what, train), "run", lambda *given, **settings: measured)
    assert f"times {value}.000 >=3" in cli("bench", what, status=status).out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("bench train --rounds=0", "--rounds: '0' is no whole number of at least 1"),
        ("bench soak --rounds=3", "`bench soak` takes no turns, so it has no rounds"),
        ("bench train --quick", "--quick with train: it is for compiled; leave it out"),
        ("bench train --seconds=5", "--seconds with train: it is for soak; leave it out"),
        ("tune kernels --rounds=0", "--rounds: '0' is no whole number of at least 1"),
        ("tune kernel", "there is no 'kernel' (did you mean kernels?)"),
        ("check equivalance", "'equivalance' (did you mean equivalence?)"),
    ],
)
def test_nonsense_is_refused(words, said, cli):
    assert said in cli.refused(*words.split())


# tune


@pytest.fixture
def file(monkeypatch, tmp_path):
    path = tmp_path / "folder" / "tilings.json"
    monkeypatch.setenv("PALLAS_KERNELS_TILINGS", str(path))
    monkeypatch.setattr(tune, "cells_to_tune", lambda: [Cell(8, 12, 4, 4, 3)])
    monkeypatch.setitem(products.ROTATED_BYTES, "cpu", 2**11)
    return path


def test_rows_are_printed_and_tilings_written(file, cli):
    output = cli("tune", "kernels", "--rounds=1", "--json")
    printed = json.loads(output.out.splitlines()[-1])
    assert printed["command"] == "tune kernels"
    assert [row["weights"] for row in printed["results"]] == ["float32", "int8", "int4"]
    assert len(read(file)) == 3
    assert "written to" in output.err


def test_a_damaged_file_is_named_and_kept(file, cli):
    file.parent.mkdir()
    file.write_text("{")
    assert "holds no tuned tilings" in cli.refused("tune", "kernels", "--rounds=1")
    assert file.read_text() == "{"


# check


@pytest.fixture
def two_cells(monkeypatch):
    cells = [
        equivalence.Cell("hash", "gather", MeshSpec(expert=8)),
        equivalence.Cell("hash", "einsum", MeshSpec(data=8)),
    ]
    monkeypatch.setattr(equivalence, "all_cells", lambda: (cells, {("sliced", "data=8"): "no"}))
    monkeypatch.setattr(equivalence, "sample_of", lambda cells: cells)
    monkeypatch.setattr(equivalence, "ROUTERS", {"hash": equivalence.ROUTERS["hash"]})
    monkeypatch.setattr(equivalence, "SAMPLE_CELLS", 2)


def test_report_and_exit_status(two_cells, monkeypatch, cli):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_x=1")
    report = cli.json("check", "equivalence", "--sample", "--json")
    assert os.environ["XLA_FLAGS"] == "--xla_force_host_platform_device_count=8 --xla_x=1"
    assert report["command"] == "check equivalence"
    assert [check["name"] for check in report["checks"]] == [
        "cells", "max_forward_error", "max_aux_loss_error", "max_gradient_error",
        "max_grad_norm_error",
    ]  # fmt: skip
    assert all(check["holds"] for check in report["checks"])
    assert report["results"][-1] == {
        "router": "all", "dispatcher": "sliced", "meshes": 1, "refused": "no",
    }  # fmt: skip
    monkeypatch.setattr(equivalence, "NUM_DEVICES", 99)
    way_out = "JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=99"
    assert way_out in cli.refused("check", "equivalence")
    failed = Report("check equivalence", [{"cells": 2}], [Check("cells", 2, ">=3")])
    monkeypatch.setattr(equivalence, "run", lambda **settings: failed)
    assert "does not hold" in cli("check", "equivalence", "--sample", status=1).out


# compile

TINY = [
    "compile", "--gin_file=runs/pretrain_tiny.gin", "--gin_file=meshes/all_to_all.gin",
    "--gin.SwitchConfig.group_size=64", "--gin.ModelConfig.num_encoder_layers=1",
    "--gin.ModelConfig.num_decoder_layers=1", "--gin.SwitchConfig.every=1",
]  # fmt: skip


@pytest.fixture
def simulated(monkeypatch):
    """This process compiles, for the devices that it simulates."""
    monkeypatch.setenv(devices.CHILD_VARIABLE, "1")
    monkeypatch.setattr(devices, "describe_devices", lambda topology: jax.devices())


@pytest.mark.slow
def test_compiled_step_is_reported(simulated, in_a_folder, cli):
    report = cli.json(*TINY, "--topology=v5e:2x4", "--json")
    checks = {check["name"]: check for check in report["checks"]}
    assert list(checks) == [
        "fits", "evaluation_fits", "initialization_fits", "parameters", "devices",
        "tokens_per_batch", "argument_error_vs_planned", "slots_per_token",
    ]  # fmt: skip
    assert all(one["holds"] for one in checks.values())
    assert checks["devices"]["value"] == 8
    [row] = report["results"]
    assert row["collectives"]["all-to-all"]["count_per_step"] > 0
    assert row["needed_bytes_per_device"] < row["hbm_bytes_per_device"]
    # Evaluation keeps all of the state, and initialization makes it.
    state = row["argument_bytes_per_device"] // 2
    assert state < row["initialization_bytes_per_device"]
    assert state < row["evaluation_bytes_per_device"] < row["needed_bytes_per_device"]
    assert row["planned_step_s"] > 0


def test_slices_that_do_not_exist_or_lack_a_compiler(cli, tmp_path, monkeypatch):
    assert "use v4:8x8x4" in cli.refused(*TINY, "--topology=v4:8x8x5")
    monkeypatch.setenv(tpu_compiler.FOLDER_VARIABLE, str(tmp_path))
    said = cli(*TINY, "--topology=v5e:2x4", status=1).err
    assert "python -m pallas_kernels.aot.install tpu" in said


@pytest.mark.parametrize(
    ("topology", "way_out"),
    [("v5e:2x2", "--topology=v5e:2x4"), ("v5e:4x4", "--topology=v5e:2x4")],
)
def test_mesh_of_other_devices_than_the_slice(topology, way_out, cli):
    said = cli.refused(*TINY, f"--topology={topology}", "--gin.MeshSpec.data=2")
    assert "needs 8 devices" in said
    assert way_out in said


@pytest.mark.parametrize(("name", "way_out"), [("KILL", "memory runs out"), ("SEGV", "")])
def test_process_that_is_ended(name, way_out, monkeypatch, capfd):
    def die(words, topology):
        return subprocess.run(["sh", "-c", f"kill -{name} $$"], check=False)

    monkeypatch.setattr(devices, "run_with_compiler", die)
    assert main([*TINY, "--topology=v5e:2x4"]) == 1
    said = capfd.readouterr().err
    assert f"was ended by SIG{name}" in said
    assert ("memory runs out" in said) == bool(way_out)


def test_models_that_fit_nowhere_or_elsewhere(simulated, in_a_folder, cli):
    words = [*TINY, "--topology=v5e:2x4", "--gin.NUM_EXPERTS=100000"]
    words.append("--gin.ModelConfig.d_ff=1000000000")
    said = cli(*words, status=1).out
    assert "fits 0 ==1: does not hold" in said
    assert "fit no slice there is" in said.replace("\n", " ")
    words = [*TINY, "--topology=v5e:2x4", "--gin.NUM_EXPERTS=100000"]
    assert "v5p from" in cli(*words, status=1).out.replace("\n", " ")


@pytest.mark.aot
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("run_file", "topology"), scale.PODS)
def test_the_four_switch_models(run_file, topology):
    """Minutes each; each in a process of its own."""
    skip_without(tpu_compiler)
    report = scale.compiled_report(run_file, topology)
    failed = [check for check in report["checks"] if not check["holds"]]
    assert not failed
