# SPDX-License-Identifier: Apache-2.0
"""Evaluation by texts in the loop: when, for how long, what is kept, and what is the best."""

import dataclasses
import json
import math
from unittest import mock

import pytest

from switchx.checkpoint.restore import choose_step
from switchx.checkpoint.retention import Retention
from switchx.checkpoint.run_folder import RunFolder
from switchx.data.objectives import InputsToTargets
from switchx.data.tasks import Task
from switchx.data.text_metrics import Accuracy
from switchx.data.tokenizers import ByteVocabulary
from switchx.training.loop import train
from switchx.training.text_evaluation import TaskTexts, TextEvaluation, TimeLimit, peaks
from tests.data.fakes import pair_corpus
from tests.data.refusals import refused
from tests.training.jobs import Events, tiny_job
from tests.training.saved_runs import lines, saved_steps

pytestmark = pytest.mark.usefixtures("steps_traced_once")

SPEC = TextEvaluation(num_samples=1, time_share=None)
# By evaluation: before the first step, after two, four and six.
SCORES = (90.0, 30.0, 50.0, math.nan)
PAIRS = Task(
    "pairs",
    pair_corpus(("a", "x"), ("b", "y")),
    ByteVocabulary(),
    InputsToTargets(),
    metrics=(Accuracy(),),
)


def evaluations(scores, asked=None):
    """What `train` takes: an evaluator of these scores, one a call."""
    left = iter(scores)

    def evaluate(params, goes_on):
        assert "decoder" in params
        score = next(left)
        if asked is not None:
            asked.append(goes_on())
        # A metric that cannot be computed has a note.
        notes = {} if math.isfinite(score) else {"accuracy": "why"}
        columns = ["a"], ["x"], [f"{score} `|` new\nline"]
        texts = TaskTexts({"accuracy": None if notes else score}, *columns, 1, 0, notes)
        return {"pairs": texts}

    return lambda job, mesh, decoding: evaluate


def job_of(**changes):
    fields = dict(source=PAIRS, text_evaluation=SPEC, train_steps=6)
    best = Retention(keep_last=1, best_metric="pairs/accuracy")
    return tiny_job(**(fields | {"retention": best} | changes))


def texts_in(run) -> dict[int, dict]:
    return {line["step"]: line["texts"]["pairs"] for line in lines(run.validation)}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run = RunFolder(tmp_path_factory.mktemp("texts"))
    train(job_of(), run, Events(), text_evaluator=evaluations(SCORES))
    return run


def test_metrics_peaks_and_the_best_checkpoint(finished):
    found = texts_in(finished)
    assert [found[step]["accuracy"] for step in (0, 2, 4, 6)] == [90.0, 30.0, 50.0, None]
    counts = {"examples": 1, "examples_left_out": 1, "outputs_unfinished": 0}
    assert found[4] == {"accuracy": 50.0} | counts and found[6]["notes"] == {"accuracy": "why"}
    # Not the 90 of the model before its first step, nor what is not finite.
    peak = {"pairs": {"accuracy": {"score": 50.0, "step": 4, "examples": 1}}}
    assert json.loads(finished.peaks.read_text()) == peaks(finished.validation) == peak
    assert saved_steps(finished) == {4, 6} and choose_step(finished, "best") == 4


def test_samples_are_kept_of_every_evaluation(finished):
    names = sorted(path.name for path in finished.predictions.iterdir())
    assert names == [f"step_00000{step}.jsonl" for step in (0, 2, 4, 6)]
    (line,) = (finished.predictions / "step_000004.jsonl").read_text().splitlines()
    text = "50.0 `|` new\nline"
    sample = {"task": "pairs", "inputs": "a", "target": "x", "prediction": text}
    assert json.loads(line) == sample
    events = b"".join(path.read_bytes() for path in finished.tensorboard.rglob("events*"))
    assert b"predictions/pairs" in events and b"    50.0 `|` new\n    line" in events
    assert b"texts/pairs/accuracy" in events


@pytest.mark.slow
def test_a_resumed_run_takes_its_evaluations_again(tmp_path):
    run = RunFolder(tmp_path)
    job = job_of(train_steps=4, checkpoint_every=2, retention=Retention(keep_last=3))
    train(job, run, Events(), text_evaluator=evaluations((1.0, 2.0, 70.0)))
    # The attempt ended after checkpoint 2: step 4 is taken, and evaluated, again.
    (run.checkpoints / "4").rename(tmp_path / "gone")
    (run.predictions / "step_000009.jsonl").write_text("")
    train(job, run, Events(), text_evaluator=evaluations((40.0,)))
    assert peaks(run.validation)["pairs"]["accuracy"]["score"] == 40.0
    assert json.loads(run.peaks.read_text()) == peaks(run.validation)
    assert not (run.predictions / "step_000009.jsonl").exists()
    # Neither generation nor its samples are asked for where a run goes on without.
    longer = dataclasses.replace(job, text_evaluation=None, train_steps=5)
    train(longer, run, Events())
    assert "texts" not in json.loads(run.validation.read_text().splitlines()[-1])


def test_generation_stops_before_the_batch_that_would_take_too_long():
    # Batches of 2 s; the one before the first question is not counted. At 104 s the next one
    # would end at 106 s, after the limit of 5 s.
    limit = TimeLimit(5.0, mock.Mock(side_effect=[100.0, 102.0, 104.0]))
    assert [limit(), limit(), limit()] == [True, True, False]
    assert TimeLimit(0.0, mock.Mock(return_value=100.0))() is False
    assert TimeLimit(None, mock.Mock())() is True


def test_the_time_is_a_share_of_training(tmp_path):
    """Before the first step nothing was trained; then two steps took longer than no batch."""
    asked = []
    spec = dataclasses.replace(SPEC, time_share=1.0, num_samples=0)
    job = job_of(text_evaluation=spec, train_steps=2)
    run = RunFolder(tmp_path)
    train(job, run, Events(), text_evaluator=evaluations((1.0, 2.0), asked))
    assert asked == [False, True]
    assert not run.predictions.exists()


def test_bad_input(tmp_path):
    with refused("TrainingJob.text_evaluation generates texts, and train was given nothing"):
        train(job_of(), RunFolder(tmp_path), Events())


def test_a_best_metric_that_no_evaluation_has_is_refused_before_anything_is_computed(tmp_path):
    def begun(**changes):
        train(job_of(**changes), RunFolder(tmp_path / "run"), Events())

    of_tokens = "neg_log_perplexity, cross_entropy, accuracy"
    for name in ("pairs/bleu", "cola/accuracy", "examples"):
        with refused(
            f"Retention.best_metric={name!r} is not among the metrics of this run's "
            f"evaluations: {of_tokens}, pairs/accuracy; use one of them (BEST_METRIC"
        ):
            begun(retention=Retention(best_metric=name))
    with refused(f"evaluations: {of_tokens}"):
        begun(text_evaluation=None)
    assert not (tmp_path / "run").exists()


def test_a_metric_that_does_not_say_its_names_is_refused():
    class OwnMetric:
        def results(self, predictions, targets, num_bootstrap=0):
            return []

    with refused("task 'pairs': OwnMetric is no TextMetric"):
        dataclasses.replace(PAIRS, metrics=(OwnMetric(),))
