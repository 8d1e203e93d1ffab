# SPDX-License-Identifier: Apache-2.0
"""In Python what the commands do: `switchx.train`, `evaluate` and `Model.from_gin`."""

import dataclasses
import importlib
import json
import os
import pathlib
import re
import signal
import sys
import threading

import gin
import jax
import numpy as np
import pytest

import switchx
from switchx.checkpoint.run_folder import RunFolder
from switchx.cli.main import main
from switchx.fields import describe
from switchx.jobs import TrainingInterrupted
from switchx.training.loop import Outcome
from switchx.training.offload.storage_spec import StorageSpec
from switchx.training.programs import compiled_program
from tests.compilation import T5, on_devices
from tests.data.refusals import refused
from tests.integration.runs import SMALL, lines, numbers
from tests.processes import ROOT
from tests.training.jobs import make_job

pytestmark = pytest.mark.usefixtures("programs_compiled_once", "one_device")


class Silent:
    """A reporter that calls `at` when a step is done."""

    def __init__(self, at=lambda step: None):
        self.stepped, self.notes = at, []

    def begin(self, first_step, last_step): ...
    def logged(self, step, metrics): ...
    def evaluated(self, step, metrics): ...
    def note(self, text):
        self.notes.append(text)


@pytest.fixture
def job(finished_run):
    return switchx.job_from_gin(SMALL, [f"FILES={finished_run.files}"])


def open_files() -> set[str]:
    folder = pathlib.Path("/proc/self/fd")
    return {os.readlink(each) for each in folder.iterdir() if each.exists()}


@pytest.fixture
def nothing_is_left():
    """Threads, open files and handlers of signals are afterwards those of before."""
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    threads, files = set(threading.enumerate()), open_files()
    yield
    left = {each.name for each in set(threading.enumerate()) - threads if not each.daemon}
    assert not left
    assert not {each for each in open_files() - files if each.startswith("/tmp")}
    assert handlers == [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]


def test_a_run_with_a_bound_on_memory_says_that_none_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("switchx.jobs.loop.train", lambda *given: Outcome(1, True, {}))
    monkeypatch.setattr("switchx.malloc._set", lambda parameters: True)
    for host_bytes, said in (10**6, "gives freed memory to the system (Sto"), (None, "keeps"):
        bounded = make_job(storage=StorageSpec("disk", host_bytes=host_bytes))
        switchx.train(bounded, tmp_path / "run", reporter=(reporter := Silent()))
        assert reporter.notes[0].startswith(f"malloc {said}")


def test_a_run_of_python_is_one_of_the_commands(
    job, finished_run, tmp_path, nothing_is_left, capsys
):
    job, run = dataclasses.replace(job, train_steps=2), tmp_path / "run"
    outcome = switchx.train(job, run, profile=(1, 2))
    assert (outcome.step, outcome.is_finished) == (2, True)
    assert list((run / "profile").rglob("*.xplane.pb"))
    shown = capsys.readouterr()
    assert shown.err.count("compiled programs: kept in ") == 1
    assert "step     2  loss" in shown.err and not shown.out
    # The model alone describes itself, after any run file.
    files = ["runs/pretrain_tiny.gin", str(run / "model.gin")]
    assert switchx.job_from_gin(files).model == dataclasses.replace(job.model, dropout_rate=0.0)
    assert numbers(run / "metrics.jsonl") == numbers(finished_run.folder / "metrics.jsonl")[:1]
    # Macros change the configuration that was written.
    assert main(["eval", f"--model_dir={run}", "--json", "--gin.BATCH_SIZE=4"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["step"] == 2
    smaller = dataclasses.replace(job, batch_size=4)
    assert switchx.evaluate(run, smaller, reporter=Silent()) == printed


@pytest.mark.parametrize(
    ("step", "saved", "said"),
    [
        (6, None, "the state is saved at step 6 of 12 in "),
        (6, 4, "step 6 is not saved; the state is saved at step 4 of 12 in "),
        (6, 0, "after step 6; nothing is saved"),
        (0, None, "before its first step; nothing is saved"),
    ],
)
def test_an_interruption_says_what_is_saved(job, tmp_path, step, saved, said):
    outcome = Outcome(step, False, {}, saved)
    error = TrainingInterrupted(outcome, job, RunFolder(tmp_path))
    assert f"interrupted; {said}" in str(error)


@pytest.mark.slow
def test_interrupted_and_resumed_it_is_the_run_of_the_command(
    job, finished_run, tmp_path, nothing_is_left, capsys
):
    def interrupt(step):
        if step == 6:
            os.kill(os.getpid(), signal.SIGINT)

    def fail(step):
        if step == 8:
            raise RuntimeError("of the reporter")

    run = tmp_path / "run"
    with pytest.raises(TrainingInterrupted, match="saved at step 6 of 12 in") as interrupted:
        switchx.train(job, run, reporter=Silent(interrupt))
    assert isinstance(interrupted.value, KeyboardInterrupt)
    assert (interrupted.value.outcome.step, interrupted.value.outcome.is_finished) == (6, False)
    failing = Silent(fail)
    with pytest.raises(RuntimeError, match="of the reporter"):
        switchx.train(job, run, reporter=failing)
    assert any("resumed from step 6" in note for note in failing.notes)
    assert switchx.train(job, run).step == 12
    for file in ("metrics.jsonl", "validation.jsonl"):
        assert numbers(run / file) == numbers(finished_run.folder / file)
    described = [
        json.loads((each / "config.json").read_text()) for each in (run, finished_run.folder)
    ]
    assert described[0] == described[1]
    capsys.readouterr()
    assert switchx.evaluate(finished_run.folder) == lines(run / "validation.jsonl")[-1]
    assert f"evaluating {finished_run.folder}" in capsys.readouterr().err


def test_what_cannot_be_trained_or_evaluated(job, finished_run, tmp_path, nothing_is_left):
    with refused("switchx.train takes a TrainingJob, and got 'configs/runs/pretrain_tiny.gin'"):
        switchx.train("configs/runs/pretrain_tiny.gin", tmp_path / "no")
    with refused("switchx.evaluate takes a TrainingJob, and got 3"):
        switchx.evaluate(finished_run.folder, 3)
    with refused(f"{tmp_path / 'no'} is not a run folder<any>nothing is there"):
        switchx.evaluate(tmp_path / "no")
    with refused("there is no metric ['blue']"):
        switchx.evaluate(finished_run.folder, metrics=["bleu", "blue"])
    with refused("predictions=<any>cannot be written: it is a folder"):
        switchx.evaluate(finished_run.folder, predictions=tmp_path)

    class Cell:  # as one that is defined in a notebook
        pass

    own = dataclasses.replace(job, source=dataclasses.replace(job.source, corpus=Cell()))
    with refused("job.source.corpus=<any>cannot be written into a run folder<any>a module"):
        switchx.train(own, tmp_path / "no")
    with refused("model_dir=<any>belongs to another configuration (seed: 0 there, 1 here)"):
        switchx.train(dataclasses.replace(job, seed=1), finished_run.folder, reporter=Silent())
    assert not (tmp_path / "no").exists()


def test_a_job_of_gin_files_leaves_gin_as_it_was(tmp_path, monkeypatch):
    gin.clear_config()
    mine = gin.configurable("mine_of_this_test")(lambda depth=1: depth)
    gin.parse_config("mine_of_this_test.depth = 5")
    tables = ("_CONFIG", "_OPERATIVE_CONFIG", "_LOCATION_PREFIXES", "_FILE_READERS")

    def state():
        selectors = set(dict(gin.config._REGISTRY.items()))
        return selectors, [
            dict.copy(x) if isinstance(x, dict) else list(x)
            for x in (getattr(gin.config, name) for name in tables)
        ]

    before = state()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    code = (
        "import dataclasses\nfrom switchx.optim.adamw import AdamW\n\ndef show(step, metrics): "
    )
    module, text = pathlib.Path("of_this_test.py"), 'include "runs/pretrain_tiny.gin"\n'
    module.write_text(f"{code}return 1\n")
    pathlib.Path("own.gin").write_text(
        "from __gin__ import dynamic_registration\nimport of_this_test\n"
        f"from switchx.training import job\n{text}"
        "job.TrainingJob.metric_writers = [@of_this_test.show]\n"
    )
    first = switchx.job_from_gin(pathlib.Path("own.gin"), ["TRAIN_STEPS=7"])
    assert first.train_steps == 7 and first.metric_writers[0](0, {}) == 1
    # An edited module: gin knows neither its old function nor its old name.
    module.write_text(f"{code}return 22\n")
    importlib.reload(sys.modules["of_this_test"])
    assert switchx.job_from_gin("own.gin").metric_writers[0](0, {}) == 22
    for bindings, said in (
        (["TRAIN_STEP=7"], "--gin.TRAIN_STEP: <any>did you mean TRAIN_STEPS?<any>"),
        ("TRAIN_STEPS=7", "gin_bindings is one text, 'TRAIN_STEPS=7'; give a list<any>"),
    ):
        with refused(said):
            switchx.job_from_gin("own.gin", bindings)
    with refused("gin_files is empty"):
        switchx.job_from_gin([])
    assert state() == before and mine() == 5
    gin.clear_config()
    gin.config._REGISTRY.pop(f"{__name__}.mine_of_this_test")
    del sys.modules["of_this_test"]


def assert_same_params(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), got, want)


def test_a_model_of_gin_files_has_the_parameters_of(job, finished_run):
    files = SMALL, [f"FILES={finished_run.files}"]
    drawn = switchx.Model.from_gin(*files)
    with on_devices(1):
        program = compiled_program(job)
    assert_same_params(drawn.params, program.init_state().params)
    loaded = switchx.load(finished_run.folder, 8)
    capacity = "SwitchConfig.eval_capacity_factor=8.0"
    started = switchx.Model.from_gin(
        files[0], [*files[1], f"INIT_FROM={finished_run.folder}", "INIT_STEP=8"]
    )
    trained = switchx.Model.from_gin(
        files[0], [*files[1], capacity], model_dir=finished_run.folder, step=8
    )
    for model in (started, trained):
        assert_same_params(model.params, loaded.params)
        assert model.text_format == loaded.text_format
        assert model.vocabulary.fingerprint() == loaded.vocabulary.fingerprint()
    assert [each.step for each in (drawn, started, trained)] == [0, 0, 8]
    assert trained.config.switch.eval_capacity_factor == 8.0
    assert len({each.fingerprint for each in (drawn, started, trained, loaded)}) == 4


def test_a_model_of_gin_files_is_refused(finished_run, tmp_path):
    files = SMALL, [f"FILES={finished_run.files}"]
    with refused("step=8 without model_dir"):
        switchx.Model.from_gin(*files, step=8)
    wider = [*files[1], "ModelConfig.d_model=64"]
    with refused("model_dir=<any>holds another model (model.d_model: 32 there, 64 here)"):
        switchx.Model.from_gin(SMALL, wider, model_dir=finished_run.folder)
    with refused(f"init_from='{tmp_path}' has no config.json: it is no run folder"):
        switchx.Model.from_gin(SMALL, [*files[1], f"INIT_FROM={tmp_path}"])
    assert describe(switchx.job_from_gin(*files).model)["d_model"] == 32


PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_page_runs(in_a_folder, capsys):
    """With the sizes of tests in the place of its own."""
    (code,) = PYTHON.findall((ROOT / "docs/python.md").read_text(encoding="utf-8"))
    small = [flag.removeprefix("--gin.") for flag in T5]
    for there, here in (
        ('["TRAIN_STEPS=100"]', repr(small)),
        ("train_steps=200", "train_steps=3"),
    ):
        assert there in code
        code = code.replace(there, here)
    names = {}
    exec(code, names)
    assert names["outcome"].step == 3
    shown = capsys.readouterr()
    assert "resumed from step 2" in shown.err and "\n3 " in shown.out
