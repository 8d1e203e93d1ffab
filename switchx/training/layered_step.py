# SPDX-License-Identifier: Apache-2.0
"""The gradients of a training step, one run of blocks at a time.

SE-MoE (Shen et al. 2022, arXiv:2205.10034), section 2.2: no more than a few layers' experts are
on the device. The loss, the microbatches and the keys are those of `training/step.py`, the
chunks and their objective those of a pipeline (`stack_lane`), so the gradients are the same.

Forward goes run by run, all microbatches of a run together, and keeps the runs' inputs, as
remat `full` does. The experts of a run are fetched before its router has chosen: those that
were chosen lately, with zeros in the place of all others. What the router chose is looked at
one run late, while the next one computes. Where an expert was absent, it is fetched and the run
and what followed are computed again: a wrong guess costs time and changes no number. Backward
computes each run again from its input, with just the experts that forward used.

Dims: B batch, L length, D model, M microbatches (in `message_shapes`: memory), J Switch layers
of a run, E experts, S choices of a token, X choices of all tokens
"""

import dataclasses
import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from switchx import tree
from switchx.models.config import ModelConfig
from switchx.models.stages import (
    BLOCKS,
    Chunk,
    Run,
    join_blocks,
    link_stacks,
    message_shapes,
    model_runs,
    split_blocks,
    stack_names,
)
from switchx.moe.stats import RoutingStats, join_stacks
from switchx.partitioning.pipeline import Op, differentiate
from switchx.storage.cache import BACKWARD, FORWARD
from switchx.training.losses import (
    LossConfig,
    TokenSums,
    into_microbatches,
    loss_denominators,
)
from switchx.training.pipelined import microbatch_of, stack_lane

Bank = dict[str, jax.Array]


class ExpertBanks(Protocol):
    """Where the experts of a run come from, and where their gradients go.

    A bank has the parameters of all experts of a run's Switch layers by path, `[E, ...]`, zeros
    for those that are not used. `used_JE` says who is.
    """

    def expected(self, run: Run) -> np.ndarray:
        """`used_JE` of a run before its routers have chosen."""

    def prefetch(self, run: Run, sweep: int, used_JE: np.ndarray) -> None:
        """Begins to read what `fetch` will be asked for; returns before it is there."""

    def fetch(self, run: Run, sweep: int, used_JE: np.ndarray) -> Bank:
        """The bank, on the device."""

    def keep_gradients(self, run: Run, used_JE: np.ndarray, bank: Bank) -> None:
        """Takes the gradients of a bank; those of experts that are not used are zero."""


class Kind(NamedTuple):
    """What the program of a run depends on."""

    stack: str
    is_first: bool
    is_last: bool

    @classmethod
    def of(cls, run: Run) -> "Kind":
        return cls(run.stack, run.is_first, run.is_last)


class Measured(NamedTuple):
    """What a run adds to a step.

    Attributes:
        stats: of its Switch layers `[J, ...]`, summed over microbatches; None without any.
        value, sums: its part of the loss, and of the token sums.
        squares: sum of the squares of its experts' gradients, in an order that shapes give.
    """

    stats: RoutingStats | None
    value: jax.Array
    sums: TokenSums
    squares: jax.Array


def joined(results: list[Measured]):
    """The loss, token sums, routing statistics and squares of all runs, first to last."""
    sums = [(each.value, each.sums, each.squares) for each in results]
    value, sums, squares = functools.reduce(functools.partial(jax.tree.map, jnp.add), sums)
    return value, sums, stacked([each.stats for each in results]), squares


def stacked(stats: list[RoutingStats | None]) -> RoutingStats | None:
    """Statistics of all layers, from those of some layers each; None where there are none."""
    found = [each for each in stats if each is not None]
    if not found:
        return None
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *found)


class LayeredGradients:
    """Gradients and evaluation of a model whose experts are not all on the device."""

    def __init__(
        self,
        config: ModelConfig,
        loss: LossConfig,
        num_microbatches: int,
        slots: int,
        compiler_options: dict | None = None,
    ):
        """Traces nothing yet.

        Args:
            slots: runs whose experts may be on the device at once, at least 2.
        """
        # Backward computes a run again as it is; remat would do so within it once more.
        self._config = dataclasses.replace(config, remat="none")
        self._loss, self._num_microbatches, self._slots = loss, num_microbatches, slots
        self.runs = model_runs(config)
        jit = functools.partial(jax.jit, compiler_options=compiler_options)
        self._begin = jit(self._begin_batch)
        self._begin_eval = jit(self._begin_eval_batch)
        self._zeros = jit(functools.partial(jax.tree.map, jnp.zeros_like))
        self._forward = jit(self._run_forward, static_argnums=(0, 1))
        self._backward = jit(self._run_backward, static_argnums=0, donate_argnums=(7, 8, 9))
        self._link = jit(self._link_stacks)
        self._link_back = jit(self._transposed_link)

    def gradients(self, dense: dict, batch: dict, banks: ExpertBanks, *, key, loss_scale=1.0):
        """Raw gradients of `loss_scale` times the loss over the whole batch.

        Args:
            dense: all parameters but those of experts.
            banks: gets the gradients of those.

        Returns:
            gradients of `dense`, and what each run measured (`joined` adds it up).
        """
        inputs, message = self._begin(batch, key)
        messages, used, _ = self._forward_sweep(banks, dense, inputs, message, True)
        scale = jnp.asarray(loss_scale, jnp.float32)
        return self._backward_sweep(banks, dense, inputs, messages, used, scale)

    def evaluate(self, dense: dict, batch: dict, banks: ExpertBanks):
        """The decoder's last activations `[B, L, D]`, without randomness and at the capacity of
        evaluation, and the statistics of all Switch layers (None for none)."""
        inputs, message = self._begin_eval(batch)
        messages, _, stats = self._forward_sweep(banks, dense, inputs, message, False)
        of_stack: dict[str, list] = {name: [] for name in stack_names(self._config)}
        for run, each in zip(self.runs, stats, strict=True):
            of_stack[run.stack].append(each)
        stats = join_stacks(*map(stacked, (of_stack.get("encoder", []), of_stack["decoder"])))
        return messages[-1]["x_BLD"][0], stats

    def logits(self, dense: dict, x_BLD):
        """Logits `[B, L, V]` from the decoder's last activations of an evaluation."""
        _, shared = split_blocks(self._config, dense)
        return Chunk(self._config, "decoder", 1, is_training=False).logits(shared, x_BLD)

    # The order of runs.

    def _forward_sweep(self, banks: ExpertBanks, dense, inputs, message, is_training: bool):
        """Inputs of all runs and the output of the last, `used_JE` and statistics of all."""
        runs, (blocks, shared) = self.runs, self._split(dense)
        used = [banks.expected(run) for run in runs]
        messages, chosen, stats = [message], [None] * len(runs), [None] * len(runs)
        held: dict[int, Bank] = {}
        number, unchecked = 0, None
        while number < len(runs) or unchecked is not None:
            if number < len(runs):
                run, end = runs[number], min(number + self._slots - 1, len(runs))
                self._hold(held, banks, FORWARD, used, range(number, end))
                if end < len(runs):
                    banks.prefetch(runs[end], FORWARD, used[end])
                message, chosen[number], stats[number] = self._forward(
                    Kind.of(run),
                    is_training,
                    blocks[run.stack],
                    held.pop(number),
                    shared,
                    inputs,
                    messages[number],
                    np.int32(run.place),
                )
                if run.is_last and number + 1 < len(runs):
                    message = self._link(inputs["rows"], message)
                messages[number + 1 :] = [messages[number] | message]
            if unchecked is not None:
                chosen_JE = np.asarray(chosen[unchecked])  # waits for that run
                if np.any(chosen_JE & ~used[unchecked]):
                    used[unchecked] = used[unchecked] | chosen_JE
                    held.clear()
                    number, unchecked = unchecked, None
                    continue
            unchecked = number if number < len(runs) else None
            number += 1
        return messages, [np.asarray(each) for each in chosen], stats

    def _backward_sweep(self, banks: ExpertBanks, dense, inputs, messages, used, scale):
        """See `gradients`."""
        blocks, shared = self._split(dense)
        d_blocks, d_shared, d_message = self._zeros((blocks, shared, messages.pop()))
        held: dict[int, Bank] = {}
        results, kept = [], None
        for number in reversed(range(len(self.runs))):
            run, end = self.runs[number], max(number - self._slots + 1, -1)
            self._hold(held, banks, BACKWARD, used, range(number, end, -1))
            if end >= 0:
                banks.prefetch(self.runs[end], BACKWARD, used[end])
            d_message, d_blocks[run.stack], d_shared, d_bank, result = self._backward(
                Kind.of(run),
                blocks[run.stack],
                held.pop(number),
                shared,
                inputs,
                messages.pop(),
                np.int32(run.place),
                d_message,
                d_blocks[run.stack],
                d_shared,
                scale,
            )
            results.insert(0, result)
            if run.is_first and number > 0:
                d_message = self._link_back(inputs["rows"], messages[-1], d_message)
            if kept is not None:
                banks.keep_gradients(*kept)  # waits for that run, while this one computes
            kept = run, used[number], d_bank
        banks.keep_gradients(*kept)
        names = stack_names(self._config)
        return join_blocks(self._config, tuple(d_blocks[n] for n in names), d_shared), results

    def _hold(self, held, banks, sweep: int, used, numbers) -> None:
        """Fetches the banks of these runs, unless they are there."""
        for number in numbers:
            if number not in held:
                held[number] = banks.fetch(self.runs[number], sweep, used[number])

    def _split(self, dense):
        blocks, shared = split_blocks(self._config, dense)
        return dict(zip(stack_names(self._config), blocks, strict=True)), shared

    # What is compiled.

    def _begin_batch(self, batch, key):
        """What all runs read, and the input of the first one, which it does not read."""
        M = self._num_microbatches
        rows = into_microbatches(self._config, batch, M)
        inputs = {
            "rows": rows,
            "keys": key[None] if M == 1 else jax.random.split(key, M),
            "denominators": loss_denominators(self._config, batch, M),
        }
        return inputs, self._first_message(rows)

    def _begin_eval_batch(self, batch):
        rows = jax.tree.map(lambda x: x[:, None], batch)
        return {"rows": rows, "keys": None}, self._first_message(rows)

    def _first_message(self, rows):
        shapes = self._message(stack_names(self._config)[0], rows)
        M = jax.tree.leaves(rows)[0].shape[1]
        return {name: jnp.zeros((M, *x.shape), x.dtype) for name, x in shapes.items()}

    def _message(self, stack: str, rows):
        return message_shapes(self._config, stack, jax.tree.map(lambda x: x[:, 0], rows))

    def _link_stacks(self, rows, message):
        return jax.vmap(link_stacks(self._message("decoder", rows)))(message)

    def _transposed_link(self, rows, message, d_linked):
        _, transpose = jax.vjp(functools.partial(self._link_stacks, rows), message)
        return transpose(d_linked)[0]

    def _run_forward(
        self, kind: Kind, is_training: bool, blocks, bank, shared, inputs, message, place
    ):
        """Activations `[M, B, L, D]`, `used_JE` by all microbatches, and, in evaluation, the
        statistics of the one that it has."""
        chunk = Chunk(self._config, kind.stack, 1, is_training)
        mine = _run_blocks(kind.stack, blocks, bank, place)

        def microbatch(_, item):
            number, message = item
            op = _op(kind, number, place)
            batch, key = microbatch_of(inputs, op)
            message, stats = chunk(mine, shared, batch, message, op, key=key)
            return None, (message["x_BLD"], self._used(stats), stats)

        items = jnp.arange(message["x_BLD"].shape[0]), message
        _, (x_MBLD, used_MJE, stats) = jax.lax.scan(microbatch, None, items)
        stats = None if is_training else jax.tree.map(lambda leaf: leaf[0], stats)
        return {"x_BLD": x_MBLD}, jnp.any(used_MJE, axis=0), stats

    def _used(self, stats: RoutingStats | None):
        """`used_JE` of some layers: not their load, which knows nothing of rerouted tokens."""
        E = self._config.switch.num_experts
        if stats is None:
            return jnp.zeros((0, E), bool)
        (choices,) = stats.choices  # of tokens that chose none: E, which is dropped
        J = len(choices.expert_BLS)
        expert_JX = choices.expert_BLS.reshape(J, -1)
        used_JE = jnp.zeros((J, E), bool)
        return used_JE.at[jnp.arange(J)[:, None], expert_JX].set(True, mode="drop")

    def _run_backward(
        self,
        kind: Kind,
        blocks,
        bank,
        shared,
        inputs,
        message,
        place,
        d_message,
        d_blocks,
        d_shared,
        scale,
    ):
        """The gradient of the input, the sums with this run's gradients, and the bank's.

        Args:
            d_message: gradient of the output.
            d_blocks: of the whole stack; this run's part is written.
            d_shared: sum over runs; this run's is added.
        """
        lane = stack_lane(self._config, self._loss, kind.stack, 1, None)
        mine = _run_blocks(kind.stack, blocks, bank, place)

        def differentiated(number, message, d_message):
            op = _op(kind, number, place)
            (d_mine, d_shared, d_message), result = differentiate(
                lane, mine, shared, inputs, message, op, d_message, scale
            )
            return (d_mine, d_shared, result.measured, result.total), d_message

        def microbatch(total, item):
            added, d_message = differentiated(*item)
            return jax.tree.map(jnp.add, total, added), d_message

        items = jnp.arange(message["x_BLD"].shape[0]), message, d_message
        example, _ = jax.eval_shape(differentiated, *jax.tree.map(lambda x: x[0], items))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), example)
        total = zeros[0], d_shared, *zeros[2:]
        (d_mine, d_shared, stats, (value, sums)), d_message = jax.lax.scan(
            microbatch, total, items
        )
        leaves = tree.named_leaves({kind.stack: {BLOCKS: d_mine}})
        d_bank = {name: leaves.pop(name)[0] for name in bank}
        d_dense = tree.nested(leaves)[kind.stack][BLOCKS]
        d_blocks = jax.tree.map(
            lambda all_runs, own: jax.lax.dynamic_update_slice_in_dim(all_runs, own, place, 0),
            d_blocks,
            d_dense,
        )
        squares = sum(
            (jnp.sum(jnp.square(g.astype(jnp.float32))) for g in d_bank.values()),
            jnp.zeros((), jnp.float32),
        )
        return d_message, d_blocks, d_shared, d_bank, Measured(stats, value, sums, squares)


def _run_blocks(stack: str, blocks, bank: Bank, place) -> dict[str, Any]:
    """The parameters `[1, ...]` of one run: its slices of the stack's, and its experts."""
    own = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, place, 1), blocks)
    leaves = tree.named_leaves({stack: {BLOCKS: own}})
    leaves |= {name: leaf[None] for name, leaf in bank.items()}
    return tree.nested(leaves)[stack][BLOCKS]


def _op(kind: Kind, microbatch, place) -> Op:
    """A run of a microbatch, as the only one of a tick."""
    return Op(
        microbatch=microbatch,
        chunk=0,
        slot=0,
        place=place,
        is_active=True,
        is_first=kind.is_first,
        is_last=kind.is_last,
        any_active=True,
        any_first=kind.is_first,
        any_last=kind.is_last,
    )
