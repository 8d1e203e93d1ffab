# SPDX-License-Identifier: Apache-2.0
"""Metrics: from a step's measurements to names and numbers, and into the run folder.

`metrics.jsonl` holds one line per logged step, `validation.jsonl` one line per evaluation;
TensorBoard gets the same scalars. `skipped_batches/` keeps the batches of steps that were not
taken.
"""

import contextlib
import json
import logging
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from switchx.data.features import Batch, batch_digest
from switchx.fields import json_text
from switchx.files import write_atomically
from switchx.moe.load_evenness import dead_experts, load_entropy, max_violation
from switchx.moe.stats import RoutingStats
from switchx.training.losses import TokenSums
from switchx.training.step import StepMetrics

# It warns about every NaN that it is given; the loop says which step was not finite.
logging.getLogger("tensorboardX.x2num").setLevel(logging.ERROR)


# The metrics of `token_metrics` that are not counts.
TOKEN_METRICS = ("neg_log_perplexity", "cross_entropy", "accuracy")


def token_metrics(sums: TokenSums) -> dict[str, float]:
    """Means over real target tokens.

    Negative log perplexity is minus the mean negative log-likelihood in nats (Fedus et al.
    2021, section 2.3: natural logarithm; higher is better), without smoothing or z-loss, and
    cross-entropy is the same without the minus, in training as in validation.
    `soft_loss` is included for a student in training (`distillation/soft_loss.py`).
    """
    tokens = max(float(sums.tokens), 1.0)
    soft = {} if sums.soft_loss is None else {"soft_loss": float(sums.soft_loss) / tokens}
    return soft | {
        "neg_log_perplexity": -float(sums.nll) / tokens,
        "cross_entropy": float(sums.nll) / tokens,
        "accuracy": float(sums.correct) / tokens,
        "target_tokens": float(sums.tokens),
    }


def routing_metrics(stats: RoutingStats | None, violation_N=None) -> dict[str, Any]:
    """Per Switch layer, the encoder's first: lists over layers; loads are shares of tokens.

    `dropped_fraction` is of all choices, of which a token may have several. Evenness of load is
    measured as in `moe/load_evenness.py`; `load_entropy` is a share of the largest possible.

    Args:
        violation_N: mean MaxVio of the batches that were added up; None takes that of the sums.
    """
    if stats is None:
        return {}
    means = {name: np.asarray(mean, np.float64) for name, mean in stats.means().items()}
    load, U = means["load"], stats.num_tasks
    nats = load_entropy(load, U)
    means |= {
        "load": load.round(6),
        "max_violation": max_violation(load, U) if violation_N is None else violation_N,
        "load_entropy": nats / np.log(max(load.shape[-1] // U, 2)),
        "effective_experts": U * np.exp(nats),
        "dead_experts": dead_experts(load, U).sum(axis=-1),
        "choices": np.sum(stats.load_E, axis=-1),
    }
    asked = np.sum(stats.load_E if stats.asked is None else stats.asked)
    return {
        "dropped_fraction": float(np.sum(stats.dropped)) / max(float(asked), 1.0),
        "routing": {name: mean.tolist() for name, mean in means.items()},
    }


def rms_metrics(rms: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The root mean squares of one step by kind and parameter; a bank's are lists over experts.

    Those of stacked layers are named by their place in the stack, such as `repeat_0`.
    """

    def named(name: str, value) -> Any:
        is_bank = "E" in name.rpartition("_")[2]
        if np.ndim(value) == is_bank:
            return np.asarray(value, np.float64).tolist()
        return {f"repeat_{n}": named(name, each) for n, each in enumerate(value)}

    return {
        kind: {name: named(name, value) for name, value in of_kind.items()}
        for kind, of_kind in rms.items()
    }


class MetricsLog:
    """One `.jsonl` file and the same scalars in TensorBoard, written only by process 0."""

    def __init__(self, path: pathlib.Path, tensorboard: pathlib.Path, last_step: int):
        """Opens the log to continue after `last_step`; -1 begins it anew.

        Lines of later steps belong to an attempt that ended after its last checkpoint; the
        resumed run takes these steps again, so they are cut off.
        """
        self._is_writer = jax.process_index() == 0
        if not self._is_writer:
            return
        cut_after(path, last_step)
        self._file = path.open("a", encoding="utf-8")
        # If installed, it imports PyTorch and the clouds' libraries, which takes seconds.
        from tensorboardX import SummaryWriter

        self._events = SummaryWriter(str(tensorboard), purge_step=last_step + 1)

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Appends one line; JSON has no NaN or infinity, so those are written as null."""
        if not self._is_writer:
            return
        self._file.write(json_text({"step": step} | metrics) + "\n")
        self._file.flush()
        for name, value in flat_scalars(metrics).items():
            self._events.add_scalar(name, value, step)

    def write_text(self, step: int, name: str, text: str) -> None:
        """Shows a text, in Markdown, in TensorBoard."""
        if self._is_writer:
            self._events.add_text(name, text, step)

    def close(self) -> None:
        if self._is_writer:
            self._file.close()
            self._events.close()


def flat_scalars(metrics: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Nested dictionaries and lists as `routing/load/layer_0/expert_3`, for TensorBoard.

    Lists are over layers, lists within them over experts.
    """
    scalars = {}
    for name, value in metrics.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict):
            scalars |= flat_scalars(value, f"{path}/")
        elif isinstance(value, list):
            item_name = "expert" if "layer_" in path else "layer"
            items = {f"{item_name}_{i}": item for i, item in enumerate(value)}
            scalars |= flat_scalars(items, f"{path}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            scalars[path] = float(value)
    return scalars


def cut_after(path: pathlib.Path, last_step: int) -> None:
    """Removes the lines of later steps from a log, if it exists."""
    if not path.exists():
        return
    kept = b"".join(line + b"\n" for line in _lines_until(path, last_step))
    write_atomically(path, kept)  # this run may be killed too


def cut_files_after(folder: pathlib.Path, last_step: int) -> None:
    """Removes what was written at later steps: files `step_000123.*`, if there are any."""
    for path in folder.glob("step_*"):
        step = path.stem.removeprefix("step_")
        if step.isdecimal() and int(step) > last_step:
            path.unlink()


def _lines_until(path: pathlib.Path, last_step: int) -> Iterator[bytes]:
    for line in path.read_bytes().splitlines():
        # The line that a killed run was writing, or something that is no line of ours.
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if json.loads(line)["step"] <= last_step:
                yield line


def logged_lines(path: pathlib.Path, last_step: int) -> list[dict[str, Any]]:
    """The lines of a log up to `last_step`; none if there is no log."""
    return [*map(json.loads, _lines_until(path, last_step) if path.exists() else ())]


def last_metrics(path: pathlib.Path, last_step: int, every: int) -> dict[str, Any] | None:
    """The metrics logged at the last multiple of `every` up to `last_step`, or None."""
    lines = logged_lines(path, last_step)[::-1]
    return next((line for line in lines if line["step"] % every == 0), None)


def last_step(path: pathlib.Path, at_most: int) -> int | None:
    """The last step up to `at_most` that has a line in a log; None without one."""
    lines = logged_lines(path, at_most)
    return lines[-1]["step"] if lines else None


class SkippedBatches:
    """The batches of steps that were not taken.

    `<step>.<process>.npz` in the folder is the batch, `.json` its identity and the numbers
    that were not finite.
    """

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._identities: list[dict] = []

    def keep(self, step: int, batch: Batch, metrics: StepMetrics) -> str:
        """Writes one batch into the folder; returns a sentence for the log.

        Args:
            metrics: the step's metrics, on the host.
        """
        identity = {
            "step": step,
            "batch": batch_digest(batch),
            "loss": repr(float(metrics.loss)),
            "grad_norm": repr(float(metrics.grad_norm)),
            "in_a_row": int(metrics.skipped_in_a_row),
        }
        self._identities.append(identity)
        self._folder.mkdir(exist_ok=True)
        name = f"{step}.{jax.process_index()}"
        (self._folder / f"{name}.json").write_text(json.dumps(identity) + "\n")
        np.savez_compressed(self._folder / f"{name}.npz", **batch)
        return (
            f"step {step} is skipped: loss {identity['loss']}, gradient norm "
            f"{identity['grad_norm']}, batch {identity['batch']}; no parameter changed"
        )

    def last(self, num: int) -> str:
        """The last `num` in words: `batches 7: 0a1b2c..., 8: ..., kept in FOLDER`."""
        batches = ", ".join(
            f"{each['step']}: {each['batch']}" for each in self._identities[-num:]
        )
        return f"batches {batches}, kept in {self._folder}"
