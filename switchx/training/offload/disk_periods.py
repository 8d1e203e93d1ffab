# SPDX-License-Identifier: Apache-2.0
"""The computations of one period: forward, and backward from the kept input.

SE-MoE (Shen et al. 2022, arXiv:2205.10034), section 2.2. Pure functions of the dense
parameters, a bank of the period's experts, and all microbatches of a batch; `disk_step.py`
compiles them and calls them in order. The loss, the microbatches and the keys are those of
`training/step.py`, the chunks and their objective those of a pipeline (`stack_lane`), so the
gradients are the same, on any mesh without stages.

If dense parameters have slices of D on the devices (`fsdp`), the program of a period also
gathers those of the next one (backward: of the one before), so that they are there when it
begins: the paper's horizontal prefetch. It gets its own, gathered, from the period before.

Dims: B batch, L length, D model, M microbatches (in `message_shapes`: memory), J Switch layers
of a period, E experts, S choices of a token, X choices of all tokens
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from switchx import tree
from switchx.models.config import ModelConfig
from switchx.models.stages import (
    BLOCKS,
    Chunk,
    Period,
    link_stacks,
    message_shapes,
    split_blocks,
    stack_names,
)
from switchx.moe.replay import SUFFIX
from switchx.moe.stats import RoutingStats, join_stacks
from switchx.partitioning.constrain import (
    constrain_named,
    constrain_params,
    gathered_params,
    whole,
)
from switchx.pipeline.staged import differentiate
from switchx.pipeline.ticks import Op
from switchx.training.losses import (
    LossConfig,
    TokenSums,
    cross_entropy_of,
    loss_denominators,
)
from switchx.training.microbatches import into_microbatches
from switchx.training.pipelined import microbatch_of, stack_lane

Bank = dict[str, jax.Array]


class Kind(NamedTuple):
    """The properties of a period that its compiled program depends on."""

    stack: str
    is_first: bool
    is_last: bool

    @classmethod
    def of(cls, period: Period) -> "Kind":
        return cls(period.stack, period.is_first, period.is_last)


class Measured(NamedTuple):
    """The terms that a period adds to a step.

    Attributes:
        stats: statistics of its Switch layers, `[J, ...]`, summed over microbatches; None
            without Switch layers.
        value, sums: its part of the loss, and its part of the token sums.
        squares: sum of the squares of its experts' gradients, added in an order that only
            shapes decide.
    """

    stats: RoutingStats | None
    value: jax.Array
    sums: TokenSums
    squares: jax.Array


def joined(results: list[Measured]):
    """The loss, token sums, routing statistics and squares of all periods, first to last."""
    sums = [(each.value, each.sums, each.squares) for each in results]
    value, sums, squares = functools.reduce(functools.partial(jax.tree.map, jnp.add), sums)
    return value, sums, stacked([each.stats for each in results]), squares


def stacked(stats: list[RoutingStats | None]) -> RoutingStats | None:
    """Statistics of all layers, from those of some layers each; None if there are none."""
    found = [each for each in stats if each is not None]
    if not found:
        return None
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *found)


class PeriodPrograms:
    """The functions of a model's periods that are compiled."""

    def __init__(self, config: ModelConfig, loss: LossConfig, num_microbatches: int):
        # Backward recomputes a period anyway; remat would do so within it once more.
        self._config = dataclasses.replace(config, remat="none")
        self._replaying = _replaying(self._config)
        self._loss, self._num_microbatches = loss, num_microbatches

    def token_sums(self, dense: dict, x_BLD, batch: dict, loss: LossConfig) -> TokenSums:
        """Token sums from the decoder's last activations in an evaluation."""
        _, shared = split_blocks(self._config, dense)
        embedding = Chunk(self._config, "decoder", 1, is_training=False).embedding(shared)
        targets_BL = batch["decoder_target_tokens"]
        weights_BL = batch["decoder_loss_weights"]
        return cross_entropy_of(embedding, x_BLD, targets_BL, weights_BL, loss)

    def begin(self, blocks, batch, key):
        """The inputs of all periods, the message before the first period, which it does not
        read, and the gathered dense parameters of that period (`gathered_period`).

        Args:
            blocks: dense parameters of each stack's blocks, by the stack's name, as in all of
                these methods.
        """
        M = self._num_microbatches
        rows = into_microbatches(self._config, batch, M)
        inputs = {
            "rows": rows,
            "keys": key[None] if M == 1 else jax.random.split(key, M),
            "denominators": loss_denominators(self._config, batch, M),
        }
        return inputs, self._first_message(rows), self._first_dense(blocks)

    def begin_eval(self, blocks, batch):
        """The results of `begin` if nothing is random and there is one microbatch."""
        rows = jax.tree.map(lambda x: x[:, None], batch)
        return (
            {"rows": rows, "keys": None},
            self._first_message(rows),
            self._first_dense(blocks),
        )

    def end_eval(self, message, stats: dict[str, list[RoutingStats | None]]):
        """The last activations `[B, L, D]`, and the statistics of all Switch layers (None for
        none) from those of each stack's periods."""
        of_stacks = map(stacked, (stats.get("encoder", []), stats["decoder"]))
        return message["x_BLD"][0], join_stacks(*of_stacks)

    def zeros(self, blocks, shared, message):
        """Zeros to add gradients of these to."""
        zeros = jax.tree.map(jnp.zeros_like, (blocks, shared, message))
        return *constrain_params(zeros[:2]), constrain_named(zeros[2])

    def link(self, rows, message):
        """The decoder's first message, from the encoder's last one."""
        linked = jax.vmap(link_stacks(self._message("decoder", rows)))(message)
        return constrain_named(linked)

    def link_back(self, rows, message, d_linked):
        """The gradient of the encoder's last message."""
        _, transpose = jax.vjp(functools.partial(self.link, rows), message)
        return constrain_named(transpose(d_linked)[0])

    def _first_dense(self, blocks):
        return gathered_period(blocks, stack_names(self._config)[0], 0)

    def _first_message(self, rows):
        shapes = self._message(stack_names(self._config)[0], rows)
        M = jax.tree.leaves(rows)[0].shape[1]
        return constrain_named(
            {name: jnp.zeros((M, *x.shape), x.dtype) for name, x in shapes.items()}
        )

    def _message(self, stack: str, rows):
        return message_shapes(self._config, stack, jax.tree.map(lambda x: x[:, 0], rows))

    def forward(
        self,
        kind: Kind,
        is_training: bool,
        blocks,
        dense,
        bank,
        shared,
        inputs,
        message,
        period,
    ):
        """A period's activations, and what its routers chose.

        Args:
            dense: the period's parameters except those of experts, gathered by the period
                before; None where `gathered_period` gives none.

        Returns:
            Activations `[M, B, L, D]`; `used_JE` by all microbatches; in evaluation, the
            statistics of the one that it has; `dense` of the next period; in training, the
            choices `[M, B, L, J, S]` that backward gives to routers that replay.
        """
        ahead = self._neighbour(kind, 1)
        ahead = ahead and gathered_period(blocks, *ahead(blocks, period))
        chunk = Chunk(self._config, kind.stack, 1, is_training)
        mine = _period_params(kind.stack, blocks, dense, bank, period)

        def microbatch(_, item):
            number, message = item
            op = _op(kind, number, period)
            batch, key = microbatch_of(inputs, op)
            message, stats = chunk(mine, shared, batch, message, op, key=key)
            chosen_BLJS = None
            if is_training and self._replaying is not None and stats is not None:
                chosen_BLJS = jnp.moveaxis(stats.choices[0].expert_BLS, 0, 2)
            return None, (message["x_BLD"], self._used(stats), stats, chosen_BLJS)

        items = jnp.arange(message["x_BLD"].shape[0]), message
        _, (x_MBLD, used_MJE, stats, chosen_MBLJS) = jax.lax.scan(microbatch, None, items)
        stats = None if is_training else jax.tree.map(lambda leaf: leaf[0], stats)
        message = constrain_named({"x_BLD": x_MBLD})
        return message, whole(jnp.any(used_MJE, axis=0)), stats, ahead, chosen_MBLJS

    def _neighbour(self, kind: Kind, way: int):
        """The number of the period after (`way` 1) or before (-1); None if there is none.

        Returns:
            A function of blocks and the period's number that returns the stack and the number.
        """
        names, stack = stack_names(self._config), kind.stack
        if not (kind.is_last if way == 1 else kind.is_first):
            return lambda blocks, period: (stack, period + way)
        other = names.index(stack) + way
        if not 0 <= other < len(names):
            return None
        return lambda blocks, period: (
            names[other],
            0 if way == 1 else jax.tree.leaves(blocks[names[other]])[0].shape[0] - 1,
        )

    def _used(self, stats: RoutingStats | None):
        """`used_JE` of some layers; not from their load, which ignores rerouted tokens."""
        E = self._config.switch.num_experts
        if stats is None:
            return jnp.zeros((0, E), bool)
        (choices,) = stats.choices  # of tokens that chose none: E, which is dropped
        J = len(choices.expert_BLS)
        expert_JX = choices.expert_BLS.reshape(J, -1)
        used_JE = jnp.zeros((J, E), bool)
        return used_JE.at[jnp.arange(J)[:, None], expert_JX].set(True, mode="drop")

    def backward(
        self,
        kind: Kind,
        blocks,
        dense,
        bank,
        shared,
        inputs,
        message,
        period,
        d_message,
        d_blocks,
        d_shared,
        scale,
        chosen_MBLJS,
    ):
        """The gradient of the input, the sums with this period's gradients, and the bank's.

        Args:
            dense: as in `forward`; the dense parameters of the period before are returned last.
            d_message: gradient of the output.
            d_blocks: gradients of the whole stack's blocks; this period's part of them is
                written.
            d_shared: gradients of the shared parameters, summed over periods; this period's are
                added.
            chosen_MBLJS: the choices of forward, or None. If recomputed, a near tie might be
                decided differently, for an expert that is not in the bank.
        """
        ahead = self._neighbour(kind, -1)
        ahead = ahead and gathered_period(blocks, *ahead(blocks, period))
        config = self._config if chosen_MBLJS is None else self._replaying
        lane = stack_lane(config, self._loss, kind.stack, 1, None)
        mine = _period_params(kind.stack, blocks, dense, bank, period)

        def differentiated(number, message, d_message, chosen_BLJS):
            op = _op(kind, number, period)
            given = self._with_choices(kind.stack, blocks, inputs, chosen_BLJS)
            (d_mine, d_shared, d_message), result, of_head = differentiate(
                lane, mine, shared, given, message, op, d_message, scale
            )
            sums = d_shared, result.total
            if of_head is not None:
                sums = jax.tree.map(jnp.add, sums, of_head)
            grads = constrain_params((d_mine, sums[0]))
            return (*grads, result.measured, sums[1]), d_message

        def microbatch(total, item):
            added, d_message = differentiated(*item)
            return jax.tree.map(jnp.add, total, added), d_message

        items = jnp.arange(message["x_BLD"].shape[0]), message, d_message, chosen_MBLJS
        example, _ = jax.eval_shape(differentiated, *jax.tree.map(lambda x: x[0], items))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), example)
        total = zeros[0], d_shared, *zeros[2:]
        (d_mine, d_shared, stats, (value, sums)), d_message = jax.lax.scan(
            microbatch, total, items
        )
        leaves = tree.named_leaves({kind.stack: {BLOCKS: d_mine}})
        d_bank = constrain_params({name: leaves.pop(name)[0] for name in bank})
        d_dense = tree.nested(leaves)[kind.stack][BLOCKS]
        d_blocks = jax.tree.map(
            lambda stack, own: jax.lax.dynamic_update_slice_in_dim(stack, own, period, 0),
            d_blocks,
            d_dense,
        )
        d_blocks, d_shared = constrain_params((d_blocks, d_shared))
        squares = sum(
            (jnp.sum(jnp.square(g.astype(jnp.float32))) for g in d_bank.values()),
            jnp.zeros((), jnp.float32),
        )
        measured = Measured(stats, value, sums, squares)
        return constrain_named(d_message), d_blocks, d_shared, d_bank, measured, ahead

    def _with_choices(self, stack: str, blocks, inputs, chosen_BLJS):
        """The inputs with a period's choices in place of every period's; it reads only its
        own."""
        if chosen_BLJS is None:
            return inputs
        M = inputs["rows"][f"{stack}_segment_ids"].shape[1]
        B, L, J, S = chosen_BLJS.shape
        repeats = jax.tree.leaves(blocks[stack])[0].shape[0]
        of_all = jnp.broadcast_to(
            chosen_BLJS[:, None, :, None], (B, M, L, repeats, J, S)
        ).reshape(B, M, L, repeats * J, S)
        return inputs | {"rows": inputs["rows"] | {stack + SUFFIX: of_all}}


def _replaying(config: ModelConfig) -> ModelConfig | None:
    """The model with routers that take given choices; None if choices cannot be given."""
    switch = config.switch
    if switch is None or switch.has_attention:
        return None
    if switch.router.kind != "top_k" or switch.router.overflow == "reroute":
        return None
    may_drop = switch.router.overflow != "dropless"
    router = dataclasses.replace(switch.router, replay=True, replay_drops=may_drop)
    return dataclasses.replace(config, switch=dataclasses.replace(switch, router=router))


def gathered_period(blocks, stack: str, period):
    """The dense parameters `[1, ...]` of a period with all of D on each device; None if no
    device has slices of D, and a period takes its own as they are."""
    # Sliced first, then gathered: XLA would gather the slices of all periods.
    return gathered_params(constrain_params(_slices(blocks[stack], period)))


def _slices(blocks, period):
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, period, 1), blocks)


def _period_params(stack: str, blocks, dense, bank: Bank, period) -> dict[str, Any]:
    """The parameters `[1, ...]` of one period: its slices of the stack's, and its experts."""
    own = _slices(blocks[stack], period) if dense is None else dense
    leaves = tree.named_leaves({stack: {BLOCKS: own}})
    leaves |= {name: leaf[None] for name, leaf in bank.items()}
    return tree.nested(leaves)[stack][BLOCKS]


def _op(kind: Kind, microbatch, period) -> Op:
    """A period of a microbatch, as the only one of a tick."""
    return Op(
        microbatch=microbatch,
        chunk=0,
        slot=0,
        chunk_in_stack=period,
        is_active=True,
        is_first=kind.is_first,
        is_last=kind.is_last,
        any_active=True,
        any_first=kind.is_first,
        any_last=kind.is_last,
        last_microbatch=microbatch,
    )
