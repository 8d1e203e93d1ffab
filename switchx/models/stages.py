# SPDX-License-Identifier: Apache-2.0
"""A model as chunks of its stacks, run one after the other.

The stages of a pipeline run them (training/pipelined.py), and so does training with experts on
a disk, a period at a time (training/offload). A stage holds an equal share of the
blocks of every stack, and a copy of everything else: the embeddings, the position tables, the
final norms. A microbatch enters a chunk as a message: the activations, and in the decoder
of an encoder-decoder also the encoder's output. Keys are those of the whole model, so that
dropout is the same in both.

Dims: B batch, L length, D model, M memory, V vocabulary, E experts
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from switchx import tree
from switchx.axes import dims_of
from switchx.layers.dense import split_key
from switchx.models.config import ModelConfig
from switchx.models.params import abstract_params, bind, params_of
from switchx.models.stack import BlockPeriod, layer_keys
from switchx.moe.replay import given_choices
from switchx.partitioning.constrain import constrain_named
from switchx.partitioning.rules import param_table
from switchx.pipeline.ticks import IF_FIRST, Op

BLOCKS = "blocks"


def stack_names(config: ModelConfig) -> tuple[str, ...]:
    """The stacks in the order in which a microbatch goes through them."""
    return ("encoder", "decoder") if config.is_encoder_decoder else ("decoder",)


def split_blocks(config: ModelConfig, params: dict) -> tuple[tuple, dict]:
    """Every stack's blocks, stacked over N, and the parameters that all stages share."""
    names = stack_names(config)
    shared = dict(params)
    for name in names:
        shared[name] = {part: x for part, x in params[name].items() if part != BLOCKS}
    return tuple(params[name][BLOCKS] for name in names), shared


def join_blocks(config: ModelConfig, blocks: tuple, shared: dict) -> dict:
    """The whole parameters again, as `split_blocks` got them."""
    joined = dict(shared)
    for name, stack in zip(stack_names(config), blocks, strict=True):
        joined[name] = shared[name] | {BLOCKS: stack}
    return joined


def message_shapes(config: ModelConfig, stack: str, microbatch: dict) -> dict[str, Any]:
    """Shape structs of the message that a chunk of `stack` receives for one microbatch."""
    dtype, D = config.precision.compute_dtype, config.d_model

    def shape(stack):
        return jax.ShapeDtypeStruct((*microbatch[f"{stack}_input_tokens"].shape, D), dtype)

    if config.is_encoder_decoder and stack == "decoder":
        return {"x_BLD": shape("decoder"), "memory_BMD": shape("encoder")}
    return {"x_BLD": shape(stack)}


def link_stacks(decoder: dict[str, Any]):
    """The function from the encoder's last message to the decoder's first one.

    Args:
        decoder: shapes of the latter.
    """

    def link(message):
        x = decoder["x_BLD"]
        return {"x_BLD": jnp.zeros(x.shape, x.dtype), "memory_BMD": message["x_BLD"]}

    return link


def is_of_experts(name: str, leaf) -> bool:
    """Whether each expert has its own part of a parameter."""
    dims = dims_of(name.rpartition("/")[2], len(leaf.shape))
    return param_table(dims) == "expert_params"


def without_experts(params: dict) -> dict:
    """The parameters without those of which each expert has its own part."""
    leaves = tree.named_leaves(params)
    return tree.nested({n: leaf for n, leaf in leaves.items() if not is_of_experts(n, leaf)})


@dataclasses.dataclass(frozen=True)
class Period:
    """One period of a scanned stack, and the Switch layers in it.

    Attributes:
        stack: `encoder` or `decoder`.
        number: number of the period in the stack.
        is_first, is_last: whether it is the first or the last period of its stack.
        layers: numbers of its Switch layers, in the order of `sparse_layer_names`.
        names: paths of the parameters of the experts of each of these; they are the same in
            all periods of a stack, whose parameters are stacked over N.
    """

    stack: str
    number: int
    is_first: bool
    is_last: bool
    layers: tuple[int, ...]
    names: tuple[tuple[str, ...], ...]


def model_periods(config: ModelConfig) -> list[Period]:
    """All periods of a model of scanned stacks, in the order in which a microbatch meets
    them."""
    periods, next_layer = [], 0
    for stack in stack_names(config):
        names = _expert_names(config, stack)
        repeats = getattr(config, f"num_{stack}_layers") // config.period
        for number in range(repeats):
            layers = tuple(range(next_layer, next_layer + len(names)))
            periods.append(
                Period(stack, number, number == 0, number == repeats - 1, layers, names)
            )
            next_layer += len(names)
    return periods


def _expert_names(config: ModelConfig, stack: str) -> tuple[tuple[str, ...], ...]:
    """Paths of the parameters of experts, by the Switch layers of a period of a stack."""
    layers: dict[tuple[int, bool], list[str]] = {}
    for name, leaf in tree.named_leaves(abstract_params(config)).items():
        parts = name.split("/")  # decoder, blocks, layer_1, ffn, ...
        if parts[:2] == [stack, BLOCKS] and is_of_experts(name, leaf):
            place = int(parts[2].removeprefix("layer_")), parts[3] == "ffn"
            layers.setdefault(place, []).append(name)
    return tuple(tuple(layers[place]) for place in sorted(layers))


def init_period_experts(
    config: ModelConfig, period: Period, number, key
) -> dict[str, jax.Array]:
    """The parameters `[E, ...]` of the experts of a period, by path, as `init_params` draws
    them.

    Under jit nothing else is drawn, so no more than one period is in memory.

    Args:
        number: the period's number in its stack, which may be traced.
        key: random key of the whole model's parameters.
    """
    names = stack_names(config)
    # The keys of Transformer (the embedding's is the first) and of Stack.
    key_stack = jax.random.split(key, 1 + len(names))[1 + names.index(period.stack)]
    _, key_blocks = jax.random.split(key_stack)
    key_P = layer_keys(config, period.stack, key_blocks)[number]
    blocks = params_of(BlockPeriod(config, stack=period.stack, key_P=key_P))
    leaves = tree.named_leaves({period.stack: {BLOCKS: blocks}})
    return {name: leaves[name] for names in period.names for name in names}


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A chunk of one stack, as a stage runs it.

    Attributes:
        stack: `encoder` or `decoder`.
        num_periods: periods in the chunk.
        is_training: chooses the training capacity and turns jitter on.
    """

    config: ModelConfig
    stack: str
    num_periods: int
    is_training: bool = True

    def __call__(self, blocks, shared, batch: dict, message: dict, op: Op, *, key=None):
        """The message for the next chunk, and the routing statistics of this one's layers.

        Args:
            batch: microbatch of the op.
            key: random key of the whole model for this microbatch; None without dropout.
        """
        model = self._model(blocks, shared)
        stack = getattr(model, self.stack)
        if self.stack == "decoder":
            inputs = model.decoder_inputs(batch, message.get("memory_BMD"))
        else:
            names = ("input_tokens", "segment_ids", "positions")
            inputs = model.encoder_inputs(
                *(batch[f"encoder_{name}"] for name in names),
                batch.get("task_ids"),
                given_choices(self.config, batch, "encoder"),
            )
        key = self._key(key)

        def embedded(x_BLD):
            embedded_BLD = model.embedding.embed(
                batch[f"{self.stack}_input_tokens"],
                batch[f"{self.stack}_positions"],
                self.stack,
            )
            return jnp.where(op.is_first, stack.enter(embedded_BLD, key=key), x_BLD)

        with jax.named_scope(IF_FIRST):
            x_BLD = jax.lax.cond(op.any_first, embedded, lambda x_BLD: x_BLD, message["x_BLD"])
        x_BLD, stats, _ = stack.run(
            x_BLD,
            inputs,
            is_training=self.is_training,
            key=key,
            first_period=op.chunk_in_stack * self.num_periods,
        )
        x_BLD = jnp.where(op.is_last, stack.leave(x_BLD, key=key), x_BLD)
        return constrain_named(message | {"x_BLD": x_BLD}), stats

    def embedding(self, shared):
        """The embedding, which makes logits of the decoder's last message."""
        return self._model({}, shared).embedding

    def _model(self, blocks, shared):
        return bind(self.config, shared | {self.stack: shared[self.stack] | {BLOCKS: blocks}})

    def _key(self, key):
        """The stack's key."""
        names = stack_names(self.config)
        return key if len(names) == 1 else split_key(key, 2)[names.index(self.stack)]
