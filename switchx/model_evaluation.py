# SPDX-License-Identifier: Apache-2.0
"""`switchx.evaluate`: measures checkpoints by likelihood and by the texts that they generate.

The command `switchx eval` calls this module. While it evaluates batches, it can record their
routing or replay recorded choices.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np

from switchx import api
from switchx.analysis.routing import read_lines
from switchx.checkpoint.restore import (
    checkpoint_fingerprint,
    choose_step,
    complete_steps,
    restore_params,
)
from switchx.checkpoint.run_folder import RunFolder
from switchx.data.evaluation import evaluation_examples, prediction_rows
from switchx.data.features import Batch
from switchx.data.mixtures import Mixture, evaluated_tasks, with_evaluated
from switchx.data.tasks import Task
from switchx.fields import describe, json_text, require
from switchx.files import write_atomically
from switchx.generated_evaluation import (
    Answers,
    Questions,
    answer,
    ask,
    mean_results,
    metrics_of,
    rank_choices,
)
from switchx.gin_config.building import job_from_gin
from switchx.gin_config.files import configuration_of
from switchx.inference.artifact import is_artifact
from switchx.inference.generate import Generator
from switchx.moe.replay import choices_of_rows
from switchx.partitioning.mesh import MeshSpec
from switchx.progress import reporter_here
from switchx.routing_record import RecordInfo, RecordWriter, open_record
from switchx.training import loop
from switchx.training.compilation_cache import compiled_programs_kept
from switchx.training.job import TrainingJob, require_job
from switchx.training.program import TrainingProgram
from switchx.training.programs import compiled_program
from switchx.training.resume import (
    check_same_model,
    read_as_prompts,
    with_vocabulary_of,
)


def evaluate(
    model_dir: str | os.PathLike,
    job: TrainingJob | None = None,
    *,
    step: int | Literal["best"] | None = None,
    metrics: Sequence[str] | None = None,
    tasks: Sequence[str] | None = None,
    split: str | None = None,
    max_examples: int | None = None,
    batch_size: int = 32,
    rank_choices: bool = False,
    bootstrap: int = 0,
    predictions: str | os.PathLike | None = None,
    record: str | os.PathLike | None = None,
    record_places: int = 1 << 22,
    replay: str | os.PathLike | None = None,
    reporter=None,
    beam_size: int = 1,
    max_new_tokens: int = 128,
    length_penalty: float = 1.0,
) -> dict[str, Any]:
    """Validation metrics of a checkpoint and of its generated texts, as `switchx eval --json`.

    Args:
        model_dir: run folder, or output of `switchx quantize`; nothing is written there.
        job: the job whose data, batch, capacity and mesh are used; None is the run's own. They
            may differ from training; the meaning of the parameters may not. A quantized model
            needs a job.
        step: step of the checkpoint; None is the newest complete one, "best" the one with the
            best validation.
        metrics: names of metrics in `switchx.data.text_metrics.METRICS`, used instead of the
            tasks' own; with an empty list no text is generated.
        tasks: names of the mixture's tasks to answer; None is all that have metrics.
        split: split of the corpora; None is each task's own.
        max_examples: largest number of examples to answer per task; None is all.
        batch_size: largest number of inputs that are generated for at once.
        rank_choices: whether to score each example's choices and measure the likeliest.
        bootstrap: number of samples for 95% intervals of BLEU and chrF; 0 gives no intervals.
        predictions: file to write: JSON lines of task, inputs, target and prediction, also of
            tasks without metrics if they are named or no task has any.
        record: file to write: where the tokens of the batches were routed
            (`switchx/routing_record.py`).
        record_places: number of places in the record beyond which batches are left out.
        replay: record of these batches, by this model or another one, whose choices replace
            the routers' (`moe/replay.py`).
        reporter: reporter, as in `train`.
        beam_size, max_new_tokens, length_penalty: fields of `DecodingConfig`.

    Returns:
        `step`, `neg_log_perplexity`, `accuracy` and others over all evaluated batches; under
        `routing` those of each Switch layer; under `tasks`, if there are several, the same for
        each task; under `texts` the results for generated texts.

    Raises:
        ValueError: a folder, step, task, split or metric does not exist or does not fit; the
            message says what does.
    """
    options = {
        "metrics": metrics,
        "tasks": tasks,
        "split": split,
        "max_examples": max_examples,
        "batch_size": batch_size,
        "rank_choices": rank_choices,
        "bootstrap": bootstrap,
        "predictions": predictions,
        "beam_size": beam_size,
        "max_new_tokens": max_new_tokens,
        "length_penalty": length_penalty,
        "recording": None if record is None else _Recording(record, record_places),
        "replayed": None if replay is None else _Replayed(replay),
    }
    with _evaluation(model_dir, job, reporter, **options) as evaluation:
        return evaluation.measure(step)


def evaluate_checkpoints(
    model_dir: str | os.PathLike,
    job: TrainingJob | None = None,
    *,
    every: int = 1,
    output: str | os.PathLike | None = None,
    reporter=None,
    **options,
) -> list[dict[str, Any]]:
    """What `evaluate` measures, for each checkpoint that a run has kept.

    `switchx eval --step=all` calls it. Each checkpoint becomes a line in a table of JSON lines,
    written once it is measured. Another call reads the table and measures only checkpoints that
    it lacks, or whose line is of a different checkpoint or different texts.

    Args:
        every: number of steps; checkpoints at multiples of it are evaluated.
        output: file of the table; None is `evaluations.jsonl` in the run folder, which
            `switchx report` shows.
        options: options of `evaluate` except `step`, `predictions`, `record` and `replay`.

    Returns:
        The lines of the table, by step.

    Raises:
        ValueError: there is no such checkpoint, the table is damaged or has other settings, or
            `evaluate` raises it.
    """
    folder = RunFolder(model_dir)
    require(
        options.get("predictions") is None,
        "predictions are a file of one checkpoint; evaluate one step, or leave them out",
    )
    with _evaluation(model_dir, job, reporter, **options) as evaluation:
        steps = [step for step in complete_steps(folder) if step % every == 0]
        require(
            bool(steps),
            f"no complete checkpoint of a multiple of {every} steps in {folder.where}; there "
            f"are {', '.join(map(str, complete_steps(folder))) or 'none'}",
        )
        require(
            output is not None or not folder.is_in_store,
            f"{folder.where} is in an object store, whose files a trainer alone puts; give an "
            "output on this machine",
        )
        path = pathlib.Path(output or folder.evaluations).expanduser().absolute()
        settings = evaluation.fingerprint
        found = read_lines(path) if path.exists() else []
        require(
            all(line.get("settings") == settings for line in found),
            f"{path} has checkpoints that were evaluated with other settings; give another "
            "output, or remove it",
        )
        table = {line["step"]: line for line in found}
        for step in steps:
            measured_as = {"settings": settings, "of": evaluation.measured_of(step)}
            if table.get(step, {}).get("of") != measured_as["of"]:
                table[step] = evaluation.measure(step) | measured_as
                lines = [json_text(table[each]) + "\n" for each in sorted(table)]
                write_atomically(path, "".join(lines).encode())
    return [table[step] for step in sorted(table)]


@contextlib.contextmanager
def _evaluation(
    model_dir,
    job: TrainingJob | None,
    reporter,
    *,
    metrics: Sequence[str] | None = None,
    tasks: Sequence[str] | None = None,
    split: str | None = None,
    max_examples: int | None = None,
    batch_size: int = 32,
    rank_choices: bool = False,
    bootstrap: int = 0,
    predictions: str | os.PathLike | None = None,
    beam_size: int = 1,
    max_new_tokens: int = 128,
    length_penalty: float = 1.0,
    recording: "_Recording | None" = None,
    replayed: "_Replayed | None" = None,
) -> Iterator["_Evaluation"]:
    """What `evaluate` does for any step, with checked settings; takes its arguments."""
    if job is not None:
        require_job(job, "evaluate")
    _require_writable(predictions, bootstrap)
    names = ("beam_size", "max_new_tokens", "length_penalty")
    decoding = dict(zip(names, (beam_size, max_new_tokens, length_penalty), strict=True))
    texts = _Texts(decoding, batch_size, max_examples, rank_choices, bootstrap, predictions)
    with contextlib.ExitStack() as stack:
        reporter = reporter or stack.enter_context(reporter_here("example"))
        stack.enter_context(compiled_programs_kept(None, reporter.note))
        job = _job_to_evaluate(model_dir, job, split)
        wanted = metrics_of(job.source, metrics, tasks, predictions is not None)
        require(
            bool(wanted) or predictions is None,
            f"predictions={str(predictions)!r}: no text is written with metrics=none, or "
            "without a task of InputsToTargets; leave it out, or give the gin file of one",
        )
        require(
            bool(wanted) or not rank_choices,
            "rank_choices measures texts that a task's examples choose from, and no task has "
            "metrics of texts; give the gin file of one that does, or leave it out",
        )
        yield _Evaluation(
            RunFolder(model_dir), job, wanted, texts, reporter, recording, replayed
        )


def _job_to_evaluate(model_dir, job: TrainingJob | None, split: str | None) -> TrainingJob:
    folder = RunFolder(model_dir)
    if job is None:
        require(
            not is_artifact(model_dir),
            f"{folder.where} is quantized, and does not know its tasks; give gin files "
            "of tasks that have metrics of texts (in Python the job), such as "
            "operative_config.gin of a run of such tasks",
        )
        job = job_from_gin(configuration_of(folder))
    return dataclasses.replace(job, source=_with_split(job.source, split))


@dataclasses.dataclass(frozen=True)
class _Evaluation:
    """Measures the checkpoints of one folder with one program."""

    folder: RunFolder
    job: TrainingJob
    wanted: dict[str, tuple]
    texts: "_Texts"
    reporter: Any
    recording: "_Recording | None"
    replayed: "_Replayed | None"

    def measure(self, step: int | Literal["best"] | None) -> dict[str, Any]:
        """What `evaluate` returns."""
        folder, job, metrics = self.folder, self.job, {}
        if not is_artifact(folder.path):
            job = self._checked_job
            step = choose_step(folder, step)
            metrics = {"step": step} | self._likelihood(step)
        else:
            require(
                self.recording is None and self.replayed is None,
                f"record or replay with {folder.where}, which is quantized: it is evaluated by "
                "the texts that it writes; use `switchx score --record`",
            )
            require(
                bool(self.wanted),
                f"{folder.where} is quantized: it is evaluated by the texts that it writes; "
                "give metrics, or gin files of tasks that have metrics",
            )
            job = with_vocabulary_of(folder, job)
        if self.wanted:
            devices = _mesh_of_texts(job.mesh)
            task = _only_task(job, self.wanted)
            model = api.load(folder.path, step, mesh=devices, task=task)
            measured = self.texts.measure(job, self.wanted, model, self.reporter)
            metrics = {"step": model.step} | metrics | {"texts": measured}
        return metrics

    @functools.cached_property
    def _checked_job(self) -> TrainingJob:
        job = check_same_model(self.folder, self.job)
        job = read_as_prompts(self.folder, job, self.reporter.note)
        for changed in filter(None, (self.replayed, self.recording)):
            job = changed.job(job)
        return job

    @functools.cached_property
    def _program(self) -> TrainingProgram:
        job = self._checked_job
        # Rates by parameter may be for adapters, which are merged here.
        step = dataclasses.replace(job.step, rate_multipliers=())
        return compiled_program(dataclasses.replace(job, step=step))

    def _likelihood(self, step: int) -> dict[str, Any]:
        job, program, folder = self._checked_job, self._program, self.folder
        self.reporter.note(f"evaluating {folder.checkpoints / str(step)}")
        change = {} if self.replayed is None else {"change": self.replayed.given}
        with contextlib.ExitStack() as stack:
            stack.enter_context(program.scope())
            target = program.abstract_state.params
            params = restore_params(folder.path, step, target=target, model=job.model)
            if self.recording is not None:
                fingerprint = checkpoint_fingerprint(folder, step, job.vocabulary)
                stack.enter_context(self.recording.writer(job, step, fingerprint))
            metrics = loop.evaluate_job(job, program, params, self.recording, **change)
            if self.replayed is not None:
                self.replayed.require_end()
        if self.recording is not None:
            self.reporter.note(self.recording.summary)
        return metrics

    def measured_of(self, step: int) -> str:
        """A hash of a checkpoint and the evaluated texts."""
        job = self._checked_job
        parts = [checkpoint_fingerprint(self.folder, step, job.vocabulary), *self._texts_read]
        return hashlib.sha256(json_text(parts).encode()).hexdigest()[:16]

    @functools.cached_property
    def _texts_read(self) -> list[str]:
        return [opened.records.fingerprint for opened in loop.open_evaluated(self._checked_job)]

    @property
    def fingerprint(self) -> str:
        """A hash of what the numbers depend on besides the checkpoint."""
        job = self._checked_job
        of_job = describe((job.model, job.source, job.batches, job.eval_batches))
        of_texts = (sorted(describe(self.wanted).items()), describe(self.texts))
        return hashlib.sha256(json_text((of_job, of_texts)).encode()).hexdigest()[:16]


def _require_writable(predictions, bootstrap: int) -> None:
    """Refuses, before anything is read, unwritable files and meaningless settings."""
    require(
        bootstrap != 1,
        "bootstrap=1 is no sample to tell an interval by; use 1000, or leave it out",
    )
    if predictions is None:
        return
    path = pathlib.Path(predictions).expanduser().absolute()
    require(
        not path.is_dir() and os.access(path.parent, os.W_OK | os.X_OK),
        f"predictions={str(path)!r} cannot be written: "
        f"{'it is a folder' if path.is_dir() else 'its folder is not there or is locked'}",
    )


class _Replayed:
    """Gives successive batches the choices in a record of `switchx eval --record`."""

    def __init__(self, path: str | os.PathLike):
        self._record, self._number = open_record(path), 0
        self._batches = itertools.groupby(self._record.batches(), lambda batch: batch.number)

    def job(self, job: TrainingJob) -> TrainingJob:
        """The job whose routers take given choices, which find experts full as before."""
        model, path = job.model, self._record.path
        require(
            model.switch is not None,
            f"replay={str(path)!r} with a dense model, which routes nothing; leave it out",
        )
        self._record.require_model(model.sparse_layer_names, model.switch.num_experts)
        require(
            jax.process_count() == 1,
            "replay with several processes, which read parts of each batch; use one process",
        )
        router = dataclasses.replace(
            model.switch.router,
            replay=True,
            replay_drops=model.switch.router.overflow != "dropless",
        )
        switch = dataclasses.replace(model.switch, router=router)
        return dataclasses.replace(job, model=dataclasses.replace(model, switch=switch))

    def require_end(self) -> None:
        """Raises ValueError if the record has more batches than were evaluated."""
        require(
            next(self._batches, None) is None,
            f"{self._record.path} has more batches than the {self._number} of this evaluation; "
            "evaluate all that were recorded (TrainingJob.eval_batches)",
        )

    def given(self, batch: Batch) -> Batch:
        """The batch, which has to be the record's next one, with the recorded choices."""
        _, parts = next(self._batches, (None, ()))
        info = self._record.info
        parts = {part.stack: part for part in parts}
        is_same = parts.keys() == info.layers.keys() and all(
            np.array_equal(part.token_BL, batch[f"{stack}_input_tokens"])
            for stack, part in parts.items()
        )
        require(
            is_same,
            f"{self._record.path} has other tokens in batch {self._number} of the evaluation, "
            "or none: record all of these batches, with the same data and BATCH_SIZE",
        )
        self._number += 1
        E, S = info.switch.num_experts, info.num_choices

        def choices(part):
            rows = part.row_B, part.row_B
            return choices_of_rows(part.expert_NBLS, *rows, num_experts=E, num_selected=S)

        return batch | {f"{stack}_replay": choices(part) for stack, part in parts.items()}


class _Recording:
    """Writes the routing of whole batches as `evaluated_sums` passes it in."""

    def __init__(self, path: str | os.PathLike, max_places: int):
        self._path, self._most, self._number = path, max_places, 0

    def job(self, job: TrainingJob) -> TrainingJob:
        """The job whose evaluation returns the routing of whole batches."""
        switch = job.model.switch
        require(
            switch is not None,
            "record with a model without Switch layers: nothing is routed; record a sparse one",
        )
        places = job.batch_size * sum(job.sparse_lengths)
        model = dataclasses.replace(
            job.model, switch=dataclasses.replace(switch, recorded_places=places)
        )
        return dataclasses.replace(job, model=model)

    def writer(self, job: TrainingJob, step: int, model: str) -> RecordWriter:
        switch, layers = job.model.switch, job.model.sparse_layers_by_stack
        vocabulary = job.vocabulary.fingerprint()
        info = RecordInfo(switch, layers, step, "eval", model, vocabulary)
        self._writer = RecordWriter(self._path, info, self._most)
        return self._writer

    @property
    def summary(self) -> str:
        """What was written, in words."""
        return self._writer.summary()

    def begin_task(self) -> None:
        """Does nothing: batches of all tasks are numbered consecutively."""

    def add(self, batch_size: int, parts: dict) -> None:
        self._writer.add(self._number, jax.device_get(parts), batch_size)
        self._number += 1


# Texts that the model generates.


def _with_split(source: Task | Mixture, split: str | None) -> Task | Mixture:
    """The task or mixture, to be evaluated on another split."""
    if split is None:
        return source
    return with_evaluated(
        source, lambda task: dataclasses.replace(task, evaluation_split=split)
    )


def _mesh_of_texts(mesh: MeshSpec) -> MeshSpec | None:
    """The mesh on which texts are generated: the job's without stages; None is one device.

    Decoding has no stages: their devices each take a part of the batch.
    """
    data = None if mesh.data is None else mesh.data * mesh.pipe
    mesh = dataclasses.replace(mesh, data=data, pipe=1)
    return None if mesh.num_devices(len(jax.devices())) == 1 else mesh


def _only_task(job: TrainingJob, wanted: dict[str, tuple]) -> str | None:
    """The task whose experts answer if each task has its own; None if tasks share them."""
    switch = job.model.switch
    if switch is None or switch.router.kind != "task":
        return None
    require(
        len(wanted) == 1,
        f"the experts of this model are divided among tasks, and {', '.join(wanted)} have "
        "metrics; answer one at a time: tasks=NAME",
    )
    return next(iter(wanted))


@dataclasses.dataclass(frozen=True)
class _Texts:
    """Settings for answering and measuring tasks; the fields are arguments of `evaluate`."""

    decoding: dict[str, Any]
    batch_size: int
    max_examples: int | None
    ranks_choices: bool
    bootstrap: int
    predictions: str | os.PathLike | None

    def measure(
        self, job: TrainingJob, metrics: dict[str, tuple], model: api.Model, reporter
    ) -> dict[str, Any]:
        """JSON: settings, results of each task in `metrics`, and their means if several."""
        generator = model.generator(batch_size=self.batch_size, **self.decoding)
        questions = [
            ask(
                model,
                evaluation_examples(
                    task, task.evaluation_split, job.features, job.data_dir, self.max_examples
                ),
            )
            for task in evaluated_tasks(job.source)
            if task.name in metrics
        ]
        if self.ranks_choices:
            _ = [each.examples.choices for each in questions]  # refuses those without choices
        answers = self._answers(model, generator, questions, reporter)
        tasks, results = {}, []
        for asked, answered in zip(questions, answers, strict=True):
            name, examples = asked.task.name, asked.examples
            found = examples.results(answered.texts, metrics[name], self.bootstrap)
            if self.ranks_choices:
                reporter.note(f"scoring the choices of {name}")
                found += rank_choices(model, asked, self.batch_size)
            results.append(found)
            tasks[name] = {
                "split": asked.task.evaluation_split,
                "examples": len(examples.inputs),
                "inputs_cut": examples.num_cut,
                "outputs_unfinished": answered.num_unfinished,
                "metrics": [dataclasses.asdict(each) for each in found],
            }
        means = map(dataclasses.asdict, mean_results(results) if len(results) > 1 else [])
        return {"decoding": self.decoding, "tasks": tasks, "mean": list(means)}

    def _answers(
        self, model: api.Model, generator: Generator, questions: list[Questions], reporter
    ) -> list[Answers]:
        """Answers to all questions; each task's are written to the file when it is done."""
        answers = []
        lines = []
        done = 0
        reporter.begin(0, sum(len(each.prompts) for each in questions))
        for asked in questions:
            reporter.note(f"answering {len(asked.prompts):,} examples of {asked.task.name}")

            def progressed(number: int, offset: int = done):
                reporter.counted(offset + number)

            answers.append(answer(model, generator, asked, progressed))
            done += len(asked.prompts)
            texts = asked.examples.inputs, asked.examples.targets, answers[-1].texts
            rows = prediction_rows(asked.task.name, *texts)
            lines += [json_text(row, ensure_ascii=False) + "\n" for row in rows]
            if self.predictions:
                path = pathlib.Path(self.predictions).expanduser().absolute()
                write_atomically(path, "".join(lines).encode())
        return answers
