# SPDX-License-Identifier: Apache-2.0
"""Two processes of four devices train one run: each reads its rows, one writes the folder."""

import dataclasses
import json
import pathlib
import sys
import time

import jax
import numpy as np
import pytest

from switchx import tree
from switchx.analysis.routing import read_snapshots
from switchx.checkpoint.restore import restore_params
from switchx.checkpoint.run_folder import RunFolder
from switchx.data.loader import TrainLoader
from switchx.data.objectives import InputsToTargets
from switchx.data.tasks import Task
from switchx.data.text_metrics import ChrF
from switchx.data.tokenizers import ByteVocabulary
from switchx.optim.adamw import AdamW
from switchx.partitioning.mesh import MeshSpec
from switchx.progress import SilentReporter
from switchx.text_evaluation import JobTexts
from switchx.training.distillation.logits_folder import LogitsReader
from switchx.training.distillation.soft_loss import Distillation
from switchx.training.distillation.written_teacher import write_logits
from switchx.training.job import TrainingJob
from switchx.training.loop import train
from switchx.training.programs import compiled_program
from switchx.training.step import StepConfig
from switchx.training.text_evaluation import TextEvaluation
from tests.data.fakes import pair_corpus
from tests.processes import child_environment, free_port, run_together
from tests.training.jobs import DENSE, make_job
from tests.training.saved_runs import save_run

JOB = make_job(mesh=MeshSpec(data=2, expert=4), train_steps=2)
PAIRS = Task(
    "pairs",
    pair_corpus(("a b", "b a"), ("an expert", "experts"), ("c", "c")),
    ByteVocabulary(),
    InputsToTargets(),
    metrics=(ChrF(),),
)
TEXTS = dataclasses.replace(
    JOB,
    source=PAIRS,
    inputs_length=16,
    targets_length=16,
    text_evaluation=TextEvaluation(batch_size=2, max_new_tokens=6),
)
# Experts are frozen, the embedding learns by half.
RATES = dataclasses.replace(
    JOB,
    optimizer=AdamW(weight_decay=0.1),
    step=StepConfig(
        clip_norm=0.1, rate_multipliers=((r".*/experts/.*", 0.0), ("embedding/.*", 0.5))
    ),
)
LATE = dataclasses.replace(JOB, log_every=4, eval_every=9)
JOBS = {"JOB": JOB, "TEXTS": TEXTS, "RATES": RATES, "LATE": LATE}


class Late(SilentReporter):
    """The second process comes late to each step: the steps take less than two seconds."""

    def stepped(self, step):
        time.sleep(2.0 * jax.process_index())


def main(port: str, index: str, folder: str, steps: str, job: str, teacher: str = "") -> None:
    """One of the two processes."""
    jax.distributed.initialize(f"localhost:{port}", 2, int(index))
    if job == "TEACH":
        assert (write_logits(student_of(teacher), folder, 4) > 0) == (index == "0")
        return
    job = student_of(teacher) if teacher else JOBS[job]
    job = dataclasses.replace(job, train_steps=int(steps))
    reporter = Late(0) if job.log_every == LATE.log_every else SilentReporter(0)
    outcome = train(job, RunFolder(folder), reporter, text_evaluator=JobTexts)
    assert outcome.step == int(steps)


def student_of(teacher) -> TrainingJob:
    """A job of two steps; rows of a batch are on both processes."""
    settings = Distillation(str(teacher), starts_from_teacher=False)
    return dataclasses.replace(JOB, model=DENSE, mesh=MeshSpec(data=8), distillation=settings)


def train_in_two(
    folder: pathlib.Path, steps: int, environment: dict[str, str], *job: str
) -> None:
    words = str(free_port()), str(folder), str(steps), *(job or ("JOB",))
    code = f"from {__name__} import main; import sys; main(*sys.argv[1:])"
    commands = [[sys.executable, "-c", code, words[0], i, *words[1:]] for i in "01"]
    for status, output in run_together(commands, environment):
        assert status == 0, output


def lines_of(run: RunFolder, log: str) -> dict[int, dict]:
    """Lines of `metrics` or `validation` by step, each of which is there once."""
    lines = [json.loads(line) for line in getattr(run, log).read_text().splitlines()]
    by_step = {line["step"]: line for line in lines}
    assert len(by_step) == len(lines)
    return by_step


@pytest.mark.slow
def test_two_processes_write_the_texts_of_one(tmp_path, session_cache):
    """Each has a part of the rows that are decoded; the clock of the first decides for both."""
    together, alone = RunFolder(tmp_path / "together"), RunFolder(tmp_path / "alone")
    train_in_two(together.root, 2, child_environment(session_cache, devices=4), "TEXTS")
    train(TEXTS, alone, SilentReporter(0), text_evaluator=JobTexts)
    texts = [lines_of(run, "validation") for run in (together, alone)]
    for step, examples in ((0, 2), (2, 3)):
        got, want = (each[step]["texts"]["pairs"] for each in texts)
        assert got == want and got["examples"] == examples
    written = [(run.predictions / "step_000002.jsonl").read_text() for run in (together, alone)]
    assert written[0] == written[1] and len(written[0].splitlines()) == 3


@pytest.mark.slow
def test_logits_of_two_processes_are_read_by_one_and_the_other_way_round(
    tmp_path, session_cache
):
    environment = child_environment(session_cache, devices=4)
    teacher = save_run(tmp_path / "teacher", JOB.model)
    job, alone = student_of(teacher), tmp_path / "alone"
    write_logits(job, alone, 4)
    train_in_two(tmp_path / "together", 2, environment, "TEACH", str(teacher))
    names = {path.name for path in (tmp_path / "together").iterdir()}
    assert {"rows_0.npz", "rows_1.npz", "0000002_0.npz", "0000002_1.npz"} <= names
    readers = [LogitsReader(tmp_path / name) for name in ("alone", "together")]
    loader = TrainLoader(job.source, job.batches, seed=job.seed)
    for _ in range(job.train_steps):
        batch = next(loader)
        found = [reader.read(batch, range(job.batch_size)) for reader in readers]
        np.testing.assert_allclose(found[0]["logit_BLK"], found[1]["logit_BLK"], rtol=1e-5)
        assert np.mean(found[0]["token_BLK"] == found[1]["token_BLK"]) > 0.99
    runs = RunFolder(tmp_path / "student"), RunFolder(tmp_path / "student_in_two")
    train(student_of(tmp_path / "together"), runs[0], SilentReporter(0))
    train_in_two(runs[1].root, 2, environment, "STUDENT", str(alone))
    logs = [lines_of(run, "metrics") for run in runs]
    for step in (1, 2):
        for name in ("loss", "soft_loss", "grad_norm"):
            got = logs[1][step][name]
            assert got == pytest.approx(logs[0][step][name], rel=1e-4), name


@pytest.mark.slow
def test_the_process_that_is_late_is_named(tmp_path, session_cache):
    run = RunFolder(tmp_path)
    train_in_two(run.root, 4, child_environment(session_cache, devices=4), "LATE")
    times = lines_of(run, "metrics")[4]["step_time"]
    assert times["late_process"] == 1 and 1.0 < times["late_s"] < 3 * 2.1
    assert times["late_median_s"] == pytest.approx(times["late_s"] / 2, abs=0.5)


@pytest.mark.slow
def test_two_processes_learn_by_the_rates_of_one(tmp_path, session_cache):
    together, alone = RunFolder(tmp_path / "together"), RunFolder(tmp_path / "alone")
    train_in_two(together.root, 2, child_environment(session_cache, devices=4), "RATES")
    train(RATES, alone, SilentReporter(0))
    logs = [lines_of(run, "metrics") for run in (together, alone)]
    for step, line in logs[1].items():
        assert logs[0][step]["grad_norm"] == pytest.approx(line["grad_norm"], rel=1e-4)
    first = jax.device_get(compiled_program(RATES).init_state().params)
    first, got, want = map(
        tree.named_leaves, (first, restore_params(together.root), restore_params(alone.root))
    )
    for name, leaf in want.items():
        if "/experts/" in name:
            assert got[name].tobytes() == first[name].tobytes(), name
        else:
            np.testing.assert_allclose(got[name], leaf, rtol=0, atol=1e-4, err_msg=name)
            assert not np.array_equal(got[name], first[name]), name


@pytest.mark.slow
def test_two_processes_train_as_one_and_resume(tmp_path, session_cache):
    environment = child_environment(session_cache, devices=4)
    together, alone = RunFolder(tmp_path / "together"), RunFolder(tmp_path / "alone")
    train_in_two(together.root, 1, environment)
    train_in_two(together.root, 2, environment)
    train(JOB, alone, SilentReporter(0))
    names = {"loss", "grad_norm", "neg_log_perplexity", "target_tokens"}
    goodput = json.loads(together.goodput.read_text())
    assert (goodput["restarts"], goodput["lost_steps"]) == (1, 0)
    for log in ("metrics", "validation"):
        got, want = lines_of(together, log), lines_of(alone, log)
        assert want and want.keys() <= got.keys()  # at its end the first half was evaluated
        for step, line in want.items():
            for name in names & line.keys():
                assert got[step][name] == pytest.approx(line[name], rel=1e-4), name
    samples = [{each.step: each for each in read_snapshots(run.routing)}
               for run in (together, alone)]  # fmt: skip
    assert samples[1].keys() == {0, 2} and samples[0].keys() == {0, 1, 2}
    for step in (0, 2):
        (stack,), (expected,) = (sample[step].stacks for sample in samples)
        np.testing.assert_array_equal(stack.token_T, expected.token_T)
    np.testing.assert_array_equal(
        *(sample[0].stacks[0].expert_NTS for sample in samples)
    )  # before anything is learnt
    want = tree.named_leaves(restore_params(alone.root))
    for name, leaf in tree.named_leaves(restore_params(together.root)).items():
        np.testing.assert_allclose(leaf, want[name], rtol=0, atol=1e-4, err_msg=name)
