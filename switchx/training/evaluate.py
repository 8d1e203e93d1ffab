# SPDX-License-Identifier: Apache-2.0
"""Evaluation: the model's sums over a fixed set of batches, and where tokens are routed.

There is no randomness in it. The routing of the first tokens, which the forward pass computes
anyway, is kept in `routing/step_000400.parquet` of the run folder, a record of
`switchx/routing_record.py`.
"""

import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from switchx.models.config import ModelConfig
from switchx.moe.capacity import rows_of_groups
from switchx.moe.stats import RoutingStats
from switchx.routing_record import RecordInfo, RecordWriter, StackRecord, recorded
from switchx.training.losses import LossConfig, TokenSums, token_sums
from switchx.training.microbatches import sparse_stacks
from switchx.training.telemetry.metrics import cut_files_after, routing_metrics, token_metrics

# Evaluation reports the plain likelihood whatever the training loss adds to it.
PLAIN_LOSS = LossConfig(layer_reduction="mean", z_loss=0.0)


def sample_routing(
    config: ModelConfig, stats: RoutingStats | None, batch: dict
) -> dict[str, StackRecord]:
    """The part of a batch's routing that is kept, by stack; nothing for a dense model."""
    if stats is None:
        return {}
    rows = sampled_rows(config, batch)
    return {stack: part.first(rows) for stack, part in recorded(config, stats, batch).items()}


def sampled_rows(config: ModelConfig, batch: dict) -> int:
    """The number of a batch's first rows that `sample_routing` keeps: whole routing groups."""
    lengths = [batch[f"{stack}_input_tokens"].shape[1] for stack in sparse_stacks(config)]
    B = len(batch["decoder_segment_ids"])
    together = rows_of_groups(config.switch, B, lengths, 1) or B
    rows = config.switch.recorded_places // sum(lengths)
    return min(B, max(1, rows // together) * together)


def eval_step(
    config: ModelConfig, params, batch: dict
) -> tuple[TokenSums, RoutingStats | None, dict[str, StackRecord]]:
    """Token sums, routing statistics and a sample of the routing of one batch: no dropout,
    no jitter, and the evaluation capacity."""
    sums, stats = token_sums(config, PLAIN_LOSS, params, batch, is_training=False)
    return sampled(config, sums, stats, batch)


def sampled(config: ModelConfig, sums: TokenSums, stats: RoutingStats | None, batch: dict):
    """The result of `eval_step`: token sums, routing statistics, routing of the first rows."""
    summed = None if stats is None else stats.summed
    return sums, summed, sample_routing(config, stats, batch)


class RoutingSample:
    """The routing of an evaluation's first batches, for its record.

    Attributes:
        per_task: number of places after which no further batch of a task is kept.
    """

    def __init__(self, model: ModelConfig, num_tasks: int = 1):
        self._model = model
        self.per_task = 0
        if model.switch is not None:
            self.per_task = -(-model.switch.recorded_places // num_tasks)
        self._left = 0
        self.batches: list[tuple[int, dict[str, StackRecord]]] = []

    def begin_task(self) -> None:
        """Makes room for the tokens of another task."""
        self._left = self.per_task

    def add(self, batch_size: int, parts: dict[str, StackRecord]) -> None:
        """Keeps one more batch's part if the task still has room for a token."""
        if self._left <= 0 or not parts:
            return
        parts = jax.device_get(parts)
        self.batches.append((batch_size, parts))
        self._left -= sum(part.token_BL.size for part in parts.values())

    def write(self, path, step: int, source: str = "training") -> None:
        """Writes the record of a model with Switch layers; nothing for a dense one."""
        if not self.batches:
            return
        info = RecordInfo(self._model.switch, self._model.sparse_layers_by_stack, step, source)
        with RecordWriter(path, info) as writer:
            for number, (batch_size, parts) in enumerate(self.batches):
                writer.add(number, parts, batch_size)


def evaluate(
    step: Callable[[Any, dict], tuple],
    params,
    batches: Iterable[dict],
    sample: RoutingSample | None = None,
) -> dict[str, Any]:
    """Metrics over all batches together; arguments and errors are those of `evaluated_sums`."""
    sums, stats = evaluated_sums(step, params, batches, sample)
    return token_metrics(sums) | routing_metrics(stats)


def evaluated_sums(
    step: Callable[[Any, dict], tuple],
    params,
    batches: Iterable[dict],
    sample: RoutingSample | None = None,
) -> tuple[TokenSums, RoutingStats | None]:
    """Sums over all batches, on the host; None for the routing of a dense model.

    Args:
        step: `eval_step` with its configuration bound, jitted.
        sample: collector of the routing of the first batches; None keeps none.

    Raises:
        ValueError: there is no batch.
    """
    total = None
    if sample is not None:
        sample.begin_task()
    for batch in batches:
        *sums, part = step(params, batch)
        if sample is not None:
            sample.add(len(batch["decoder_segment_ids"]), part)
        total = sums if total is None else jax.tree.map(jnp.add, total, sums)
    if total is None:
        raise ValueError(
            "evaluation got no batch; expected at least one: the validation split is smaller "
            "than one batch, so use a smaller BATCH_SIZE or more validation text"
        )
    sums, stats = jax.device_get(total)
    return sums, stats


class RoutingLog:
    """The samples of a run, written only by process 0."""

    def __init__(self, folder: pathlib.Path, last_step: int):
        """Opens the log to continue after `last_step`; -1 begins it anew.

        Samples of later steps belong to an attempt that ended after its last checkpoint; as in
        `MetricsLog`, they are removed.
        """
        self._folder = folder
        self._is_writer = jax.process_index() == 0
        if self._is_writer:
            cut_files_after(folder, last_step)

    def write(self, step: int, sample: RoutingSample) -> None:
        """Writes the sample of a step, whole or not at all; nothing for a dense model."""
        if not (self._is_writer and sample.batches):
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        sample.write(self._folder / f"step_{step:06d}.parquet", step)
