# SPDX-License-Identifier: Apache-2.0
"""What a step has to do, whatever it runs on: the model, its arrays, the batch.

A `TrainingJob` as the planner sees it; `training/workload.py` makes it of one. Dims: G T C
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp

from switchx.models.config import ModelConfig
from switchx.partitioning.rules import param_table

STACKS = ("encoder", "decoder")


@dataclasses.dataclass(frozen=True)
class StateArray:
    """One array of the training state.

    Attributes:
        name: as `decoder/blocks/1/ffn/w_in_EDF`, of a statistic with what it is of before.
        dims: its dimension letters; `""` where it is whole on every device.
        itemsize: bytes of an element.
    """

    name: str
    dims: str
    shape: tuple[int, ...]
    itemsize: int
    kind: Literal["params", "optimizer"]

    @property
    def table(self) -> str:
        """Which table of the rules says how it is split."""
        return param_table(self.dims)

    @property
    def is_in_blocks(self) -> bool:
        """Whether it belongs to a block, so that one stage of a pipeline has it."""
        return "/blocks/" in f"/{self.name}"


@dataclasses.dataclass(frozen=True)
class Workload:
    """A training step.

    Attributes:
        encoder_length, decoder_length: tokens of a row; `encoder_length` is 0 in a
            decoder-only model.
        batch_size: rows of the global batch.
        state: parameters and what the optimizer keeps.
        routing: (rows, length) -> (G, T, C) of a Switch layer in training.
        refusal: (layout, G, T) -> why the layout's dispatcher cannot run there, or None.
    """

    model: ModelConfig
    encoder_length: int
    decoder_length: int
    batch_size: int
    state: tuple[StateArray, ...]
    routing: Callable[[int, int], tuple[int, int, int]]
    refusal: Callable[..., str | None]

    @property
    def tokens(self) -> int:
        """Of a batch, both stacks' rows together."""
        return self.batch_size * (self.encoder_length + self.decoder_length)

    def length(self, stack: str) -> int:
        """Tokens of a row in a stack; 0 where the model has none."""
        return self.encoder_length if stack == "encoder" else self.decoder_length

    def num_layers(self, stack: str) -> int:
        """Blocks of a stack."""
        return getattr(self.model, f"num_{stack}_layers")

    @functools.cached_property
    def activation_bytes(self) -> int:
        """Of one element."""
        return jnp.dtype(self.model.precision.compute).itemsize

    @functools.cached_property
    def param_bytes(self) -> int:
        """Of one element."""
        return jnp.dtype(self.model.precision.params).itemsize
