# SPDX-License-Identifier: Apache-2.0
"""Evaluation by generated texts while training: how many, for how long, and what is kept.

Training does not know inference: `switchx/generated_evaluation.py` builds the `TextEvaluator`
that the loop calls. Fedus et al. 2022 (Switch Transformers, arXiv:2101.03961), section 4.1:
tasks are evaluated every 200 steps, and the peak of each is reported.
"""

import dataclasses
import json
import pathlib
import textwrap
import time
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils

from switchx.checkpoint.run_folder import RunFolder
from switchx.data.evaluation import prediction_rows
from switchx.fields import json_text, require, require_at_least
from switchx.files import write_atomically
from switchx.training.telemetry.metrics import MetricsLog, cut_files_after

# Fields of a task's evaluation that are not metrics.
NOTES = "notes"
COUNTS = ("examples", "examples_left_out", "outputs_unfinished", NOTES)


@dataclasses.dataclass(frozen=True)
class TextEvaluation:
    """How evaluations generate texts for the inputs of the tasks that have metrics.

    Attributes:
        max_examples: number of examples of each task's split that are answered, from the first
            on; None answers all.
        batch_size: largest number of inputs in a batch.
        beam_size, max_new_tokens: beams and longest output, as in `switchx eval`; texts are
            decoded greedily or by beam search, not sampled.
        time_share: largest number of seconds of generation per second of training since the
            previous evaluation. If that is too little for all examples, only the first ones
            are answered, at least two batches of each task (one before the first step); None
            answers all.
        num_samples: number of texts of each task that are kept, in `predictions/` and
            TensorBoard.
    """

    max_examples: int | None = None
    batch_size: int = 32
    beam_size: int = 1
    max_new_tokens: int = 128
    time_share: float | None = 0.1
    num_samples: int = 8

    def __post_init__(self):
        require_at_least(self, 1, "max_examples", "batch_size", "beam_size", "max_new_tokens")
        require_at_least(self, 0, "num_samples")
        require(
            self.time_share is None or 0 < self.time_share <= 1,
            f"TextEvaluation.time_share={self.time_share}; use a share of the training time "
            "above 0 and up to 1, or None to answer all examples (EVAL_TIME_SHARE in the "
            "shipped configurations)",
        )


@dataclasses.dataclass(frozen=True)
class TaskTexts:
    """The texts that a model generated for the first examples of a task.

    Attributes:
        metrics: metrics of these examples, by name; None where one could not be computed.
        inputs, targets, predictions: texts, one for each example.
        num_left_out: examples that were not answered.
        num_unfinished: texts that did not end within `max_new_tokens`.
        notes: the reason why a metric has no number, by the metric's name.
    """

    metrics: dict[str, float | None]
    inputs: list[str]
    targets: list[str]
    predictions: list[str]
    num_left_out: int
    num_unfinished: int
    notes: dict[str, str] = dataclasses.field(default_factory=dict)


class TextEvaluator(Protocol):
    """Generates texts with parameters as training has them; all processes call it together."""

    def __call__(self, params: dict, goes_on: Callable[[], bool]) -> dict[str, TaskTexts]:
        """The generated texts, by task.

        Args:
            goes_on: function that is called after a batch of each task and returns whether
                there is time for another one.
        """


class TimeLimit:
    """Whether there is time for another batch; the first process's clock decides for all.

    The clock starts when it is first asked: the batches before that may compile. So at first
    any time is enough, and then the previous batch says how long another one takes.
    """

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.perf_counter):
        """Asks nothing yet; `seconds` is None for no limit."""
        self._seconds, self._clock = seconds, clock
        self._times: list[float] = []

    def __call__(self) -> bool:
        if self._seconds is None:
            return True
        self._times.append(self._clock())
        start, now = self._times[0], self._times[-1]
        of_one = now - self._times[-2] if len(self._times) > 1 else 0.0
        is_time = now - start + of_one < self._seconds
        if jax.process_count() > 1:
            is_time = multihost_utils.broadcast_one_to_all(np.array(is_time))
        return bool(is_time)


class TextLog:
    """The text evaluations of a run: runs them and keeps samples and peaks."""

    def __init__(
        self,
        spec: TextEvaluation,
        evaluator: TextEvaluator,
        run: RunFolder,
        board: MetricsLog,
        last_step: int,
    ):
        """Continues after `last_step`; files of later steps belong to an attempt that ended."""
        self._spec = spec
        self._evaluator = evaluator
        self._run = run
        self._board = board
        self._is_writer = jax.process_index() == 0
        self._seconds_before = 0.0
        if self._is_writer:
            cut_files_after(run.predictions, last_step)

    def evaluate(
        self, params: dict, step: int, train_seconds: float
    ) -> dict[str, dict[str, Any]]:
        """Metrics and `COUNTS` of each task; samples go to `predictions/` and TensorBoard.

        Args:
            train_seconds: seconds that this process has trained until now, without evaluations.
        """
        share = self._spec.time_share
        seconds = train_seconds - self._seconds_before
        self._seconds_before = train_seconds
        limit = TimeLimit(None if share is None else share * seconds)
        found = self._evaluator(params, limit)
        if self._spec.num_samples and self._is_writer:
            lines = []
            for task, texts in found.items():
                columns = texts.inputs, texts.targets, texts.predictions
                first = (column[: self._spec.num_samples] for column in columns)
                kept = prediction_rows(task, *first)
                lines += [json_text(each, ensure_ascii=False) + "\n" for each in kept]
                self._board.write_text(
                    step, f"predictions/{task}", "\n\n".join(map(_shown, kept))
                )
            write_atomically(
                self._run.predictions / f"step_{step:06d}.jsonl", "".join(lines).encode()
            )
        return {
            task: texts.metrics
            | {
                "examples": len(texts.predictions),
                "examples_left_out": texts.num_left_out,
                "outputs_unfinished": texts.num_unfinished,
            }
            | ({NOTES: texts.notes} if texts.notes else {})
            for task, texts in found.items()
        }

    def write_peaks(self) -> None:
        """Writes the `peaks` of the run's evaluations so far into its folder."""
        if self._is_writer:
            found = json_text(peaks(self._run.validation), indent=2) + "\n"
            write_atomically(self._run.peaks, found.encode())


def peaks(validation: pathlib.Path) -> dict[str, dict[str, dict[str, float]]]:
    """The highest score of each task's metrics over a run's evaluations, the first of equals.

    The evaluation before the first step belongs to no checkpoint of the run and does not count.

    Args:
        validation: `validation.jsonl` of a run folder.

    Returns:
        `{task: {metric: {"score", "step", "examples"}}}`; nothing for a metric that was never
        finite.
    """
    best: dict[str, dict[str, dict[str, float]]] = {}
    for line in map(json.loads, validation.read_text(encoding="utf-8").splitlines()):
        for task, values in line.get("texts", {}).items() if line["step"] else ():
            of_task = best.setdefault(task, {})
            for name in values.keys() - set(COUNTS):
                score, peak = values[name], of_task.get(name)
                if score is not None and (peak is None or score > peak["score"]):
                    measured = {"step": line["step"], "examples": values["examples"]}
                    of_task[name] = {"score": score} | measured
    return {task: dict(sorted(of_task.items())) for task, of_task in best.items()}


def _shown(sample: dict[str, str]) -> str:
    """A sample in Markdown; indented, so that nothing in a text is markup."""
    parts = ((name, sample[name]) for name in ("inputs", "target", "prediction"))
    return "\n\n".join(f"{name}\n\n{textwrap.indent(text, '    ')}" for name, text in parts)
