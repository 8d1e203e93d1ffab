# SPDX-License-Identifier: Apache-2.0
"""Where validation tokens are routed: a sample of each evaluation, in a file of its own.

`routing/step_000400.npz` in the run folder. `analysis/routing.py` reads it; what is in it:

    step, num_experts            of the checkpoint and the model
    <stack>_layers_N             names of the Switch layers of a stack, encoder or decoder
    <stack>_token_T              int32 ids of the tokens that the stack reads, padding left out
    <stack>_expert_NTS           int16 experts chosen; `num_experts` where there is none
    <stack>_gate_NTS             float16 weights of these

The forward pass of the evaluation computes all of it anyway: a sample costs its bytes.
Dims: B batch, L length, N Switch layers, T tokens, S choices of a token
"""

import dataclasses
import io
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from switchx.data.data_dir import write_atomically
from switchx.models.config import ModelConfig
from switchx.moe.stats import RoutingStats

# Rows of a batch are kept as long as their places are no more than these (one row at least),
# and batches until they have reached it.
SAMPLE_TOKENS = 8192
STACKS = ("encoder", "decoder")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StackSample:
    """The first rows of a batch in one stack: what it reads, where its layers send it."""

    token_BL: Any
    is_token_BL: Any
    expert_NBLS: Any
    gate_NBLS: Any


def sample_routing(stats: RoutingStats | None, batch: dict) -> dict[str, StackSample]:
    """The part of a batch's routing that is kept, by stack; nothing of a dense model."""
    if stats is None:
        return {}
    stacks = [stack for stack in STACKS if f"{stack}_input_tokens" in batch]
    # Where one stack of two is sparse, it is the encoder.
    stacks = stacks[: len(stats.choices)]
    places = sum(batch[f"{stack}_input_tokens"].shape[1] for stack in stacks)
    rows = max(1, SAMPLE_TOKENS // places)
    return {
        stack: _first_rows(
            StackSample(
                token_BL=batch[f"{stack}_input_tokens"],
                is_token_BL=batch[f"{stack}_segment_ids"] > 0,
                expert_NBLS=choices.expert_BLS.astype(jnp.int16),
                gate_NBLS=choices.gate_BLS.astype(jnp.float16),
            ),
            rows,
        )
        for stack, choices in zip(stacks, stats.choices, strict=True)
    }


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
            kept = _first_rows(part, rows)
            self._parts.setdefault(stack, []).append(kept)
        self._left -= max(1, int(np.sum(tokens_B[: rows + 1])))

    def arrays(self, model: ModelConfig) -> dict[str, np.ndarray]:
        """What the file holds of a model's sample, the step apart; empty for a dense one."""
        if not self._parts:
            return {}
        arrays = {"num_experts": np.int32(model.switch.num_experts)}
        for stack, parts in self._parts.items():
            names = [name for name in model.sparse_layer_names if name.startswith(stack)]
            expert_NTS = np.concatenate([_tokens(p, p.expert_NBLS) for p in parts], axis=1)
            gate_NTS = np.concatenate([_tokens(p, p.gate_NBLS) for p in parts], axis=1)
            arrays |= {
                f"{stack}_layers_N": np.array(names),
                f"{stack}_token_T": np.concatenate([p.token_BL[p.is_token_BL] for p in parts]),
                f"{stack}_expert_NTS": expert_NTS,
                f"{stack}_gate_NTS": gate_NTS,
            }
        return arrays


class RoutingLog:
    """The samples of a run, written by process 0 alone."""

    def __init__(self, folder: pathlib.Path, last_step: int):
        """Opens the log to go on after `last_step`; -1 begins it anew.

        Samples of later steps are of an attempt that ended after its last checkpoint; as in
        `MetricsLog`, they are taken away.
        """
        self._folder = folder
        self._is_writer = jax.process_index() == 0
        if not self._is_writer or not folder.is_dir():
            return
        for path in folder.glob("step_*.npz"):
            step = path.stem.removeprefix("step_")
            if step.isdecimal() and int(step) > last_step:
                path.unlink()

    def write(self, step: int, arrays: dict[str, np.ndarray]) -> None:
        """Writes the sample of a step, whole or not at all; nothing for a dense model."""
        if not (self._is_writer and arrays):
            return
        content = io.BytesIO()
        np.savez_compressed(content, step=np.int64(step), **arrays)
        write_atomically(self._folder / f"step_{step:06d}.npz", content.getvalue())


def _first_rows(part: StackSample, rows: int) -> StackSample:
    return StackSample(
        part.token_BL[:rows],
        part.is_token_BL[:rows],
        part.expert_NBLS[:, :rows],
        part.gate_NBLS[:, :rows],
    )


def _tokens(part: StackSample, x_NBLS: np.ndarray) -> np.ndarray:
    """`[N, B, L, S]` -> `[N, T, S]`: the real tokens, in order."""
    return x_NBLS[:, part.is_token_BL]
