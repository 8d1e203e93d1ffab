# SPDX-License-Identifier: Apache-2.0
"""Two processes of four devices: the texts that they evaluate, the logits that they write."""

import dataclasses
import json
import pathlib
import sys

import jax
import numpy as np
import pytest

from switchx.checkpoint.run_folder import RunFolder
from switchx.data.loader import TrainLoader
from switchx.data.objectives import InputsToTargets
from switchx.data.tasks import Task
from switchx.data.text_metrics import ChrF
from switchx.data.tokenizers import ByteVocabulary
from switchx.generated_evaluation import JobTexts
from switchx.partitioning.mesh import MeshSpec
from switchx.progress import SilentReporter
from switchx.training.distillation.logits_folder import LogitsReader
from switchx.training.distillation.soft_loss import Distillation
from switchx.training.distillation.written_teacher import write_logits
from switchx.training.job import TrainingJob
from switchx.training.loop import train
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


def main(port: str, index: str, folder: str, steps: str, job: str, teacher: str = "") -> None:
    """One of the two processes."""
    jax.distributed.initialize(f"localhost:{port}", 2, int(index))
    if job == "TEACH":
        assert (write_logits(student_of(teacher), folder, 4) > 0) == (index == "0")
        return
    job = student_of(teacher) if teacher else TEXTS
    job = dataclasses.replace(job, train_steps=int(steps))
    outcome = train(job, RunFolder(folder), SilentReporter(0), text_evaluator=JobTexts)
    assert outcome.step == int(steps)


def student_of(teacher) -> TrainingJob:
    """A job of two steps; rows of a batch are on both processes."""
    settings = Distillation(str(teacher), starts_from_teacher=False)
    return dataclasses.replace(JOB, model=DENSE, mesh=MeshSpec(data=8), distillation=settings)


def train_in_two(
    folder: pathlib.Path, steps: int, environment: dict[str, str], *job: str
) -> None:
    words = str(free_port()), str(folder), str(steps), *job
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
