# SPDX-License-Identifier: Apache-2.0
"""`switchx deploy`: the page's commands, what they leave, kills, and what is refused."""

import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import switchx
from switchx.cli.main import main
from switchx.deploy.folders import steps_done_twice
from switchx.models.config import ModelConfig, SwitchConfig
from tests.data.refusals import refused
from tests.integration.runs import arguments, write_corpus
from tests.processes import ROOT, child_environment
from tests.serving import served
from tests.training.jobs import DENSE
from tests.training.saved_runs import save_run

PAGE = (ROOT / "docs/deployment.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
# So that they take seconds.
QUICK = ("--input_length=16", "--max_new_tokens=4")
STEPS = ["1_fuse", "2_reduce", "3_convert", "4_segment", "5_optimize", "6_deploy"]
MODEL = ModelConfig("encoder_decoder", 384, 8, 8, 2, 4, 1, 1, switch=SwitchConfig(4, every=1))


@pytest.fixture
def run_folder(in_a_folder, tiny_run):
    """Where the page's commands run."""
    shutil.copytree(tiny_run, in_a_folder / "runs/tiny")
    (in_a_folder / "questions.txt").write_text("import <extra_id_0>\n")
    return in_a_folder


def run_exported(folder, cache, line: str, devices: int) -> list[int]:
    """Tokens that `run.py` of a folder writes, in a process without switchx."""
    environment = child_environment(cache, devices)
    environment.pop("PYTHONPATH")
    done = subprocess.run(
        [sys.executable, "-I", str(folder / "run.py")],
        input=line,
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["tokens"]


@pytest.mark.slow  # half a minute; the README's commands are a default test
def test_commands_of_the_page_run(run_folder, session_cache, capsys):
    """The second deployment keeps three steps of the first, and is for eight devices."""
    first, exported, second, generate = BLOCKS[0].splitlines()
    assert main([*shlex.split(first)[1:], *QUICK]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert all(name in said for name in STEPS) and "resident" in said
    deployed = run_folder / "deployed"
    assert sorted(each.name for each in deployed.glob("[0-9]*")) == STEPS
    manifest = json.loads((deployed / "6_deploy/export.json").read_text())
    assert set(manifest["programs"]) == {"tpu", "cpu"}
    line = exported.split('"')[1]
    alone = run_exported(deployed / "6_deploy", session_cache, line, devices=1)
    kept = {each: (deployed / each / "step.json").read_bytes() for each in STEPS[:3]}

    words = shlex.split(second.partition(" switchx ")[2])
    assert main([*words, *QUICK]) == 0, capsys.readouterr().err
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["command"] == "deploy"
    checks = {check["name"]: (check["value"], check["holds"]) for check in report["checks"]}
    assert checks == {"tokens_differing": (0, True), "steps_done_twice": (0, True)}
    made = {row["folder"]: row["made"] for row in report["results"] if "folder" in row}
    assert list(made.values()) == ["before"] * 3 + ["now"] * 3
    assert kept == {each: (deployed / each / "step.json").read_bytes() for each in STEPS[:3]}
    rows = {row["step"]: row for row in report["results"] if "step" in row}
    assert [rows[name]["experts"] for name in STEPS] == [8, 4, 4, 4, 4, 4]
    assert all(rows[name]["loss_nats"] > 0 and rows[name]["tokens_per_s"] > 0 for name in STEPS)
    assert rows["6_deploy"]["weights_mib"] < rows["3_convert"]["weights_mib"]
    assert rows["3_convert"]["weights_mib"] < rows["1_fuse"]["weights_mib"]
    manifest = json.loads((deployed / "6_deploy/export.json").read_text())
    assert np.prod(list(manifest["mesh"].values())) == 8 and manifest["mesh"]["data"] == 1
    (segment,) = (row for row in report["results"] if row.get("folder") == "4_segment")
    assert "all-reduce" in segment["collectives"] and segment["mesh"].startswith("expert=")
    assert run_exported(deployed / "6_deploy", session_cache, line, devices=8) == alone

    assert main([*shlex.split(generate)[1:], "--max_new_tokens=4"]) == 0
    assert main([*words, *QUICK]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {row["made"] for row in report["results"] if "made" in row} == {"before"}


@pytest.mark.slow
def test_other_text_is_measured_anew(in_a_folder, one_device, capsys):
    write_corpus(in_a_folder)
    options = arguments("run", "corpus.txt", "TRAIN_STEPS=1", "EVAL_EVERY=1")
    assert main(["train", *options]) == 0
    words = ["deploy", "--model_dir=run", "--output=out", "--platform=cpu", *QUICK, "--json"]
    capsys.readouterr()
    for made in ("now", "before", "now"):
        assert main(words) == 0
        report = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert {row["made"] for row in report["results"] if "made" in row} == {made}
        if made == "before":
            with pathlib.Path("corpus.txt").open("a") as corpus:
                corpus.write("a line more\n")


@pytest.mark.slow
def test_a_taught_deployment_of_the_page(run_folder, capsys):
    """It says the loss before and after, and is not taught twice."""
    (command,) = BLOCKS[1].splitlines()
    words = [*shlex.split(command)[1:], "--distill_steps=2", *QUICK, "--json"]
    for made_now in (["now"] * 6, ["before"] * 6):
        assert main(words) == 0, capsys.readouterr().err
        report = json.loads(capsys.readouterr().out.splitlines()[-1])
        rows = {row["step"]: row for row in report["results"] if "step" in row}
        assert rows["2_reduce"]["untaught_loss_nats"] > 0
        made = [row["made"] for row in report["results"] if "made" in row]
        assert made == made_now
    assert all(check["holds"] for check in report["checks"])


def test_links_lead_somewhere():
    for link in re.findall(r"\]\((?!https:)(\S+?)\)", PAGE):
        assert (ROOT / "docs" / link.partition("#")[0]).exists(), link


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of four experts whose task is in no gin file."""
    return save_run(tmp_path_factory.mktemp("saved") / "run", MODEL)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--platform=rocm", "there is no 'rocm'; use cpu, tpu, cuda"),
        ("--platform=cpu --bits=3", "invalid choice: 3 (choose from 4, 8)"),
        ("--platform=cpu --experts=5", "experts=5 of a model with 4: <any>; use 1 to 4"),
        ("--platform=cpu --experts=0", "experts=0 of a model with 4: <any>"),
        ("--platform=cpu --teacher=t", "--teacher=t with --distill_steps=None; give both"),
        (
            "--platform=cpu --distill_steps=9",
            "--teacher=None with --distill_steps=9; give both",
        ),
        ("--platform=cpu --teacher=t --distill_steps=9", "--teacher=t without --experts"),
        ("--platform=cpu --experts=2 --teacher=t --distill_steps=9", "t is not a run folder"),
        (
            "--platform=cpu --memory=0.00001",
            "a device of 1e-05 GiB is too small<any>the model needs 0.000<any> GiB a device",
        ),
        (
            "--platform=tpu --device_kind=v5e",
            "<any>device_kind='v5e' of platform 'tpu'<any>use <any>",
        ),
        (
            "--platform=cpu --mesh=expert=3",
            "<any>num_experts=4 is not<any>use a size of 1, 2, 4, or leave<any>",
        ),
        ("--platform=cpu --memory=0", "DeploySettings.memory_gib=0.0; use a number above 0"),
        ("--platform=cpu --devices=7", "devices=7: no split divides 8 rows, 2 heads"),
        (
            "--platform=cpu --devices=2",
            "devices=2, but there are 8 (cpu)<any>XLA_FLAGS=--xla_force_host_platform_device",
        ),
        ("--platform=cpu", "it has no operative_config.gin<any>or --gin_file"),
        ("--platform=cpu --step=7", "no complete checkpoint of step 7"),
        ("--platform=cpu --model_dir=nowhere", "nowhere is not a run folder<any>nothing is"),
        ("--platform=cpu --output=run.txt", "run.txt exists and holds no deployment"),
    ],
)
def test_wrong_options_are_refused_in_a_line_and_nothing_is_made(
    saved, in_a_folder, capsys, words, said
):
    """The last words win."""
    (in_a_folder / "run.txt").touch()
    given = [f"--model_dir={saved}", "--output=out", *shlex.split(words)]
    assert main(["deploy", *given]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    with refused(said):
        raise ValueError(error)
    assert [each.name for each in in_a_folder.iterdir()] == ["run.txt"]


def test_dense_and_finished_models_are_refused(tmp_path, capsys):
    dense = save_run(tmp_path / "dense", DENSE)
    words = ["deploy", f"--output={tmp_path / 'out'}", "--platform=cpu"]
    assert main([*words, f"--model_dir={dense}", "--bits=8"]) == 2
    assert "bits=8 of a dense model, which has no experts" in capsys.readouterr().err
    assert main([*words, f"--model_dir={dense}", "--experts=2"]) == 2
    assert "experts=2 of a dense model, which has none" in capsys.readouterr().err
    (tmp_path / "artifact.json").touch()
    assert main([*words, f"--model_dir={tmp_path}"]) == 2
    assert "is made for inference already" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kill_at", ["2_reduce", ".5_optimize."])
def test_a_killed_command_is_gone_on_with(start_cli, run_cli, tmp_path, finished_run, kill_at):
    """Between two steps, when a folder is there; within one, when it is half-written.

    The run was trained on eight devices, which have parts of its experts.
    """
    mesh = f"--gin_file={ROOT / 'configs/meshes/data_expert.gin'}"
    options = arguments("run", finished_run.files, "TRAIN_STEPS=2", "EVAL_EVERY=2")
    done = run_cli("train", *options, mesh, devices=8)
    assert done.returncode == 0, done.stderr
    words = [
        "deploy", "--model_dir=run", "--output=out", "--experts=3",
        "--reduce=drop", "--bits=8", "--dtype=bfloat16", "--platform=cpu", *QUICK, "--json",
    ]  # fmt: skip
    process = start_cli(*words)
    out, deadline = tmp_path / "out", time.monotonic() + 300
    while not any(each.name.startswith(kill_at) for each in out.glob("*")) and not any(
        each.name.startswith(kill_at) for each in out.glob(".*")
    ):
        assert process.poll() is None and time.monotonic() < deadline, process.log.read_text()
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    there = {each: each.stat().st_mtime_ns for each in out.glob("[0-9]*/step.json")}
    assert 0 < len(there) < len(STEPS)
    done = run_cli(*words, timeout=400)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    checks = {check["name"]: check["value"] for check in report["checks"]}
    assert checks == {"tokens_differing": 0, "steps_done_twice": 0}
    assert steps_done_twice(out) == 0
    made = [row["made"] for row in report["results"] if "made" in row]
    assert made == ["before"] * len(there) + ["now"] * (len(STEPS) - len(there))
    assert {each: each.stat().st_mtime_ns for each in there} == there
    assert list(out.glob(".*")) == []
    fused, saved = switchx.load(out / "1_fuse"), switchx.load(tmp_path / "run")
    jax.tree.map(np.testing.assert_array_equal, fused.params, saved.params)
    assert fused.text_format == saved.text_format
    model = switchx.load(out / "6_deploy")
    assert model.config.switch.num_experts == 3
    assert model.config.precision.params == "bfloat16"
    folder = f"--model_dir={out / '6_deploy'}"
    process = start_cli("serve", folder, "--port=0", "--warm_up_tokens=0")
    while not re.search(r"  ready", said := process.log.read_text()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    request = {"inputs": ["gate"], "max_new_tokens": 4}
    port = int(re.search(r"127.0.0.1:(\d+)", said)[1])
    status, body = served.post(("127.0.0.1", port), request)
    assert status == 200
    assert [each["text"] for each in body["results"]] == model.generate(["gate"], max_length=4)
