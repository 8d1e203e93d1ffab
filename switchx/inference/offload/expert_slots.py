# SPDX-License-Identifier: Apache-2.0
"""The slots of one Switch layer on the device: who is in them, and products with their bank.

Dims: R rows, D model, E experts, S choices of a row, K slots of a layer
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.sorted_rows import rows_of_groups
from switchx.inference.offload.expert_source import ExpertSource, Weights
from switchx.inference.quantize import native
from switchx.models.config import ModelConfig
from switchx.moe.dropless import sort_into_rows
from switchx.moe.experts import WEIGHTS, ExpertFFN
from switchx.moe.router import router_logits, router_scores
from switchx.moe.routing_plan import choice_scores
from switchx.storage.cache import Cache, Moment


class LayerSlots:
    """The slots of one Switch layer, and the experts in them.

    `cache` decides which experts get a slot; `_slot_E` says which experts are in one. They
    differ where an expert's read failed before it was moved: it is moved when it is requested
    again.

    Attributes:
        bank: the experts on the device, `[K, ...]`.
        num_requested, ..., num_correct: see `ExpertTraffic`.
    """

    def __init__(
        self, config: ModelConfig, source: ExpertSource, layer: int, slots: int, policy
    ):
        self._config = slotted(config)
        self._source, self._layer, self.cache = source, layer, Cache(slots, policy)
        self.num_experts = config.switch.num_experts
        self.bank = _empty_bank(source.like, slots)
        self.num_requested = self.num_hits = self.num_predicted = self.num_correct = 0
        self.moved_bytes = self.num_rounds = 0
        self._predicted = np.empty(0, np.int64)
        self._slot_E = np.full(self.num_experts, slots, np.int32)  # K: in none
        self._free = list(range(slots))

    def rounds(self, chosen: np.ndarray) -> list[np.ndarray]:
        """Parts of at most K experts; resident experts come first, before they are evicted."""
        K = self.cache.capacity
        is_absent = self._slot_E[chosen] == K
        chosen = chosen[np.argsort(is_absent, kind="stable")]
        return [chosen[first : first + K] for first in range(0, len(chosen), K)]

    def run_round(self, experts: np.ndarray, moment: Moment, x_RD, count_E, y_RD):
        """`y_RD` with the rows of these experts, of rows sorted by expert."""
        missed = self._admit(experts, moment)
        self.num_requested += len(experts)
        self.num_hits += len(experts) - len(missed)
        self._source.request(self._layer, missed, moment)
        self._move(missed)
        slot_E = np.full_like(self._slot_E, self.cache.capacity)
        slot_E[experts] = self._slot_E[experts]
        self.num_rounds += 1
        return _run_round(self._config, self.bank, x_RD, count_E, slot_E, y_RD)

    def prefetch(self, count_E: np.ndarray, moment: Moment) -> None:
        """Moves experts that the layer may choose next, the likeliest K.

        From files they are read ahead, and those move that host memory has already.

        Args:
            count_E: rows that may choose each.
        """
        order = np.argsort(-count_E, kind="stable")[: self.cache.capacity]
        self._predicted = order[count_E[order] > 0]
        absent = self._predicted[self._slot_E[self._predicted] == self.cache.capacity]
        self._source.request(self._layer, absent, moment._replace(layer=self._layer))
        is_here = [self._source.is_here(self._layer, number) for number in absent.tolist()]
        absent = absent[np.array(is_here, bool)]
        kept = self._predicted[self._slot_E[self._predicted] < self.cache.capacity]
        self._move(self._admit(np.concatenate([kept, absent]), moment))

    def compare(self, chosen: np.ndarray) -> None:
        """Counts how many of the predicted experts were chosen."""
        self.num_predicted += len(self._predicted)
        self.num_correct += int(np.isin(self._predicted, chosen).sum())
        self._predicted = self._predicted[:0]

    def _admit(self, experts: np.ndarray, moment: Moment) -> np.ndarray:
        """Returns the experts that are in no slot, after others were evicted."""
        K = self.cache.capacity
        evicted = self.cache.request(experts, moment._replace(layer=0)).evicted
        self._free += [slot for slot in self._slot_E[evicted].tolist() if slot < K]
        self._slot_E[evicted] = K
        return experts[self._slot_E[experts] == K]

    def _move(self, experts: np.ndarray) -> None:
        """Moves requested ones into free slots; a slot is free until the expert is in it."""
        for number in experts.tolist():
            expert = self._source.expert(self._layer, number)
            self.bank = moved_into(self.bank, expert, np.int32(self._free[-1]))
            self._slot_E[number] = self._free.pop()
            self.moved_bytes += self._source.expert_bytes


def slotted(config: ModelConfig) -> ModelConfig:
    """The configuration as programs with slots are traced with: the same numbers, of layers
    that are not in a scan and experts that run rows."""
    switch = dataclasses.replace(config.switch.with_dispatcher("dropless"), buffer_factor=None)
    return dataclasses.replace(config, switch=switch, remat="none")


@functools.partial(jax.jit, static_argnames="config")
def predicted(config: ModelConfig, w_router_DE, bias_E, x_RD, count_E):
    """Number of rows that would choose each expert, by this router; rows of no expert do
    not count."""
    router = config.switch.router
    logits_GRE = router_logits(x_RD[None], w_router_DE, dtype=config.precision.router)
    score_GRE = router_scores(router.score, logits_GRE)
    score_GRE = choice_scores(router, logits_GRE, score_GRE, bias_E=bias_E)
    _, expert_RS = jax.lax.top_k(score_GRE[0], router.num_selected)
    is_used_R = jnp.arange(len(x_RD)) < jnp.sum(count_E)
    used_RS = jnp.broadcast_to(is_used_R[:, None], expert_RS.shape)
    return jnp.zeros_like(count_E).at[expert_RS].add(used_RS.astype(count_E.dtype))


# An expert is converted whenever it is moved: its channels keep their order.
_ordered = functools.partial(native, in_order=True)


def _empty_bank(expert: Weights, slots: int) -> Weights:
    def zeros(leaf):
        return jnp.zeros((slots, *leaf.shape[1:]), leaf.dtype)

    return jax.tree.map(zeros, jax.eval_shape(_ordered, expert))


@functools.partial(jax.jit, donate_argnames="bank")
def moved_into(bank: Weights, expert: Weights, slot) -> Weights:
    """The bank with an expert `[1, ...]` in a slot."""

    def put(bank_K, new_1):
        return jax.lax.dynamic_update_slice_in_dim(bank_K, new_1, slot, axis=0)

    return jax.tree.map(put, bank, _ordered(expert))


@functools.partial(jax.jit, static_argnames="config", donate_argnames="y_RD")
def _run_round(config: ModelConfig, bank: Weights, x_RD, count_E, slot_E, y_RD):
    """`y_RD` with the rows of those experts that have a slot in this round.

    Args:
        x_RD, count_E: rows sorted by expert.
        slot_E: K where an expert is in none, or not of this round.
    """
    R, K = len(x_RD), jax.tree.leaves(bank)[0].shape[0]
    expert_R, is_used_R = rows_of_groups(count_E, R)
    slot_R = jnp.where(is_used_R, slot_E[expert_R], K)
    rows = sort_into_rows(slot_R, K, rows=R)
    sorted_RD = x_RD.at[rows.choice_R].get(mode="fill", fill_value=0)
    found_RD = run_layer(config, bank, sorted_RD, rows.count_E)
    found_RD = found_RD.at[rows.row_X].get(mode="fill", fill_value=0)
    return jnp.where((slot_R < K)[:, None], found_RD, y_RD)


@functools.partial(jax.jit, static_argnames="config")
def run_layer(config: ModelConfig, weights: Weights, x_RD, count_E):
    """Rows sorted by expert, each through its expert, of those that are on the device."""
    experts = ExpertFFN.of(config, *(weights.get(name) for name in WEIGHTS), key=None)
    return experts.run_rows(x_RD, count_E)
