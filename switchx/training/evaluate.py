# SPDX-License-Identifier: Apache-2.0
"""Evaluation: the model's sums over a fixed set of batches, and where tokens are routed.

There is no randomness in it. Where the first tokens went, which the forward pass computes
anyway, is kept in `routing/step_000400.npz` of the run folder; `analysis/routing.py` reads it:

    step, num_experts            of the checkpoint and the model
    <stack>_layers_N             names of the Switch layers of a stack, encoder or decoder
    <stack>_token_T              int32 ids of the tokens that the stack reads, padding left out
    <stack>_expert_NTS           int16 experts chosen; `num_experts` where there is none
    <stack>_gate_NTS             float16 weights of these

Dims: B batch, L length, V vocabulary, N Switch layers, T tokens, S choices of a token
"""

import dataclasses
import io
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from switchx.files import write_atomically
from switchx.models.config import ModelConfig
from switchx.moe.stats import RoutingStats
from switchx.training.losses import LossConfig, TokenSums, token_sums
from switchx.training.microbatches import sparse_stacks
from switchx.training.telemetry.metrics import cut_files_after, routing_metrics, token_metrics

# Evaluation reports the plain likelihood whatever the training loss adds to it.
PLAIN_LOSS = LossConfig(layer_reduction="mean", z_loss=0.0)
# Rows of a batch are kept as long as their places are no more than these (one row at least),
# and batches until they have reached it.
SAMPLE_TOKENS = 8192


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StackSample:
    """The first rows of a batch in one stack: what it reads, where its layers send it."""

    token_BL: Any
    is_token_BL: Any
    expert_NBLS: Any
    gate_NBLS: Any

    def first(self, rows: int) -> "StackSample":
        """The sample of the first rows alone."""
        return StackSample(
            self.token_BL[:rows],
            self.is_token_BL[:rows],
            self.expert_NBLS[:, :rows],
            self.gate_NBLS[:, :rows],
        )


def sample_routing(
    config: ModelConfig, stats: RoutingStats | None, batch: dict
) -> dict[str, StackSample]:
    """The part of a batch's routing that is kept, by stack; nothing of a dense one."""
    if stats is None:
        return {}
    stacks, rows = sparse_stacks(config), sampled_rows(config, batch)
    return {
        stack: StackSample(
            token_BL=batch[f"{stack}_input_tokens"],
            is_token_BL=batch[f"{stack}_segment_ids"] > 0,
            expert_NBLS=choices.expert_BLS.astype(jnp.int16),
            gate_NBLS=choices.gate_BLS.astype(jnp.float16),
        ).first(rows)
        for stack, choices in zip(stacks, stats.choices, strict=True)
    }


def sampled_rows(config: ModelConfig, batch: dict) -> int:
    """The largest number of a batch's first rows that `sample_routing` keeps."""
    places = sum(batch[f"{stack}_input_tokens"].shape[1] for stack in sparse_stacks(config))
    return max(1, SAMPLE_TOKENS // places)


def eval_step(
    config: ModelConfig, params, batch: dict
) -> tuple[TokenSums, RoutingStats | None, dict[str, StackSample]]:
    """Token sums, routing statistics and a sample of the routing of one batch: no dropout,
    no jitter, and the evaluation capacity."""
    sums, stats = token_sums(config, PLAIN_LOSS, params, batch, is_training=False)
    return sampled(config, sums, stats, batch)


def sampled(config: ModelConfig, sums: TokenSums, stats: RoutingStats | None, batch: dict):
    """The result of `eval_step`: token sums, routing statistics, routing of the first rows."""
    summed = None if stats is None else stats.summed
    return sums, summed, sample_routing(config, stats, batch)


class RoutingSample:
    """The sample of one evaluation; `per_task` tokens of each task that it has."""

    def __init__(self, num_tasks: int = 1):
        self.per_task = -(-SAMPLE_TOKENS // num_tasks)
        self._left = 0
        self._parts: dict[str, list[StackSample]] = {}

    def begin_task(self) -> None:
        """Makes room for the tokens of another task."""
        self._left = self.per_task

    def add(self, parts: dict[str, StackSample]) -> None:
        """Keeps as many rows of one more batch as the task still has room for."""
        if self._left <= 0 or not parts:
            return
        parts = jax.device_get(parts)
        tokens_B = sum(np.sum(part.is_token_BL, axis=1) for part in parts.values())
        # At least one row: a sample of nothing cannot be drawn.
        rows = max(1, int(np.sum(np.cumsum(tokens_B) <= self._left)))
        for stack, part in parts.items():
            self._parts.setdefault(stack, []).append(part.first(rows))
        self._left -= max(1, int(np.sum(tokens_B[: rows + 1])))

    def arrays(self, model: ModelConfig) -> dict[str, np.ndarray]:
        """The file's arrays of a model's sample, without the step; empty for a dense one."""
        if not self._parts:
            return {}
        arrays = {"num_experts": np.int32(model.switch.num_experts)}
        for stack, parts in self._parts.items():
            names = [name for name in model.sparse_layer_names if name.startswith(stack)]
            # Indexing by a mask leaves the real tokens, in order: [N, B, L, S] -> [N, T, S].
            experts = [part.expert_NBLS[:, part.is_token_BL] for part in parts]
            gates = [part.gate_NBLS[:, part.is_token_BL] for part in parts]
            tokens = [part.token_BL[part.is_token_BL] for part in parts]
            arrays |= {
                f"{stack}_layers_N": np.array(names),
                f"{stack}_token_T": np.concatenate(tokens),
                f"{stack}_expert_NTS": np.concatenate(experts, axis=1),
                f"{stack}_gate_NTS": np.concatenate(gates, axis=1),
            }
        return arrays


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
        sample: takes in the routing of the first batches; None keeps none.

    Raises:
        ValueError: there is no batch.
    """
    total = None
    if sample is not None:
        sample.begin_task()
    for batch in batches:
        *sums, part = step(params, batch)
        if sample is not None:
            sample.add(part)
        total = sums if total is None else jax.tree.map(jnp.add, total, sums)
    if total is None:
        raise ValueError(
            "evaluation got no batch; expected at least one: the validation split is smaller "
            "than one batch, so use a smaller BATCH_SIZE or more validation text"
        )
    sums, stats = jax.device_get(total)
    return sums, stats


class RoutingLog:
    """The samples of a run, written by process 0 alone."""

    def __init__(self, folder: pathlib.Path, last_step: int):
        """Opens the log to go on after `last_step`; -1 begins it anew.

        Samples of later steps are of an attempt that ended after its last checkpoint; as in
        `MetricsLog`, they are taken away.
        """
        self._folder = folder
        self._is_writer = jax.process_index() == 0
        if self._is_writer:
            cut_files_after(folder, last_step)

    def write(self, step: int, arrays: dict[str, np.ndarray]) -> None:
        """Writes the sample of a step, whole or not at all; nothing for a dense model."""
        if not (self._is_writer and arrays):
            return
        content = io.BytesIO()
        np.savez_compressed(content, step=np.int64(step), **arrays)
        write_atomically(self._folder / f"step_{step:06d}.npz", content.getvalue())
