# SPDX-License-Identifier: Apache-2.0
"""The command on eight simulated devices that stand for a slice; `aot` asks the compiler."""

import json
import subprocess

import jax
import pytest

from pallas_kernels.aot import tpu_compiler
from switchx.bench import compiled
from switchx.cli.main import main
from switchx.training import aot

TINY = [
    "compile", "--gin_file=runs/pretrain_tiny.gin", "--gin_file=meshes/all_to_all.gin",
    "--gin.SwitchConfig.group_size=64", "--gin.ModelConfig.num_encoder_layers=2",
    "--gin.ModelConfig.num_decoder_layers=2",
]  # fmt: skip


@pytest.fixture
def simulated(monkeypatch):
    """This process compiles, for the devices that it simulates."""
    monkeypatch.setenv(aot.CHILD_VARIABLE, "1")
    monkeypatch.setattr(compiled, "describe_devices", lambda topology: jax.devices())


def test_report(simulated, in_a_folder, capsys):
    assert main([*TINY, "--topology=v5e:2x4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    checks = {check["name"]: check for check in report["checks"]}
    assert list(checks) == [
        "fits", "parameters", "devices", "tokens_per_batch", "slots_per_token",
    ]  # fmt: skip
    assert all(one["holds"] for one in checks.values())
    assert checks["devices"]["value"] == 8
    [row] = report["results"]
    assert row["collectives"]["all-to-all"]["count_per_step"] > 0
    assert row["needed_bytes_per_device"] < row["hbm_bytes_per_device"]


def refused(words, capsys) -> str:
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


def test_topology_that_does_not_exist(capsys):
    assert "use v4:8x8x4" in refused([*TINY, "--topology=v4:8x8x5"], capsys)


@pytest.mark.parametrize(
    ("topology", "way_out"),
    [("v5e:2x2", "--topology=v5e:2x4"), ("v5e:4x4", "--topology=v5e:2x4")],
)
def test_mesh_of_other_devices_than_the_slice(topology, way_out, capsys):
    words = [*TINY, f"--topology={topology}", "--gin.MeshSpec.data=2"]
    said = refused(words, capsys)
    assert "needs 8 devices" in said
    assert way_out in said


def test_no_compiler(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(tpu_compiler.FOLDER_VARIABLE, str(tmp_path))
    assert main([*TINY, "--topology=v5e:2x4"]) == 1
    said = capsys.readouterr().err
    assert "python -m pallas_kernels.aot.install tpu" in said


@pytest.mark.parametrize(("name", "way_out"), [("KILL", "memory runs out"), ("SEGV", "")])
def test_process_that_is_ended(name, way_out, monkeypatch, capfd):
    def die(words, topology):
        return subprocess.run(["sh", "-c", f"kill -{name} $$"], check=False)

    monkeypatch.setattr(aot, "run_with_compiler", die)
    assert main([*TINY, "--topology=v5e:2x4"]) == 1
    said = capfd.readouterr().err
    assert f"was ended by SIG{name}" in said
    assert way_out in said


def test_model_that_fits_nowhere(simulated, in_a_folder, capsys):
    words = [*TINY, "--topology=v5e:2x4", "--gin.NUM_EXPERTS=100000"]
    words.append("--gin.ModelConfig.d_ff=1000000000")
    assert main(words) == 1
    said = capsys.readouterr().out
    assert "fits 0 ==1: does not hold" in said
    assert "fit no slice there is" in said.replace("\n", " ")


def test_model_that_fits_elsewhere(simulated, in_a_folder, capsys):
    words = [*TINY, "--topology=v5e:2x4", "--gin.NUM_EXPERTS=100000"]
    assert main(words) == 1
    assert "v5p from" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.aot
@pytest.mark.parametrize(("run_file", "topology"), compiled.PODS)
def test_the_four_switch_models(run_file, topology):
    """Minutes each; each in a process of its own."""
    try:
        tpu_compiler.compiler_folder()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    [report] = compiled.compiled_reports([(run_file, topology)])
    failed = [check for check in report["checks"] if not check["holds"]]
    assert not failed
