# SPDX-License-Identifier: Apache-2.0
"""The gradients of a training step, one period at a time.

SE-MoE (Shen et al. 2022, arXiv:2205.10034), section 2.2: no more than a few layers' experts are
on the device. The loss, the microbatches and the keys are those of `training/step.py`, the
chunks and their objective those of a pipeline (`stack_lane`), so the gradients are the same.

Forward goes period by period, all microbatches of a period together, and keeps the periods'
inputs, as remat `full` does. The experts of a period are fetched before its router has chosen:
the experts that were chosen recently, with zeros in place of all others. The router's choices
are read one period late, while the next period computes. If an expert was absent, it is
fetched, and this period and the later ones are computed again: a wrong guess costs time and
changes no number.
Backward recomputes each period from its input, with just the experts that forward used, and
gives its routers what they chose then: a near tie might be decided differently.

Dims: B batch, L length, D model, M microbatches (in `message_shapes`: memory), J Switch layers
of a period, E experts, S choices of a token, X choices of all tokens
"""

import functools
from typing import Protocol

import jax
import numpy as np

from switchx.models.config import ModelConfig
from switchx.models.stages import (
    Period,
    join_blocks,
    model_periods,
    split_blocks,
    stack_names,
)
from switchx.storage.cache import BACKWARD, FORWARD
from switchx.training.losses import LossConfig
from switchx.training.offload.disk_periods import Bank, Kind, PeriodPrograms


class ExpertBanks(Protocol):
    """The source of a period's experts, and the receiver of their gradients.

    A bank has the parameters of all experts of a period's Switch layers by path, `[E, ...]`,
    with zeros for experts that are not used. `used_JE` is true for those that are.
    """

    def expected(self, period: Period) -> np.ndarray:
        """`used_JE` of a period before its routers have chosen."""

    def prefetch(self, period: Period, sweep: int, used_JE: np.ndarray) -> None:
        """Begins to read the experts that `fetch` will return, without waiting for them."""

    def fetch(self, period: Period, sweep: int, used_JE: np.ndarray) -> Bank:
        """The bank, on the device."""

    def keep_gradients(self, period: Period, used_JE: np.ndarray, bank: Bank) -> None:
        """Takes the gradients of a bank; those of experts that are not used are zero."""


class LayeredGradients:
    """Gradients and evaluation of a model whose experts are not all on the devices.

    Attributes:
        periods: the model's periods, first to last.
        token_sums: function that returns the token sums of an evaluation from the decoder's
            last activations (`PeriodPrograms.token_sums`).
    """

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
            slots: periods whose experts may be on the device at once, at least 2.
        """
        self._config = config
        self._slots = slots
        self.periods = model_periods(config)
        programs = PeriodPrograms(config, loss, num_microbatches)
        jit = functools.partial(jax.jit, compiler_options=compiler_options)
        self._begin = jit(programs.begin)
        self._begin_eval = jit(programs.begin_eval)
        self._end_eval = jit(programs.end_eval)
        self._zeros = jit(programs.zeros)
        self._forward = jit(programs.forward, static_argnums=(0, 1))
        self._backward = jit(programs.backward, static_argnums=0, donate_argnums=(8, 9, 10))
        self._link = jit(programs.link)
        self._link_back = jit(programs.link_back)
        self.token_sums = programs.token_sums

    def gradients(self, dense: dict, batch: dict, banks: ExpertBanks, *, key, loss_scale=1.0):
        """Raw gradients of `loss_scale` times the loss over the whole batch.

        Args:
            dense: all parameters except those of experts.
            banks: source of the experts, which receives their gradients.

        Returns:
            gradients of `dense`, and what each period measured (`joined` adds it up).
        """
        inputs, message, first = self._begin(self._split(dense)[0], batch, key)
        *forward, _ = self._forward_sweep(
            banks, dense, inputs, message, first, is_training=True
        )
        return self._backward_sweep(banks, dense, inputs, *forward, loss_scale)

    def evaluate(self, dense: dict, batch: dict, banks: ExpertBanks):
        """The decoder's last activations `[B, L, D]`, without randomness and at the capacity of
        evaluation, and the statistics of all Switch layers (None for none)."""
        inputs, message, first = self._begin_eval(self._split(dense)[0], batch)
        messages, *_, stats = self._forward_sweep(
            banks, dense, inputs, message, first, is_training=False
        )
        of_stack: dict[str, list] = {name: [] for name in stack_names(self._config)}
        for period, each in zip(self.periods, stats, strict=True):
            of_stack[period.stack].append(each)
        return self._end_eval(messages[-1], of_stack)

    # The order of periods.

    def _forward_sweep(
        self, banks: ExpertBanks, dense, inputs, message, first, *, is_training: bool
    ):
        """Inputs of all periods and the output of the last; `used_JE` and choices of all
        periods; the dense parameters of the last (`first` has those of the first), gathered;
        statistics."""
        periods, (blocks, shared) = self.periods, self._split(dense)
        used = [banks.expected(period) for period in periods]
        messages, choices = [message], [None] * len(periods)
        chosen, stats = [None] * len(periods), [None] * len(periods)
        held: dict[int, Bank] = {}
        gathered = {0: first}
        number, unchecked = 0, None
        while number < len(periods) or unchecked is not None:
            if number < len(periods):
                period = periods[number]
                end = min(number + self._slots - 1, len(periods))
                self._hold(held, banks, FORWARD, used, range(number, end))
                if end < len(periods):
                    banks.prefetch(periods[end], FORWARD, used[end])
                (
                    message,
                    chosen[number],
                    stats[number],
                    gathered[number + 1],
                    choices[number],
                ) = self._forward(
                    Kind.of(period),
                    is_training,
                    blocks,
                    gathered[number],
                    held.pop(number),
                    shared,
                    inputs,
                    messages[number],
                    np.int32(period.number),
                )
                if period.is_last and number + 1 < len(periods):
                    message = self._link(inputs["rows"], message)
                messages[number + 1 :] = [messages[number] | message]
            if unchecked is not None:
                chosen_JE = np.asarray(chosen[unchecked])  # waits for that period
                if np.any(chosen_JE & ~used[unchecked]):
                    used[unchecked] = used[unchecked] | chosen_JE
                    held.clear()
                    number, unchecked = unchecked, None
                    continue
                if number < len(periods):
                    del gathered[unchecked]
            unchecked = number if number < len(periods) else None
            number += 1
        used = [np.asarray(each) for each in chosen]
        return messages, used, choices, gathered[len(periods) - 1], stats

    def _backward_sweep(
        self, banks: ExpertBanks, dense, inputs, messages, used, choices, last, scale
    ):
        """See `gradients`; `last` has the dense parameters of the last period, gathered."""
        blocks, shared = self._split(dense)
        d_blocks, d_shared, d_message = self._zeros(blocks, shared, messages.pop())
        held: dict[int, Bank] = {}
        results, kept, gathered = [], None, last
        for number in reversed(range(len(self.periods))):
            period = self.periods[number]
            end = max(number - self._slots + 1, -1)
            self._hold(held, banks, BACKWARD, used, range(number, end, -1))
            if end >= 0:
                banks.prefetch(self.periods[end], BACKWARD, used[end])
            d_message, d_blocks[period.stack], d_shared, d_bank, result, gathered = (
                self._backward(
                    Kind.of(period),
                    blocks,
                    gathered,
                    held.pop(number),
                    shared,
                    inputs,
                    messages.pop(),
                    np.int32(period.number),
                    d_message,
                    d_blocks[period.stack],
                    d_shared,
                    scale,
                    choices.pop(),
                )
            )
            results.insert(0, result)
            if period.is_first and number > 0:
                d_message = self._link_back(inputs["rows"], messages[-1], d_message)
            if kept is not None:
                banks.keep_gradients(*kept)  # waits for that period, while this one computes
            kept = period, used[number], d_bank
        banks.keep_gradients(*kept)
        names = stack_names(self._config)
        return join_blocks(self._config, tuple(d_blocks[n] for n in names), d_shared), results

    def _hold(self, held, banks, sweep: int, used, numbers) -> None:
        """Fetches the banks of these periods, unless they are held already."""
        for number in numbers:
            if number not in held:
                held[number] = banks.fetch(self.periods[number], sweep, used[number])

    def _split(self, dense):
        blocks, shared = split_blocks(self._config, dense)
        return dict(zip(stack_names(self._config), blocks, strict=True)), shared
