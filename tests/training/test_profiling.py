# SPDX-License-Identifier: Apache-2.0
"""`--profile`: which steps are traced, what is refused, what a resumed run is told."""

import dataclasses
import gzip
import json
import time

import pytest

from switchx.checkpoint.run_folder import RunFolder
from switchx.cli.main import main
from switchx.training.loop import Outcome, train
from switchx.training.telemetry.profiling import ProfiledSteps, StepProfiler
from tests.data.refusals import refused
from tests.integration.runs import SMALL, numbers
from tests.training.jobs import TINY, Events, killed_after, make_job

pytestmark = pytest.mark.usefixtures("programs_compiled_once")


def traced_steps(run) -> list[int]:
    """The numbers of the steps in the one trace."""
    (path,) = run.profile.glob("plugins/profile/*/*.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    steps = {int(e["args"]["step_num"]) for e in events if "step_num" in e.get("args", {})}
    return sorted(steps)


def test_the_steps_are_traced_and_nothing_else_changes(tmp_path):
    job = make_job(TINY, eval_every=9, checkpoint_every=9)
    run, plain = RunFolder(tmp_path / "profiled"), RunFolder(tmp_path / "plain")
    train(job, run, Events(), profile=ProfiledSteps(1, 3))
    train(job, plain, Events())
    assert traced_steps(run) == [2, 3]
    assert numbers(run.metrics) == numbers(plain.metrics) and not plain.profile.exists()
    assert json.loads(run.goodput.read_text())["seconds"]["profile"] > 0


def test_a_range_past_the_end_is_refused_before_anything_is_made(tmp_path):
    with refused("profile=2:5 is past the end of a run of 4 steps"):
        train(
            make_job(TINY), RunFolder(tmp_path / "run"), Events(), profile=ProfiledSteps(2, 5)
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("steps", [(3, 3), (4, 2), (-1, 2)])
def test_a_range_without_steps_is_refused(steps):
    with pytest.raises(ValueError, match="no step is after"):
        ProfiledSteps(*steps)


@pytest.mark.parametrize("text", ["10", "a:b", "3:3", "5:2", "-1:2", "1:2:3", ""])
def test_a_command_names_what_is_no_range(text, capsys):
    words = ("train", "--gin_file=x.gin", "--model_dir=x", f"--profile={text}")
    assert main([*words]) == 2
    assert f"{text!r} has no steps; use START:END" in capsys.readouterr().err


def test_a_command_hands_the_range_on(monkeypatch, tmp_path):
    given = {}

    def called(job, model_dir, **options):
        given.update(options)
        return Outcome(0, False, {})

    monkeypatch.setattr("switchx.jobs.train", called)
    start_s = time.perf_counter()
    words = (f"--gin_file={SMALL}", f"--gin.FILES={tmp_path}", f"--model_dir={tmp_path}")
    assert main(["train", *words, "--profile=10:13"]) == 0
    assert given["profile"] == (10, 13)
    assert start_s <= given["started_s"] <= time.perf_counter()


@pytest.mark.slow  # two runs
def test_a_run_that_resumes_within_the_range_says_so_and_traces_the_rest(tmp_path):
    job, run, steps = make_job(TINY), RunFolder(tmp_path), ProfiledSteps(1, 4)
    train(dataclasses.replace(job, train_steps=2), run, Events())
    events = Events()
    train(job, run, events, profile=steps)
    assert "profiling 2:4 of profile=1:4: step 2 is taken" in events.notes
    assert traced_steps(run) == [3, 4]
    profiler = StepProfiler(steps, 4, run.profile)
    assert profiler.note == "nothing is profiled: profile=1:4, and step 4 is taken"
    assert StepProfiler(steps, 1, run.profile).note is None


@pytest.mark.slow
def test_a_trace_that_an_error_cuts_short_is_written(tmp_path):
    run = RunFolder(tmp_path)
    with pytest.raises(MemoryError):
        train(make_job(TINY), run, Events(killed_after(2)), profile=ProfiledSteps(0, 4))
    assert traced_steps(run) == [1, 2]
