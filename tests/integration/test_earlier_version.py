# SPDX-License-Identifier: Apache-2.0
"""What switchx 1be465a wrote is read, resumed and run: tests/fixtures/1be465a/README.md.

Numbers of a run that goes on are those which that commit printed when it went on itself.
"""

import json
import pathlib
import runpy
import shutil

import pytest

from switchx.cli.main import main
from switchx.fields import describe
from switchx.gin_config.building import job_from_gin
from switchx.inference.run_exported import ExportedModel
from tests.cases import slow
from tests.compilation import on_devices
from tests.integration.runs import lines
from tests.processes import ROOT

WRITTEN = ROOT / "tests/fixtures/1be465a"
OPERATIVE = sorted(WRITTEN.glob("operative/*.gin"))
# Another compilation adds in another order; a wrong row or draw changes the third digit.
TOLERANCE = 1e-4
OF_A_STEP = (
    "loss",
    "grad_norm",
    "accuracy",
    "target_tokens",
    "dropped_fraction",
    "learning_rate",
)

pytestmark = pytest.mark.usefixtures("programs_compiled_once")


@pytest.fixture
def written(in_a_folder):
    """A copy of the folder, in which commands work."""
    shutil.copytree(WRITTEN, in_a_folder, dirs_exist_ok=True)
    return in_a_folder


def require_resumes(name: str, until: int, devices: int) -> None:
    configuration = f"--gin_file={name}/operative_config.gin"
    with on_devices(devices):
        words = [configuration, f"--gin.TRAIN_STEPS={until}", f"--model_dir={name}"]
        assert main(["train", *words]) == 0
    log, before = (
        lines(pathlib.Path(name, "metrics.jsonl")),
        lines(WRITTEN / name / "metrics.jsonl"),
    )
    assert log[: len(before)] == before  # it did not begin again
    then = lines(WRITTEN / f"recorded/{name}_metrics.jsonl")
    assert [line["step"] for line in log] == list(range(1, until + 1))
    for got, want in zip(log[len(before) :], then, strict=True):
        expected = pytest.approx({name: want[name] for name in OF_A_STEP}, rel=TOLERANCE)
        assert {name: got[name] for name in OF_A_STEP} == expected


def test_run_folder_is_resumed(written):
    require_resumes("run", until=6, devices=1)


@pytest.mark.slow
def test_run_with_experts_on_a_disk_is_resumed_on_its_mesh(written):
    require_resumes("disk", until=4, devices=8)


def said(capsys, *words: str) -> list[dict]:
    assert main(list(words)) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    "name, kind",
    [("run", "texts"), ("run", "scores"), ("int4", "texts"), slow("int4", "scores")],
)
def test_checkpoint_and_artifact_say_what_they_said(written, capsys, name, kind):
    words = ["score", "--input=pairs.tsv"]
    if kind == "texts":
        words = ["generate", "--input=questions.txt", "--max_new_tokens=8"]
        words += ["--no_repeat_ngram_size=1"]
    got = said(capsys, *words, f"--model_dir={name}", "--json")
    require_same(got, lines(WRITTEN / f"recorded/{name}_{kind}.jsonl"))


def require_same(got: list[dict], want: list[dict]) -> None:
    """Tokens and texts exactly, scores to `TOLERANCE`."""
    for now, then in zip(got, want, strict=True):
        floats = {name: value for name, value in then.items() if isinstance(value, float)}
        assert {name: now[name] for name in floats} == pytest.approx(floats, rel=TOLERANCE)
        assert now | floats == then


@pytest.mark.parametrize("by", ["its run.py", "switchx"])
def test_export_says_what_it_said(by):
    model_of = ExportedModel
    if by == "its run.py":
        model_of = runpy.run_path(str(WRITTEN / "export/run.py"))["ExportedModel"]
    with on_devices(1):
        got = model_of(WRITTEN / "export").generate(lines(WRITTEN / "ids.jsonl"))
    want = lines(WRITTEN / "recorded/export_tokens.jsonl")
    require_same([best for best, *_ in got], want)


def require_holds(now, then, where: str = "JOB") -> None:
    """What was described then is so now; fields that are new are not compared."""
    if isinstance(then, dict):
        assert then.keys() <= now.keys(), where
        for name, value in then.items():
            require_holds(now[name], value, f"{where}.{name}")
    elif isinstance(then, list):
        assert len(now) == len(then), where
        for i, pair in enumerate(zip(now, then, strict=True)):
            require_holds(*pair, f"{where}[{i}]")
    else:
        assert now == then, where


@pytest.mark.parametrize("file", OPERATIVE, ids=lambda file: file.stem)
def test_operative_configuration_builds_the_job_that_it_built(written, file):
    job = job_from_gin([file])
    require_holds(describe(job), json.loads(file.with_suffix(".json").read_text()))
