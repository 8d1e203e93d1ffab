# SPDX-License-Identifier: Apache-2.0
"""Choices that a recorded model would drop at other capacities, groups, orders and meshes.

A choice's slot is the number of earlier choices of the same expert in the queue of its group;
it is dropped where the capacity is no larger. So one histogram of slots has the drops at every
capacity, and a record's ranks (`switchx/routing_record.py`) have the slots at every group size,
number of choices and order. Rerouting (Fedus et al. 2021, arXiv:2101.03961, appendix B) is run
again for each capacity; its drops are nested in the capacity, too.

What follows is exact for layers that read what they read when they were recorded: for the first
Switch layer of an encoder or of a decoder alone. Tokens dropped there change what later layers
read; of them it is a first-order estimate (docs/drops.md has its error by depth). Of a loss it
says nothing.
Dims: B rows, L places of a row, N Switch layers, G groups, T places of a group, S choices,
R ranks, Q choices in the order of a group's queue, E experts, C slots of an expert
"""

import bisect
import contextlib
import dataclasses
import functools
import itertools
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from switchx.analysis.drift import paired_batches
from switchx.fields import check_choices, require, require_at_least
from switchx.moe.balance import expected_drops
from switchx.moe.capacity import layer_capacity, layer_groups
from switchx.moe.config import SwitchConfig
from switchx.routing_record import RecordedBatch, RecordInfo, RoutingRecord, gates, open_record


@dataclasses.dataclass(frozen=True)
class Setting:
    """The way in which choices get slots, all but the capacity factor.

    Attributes:
        switch: the Switch layers: group size, choices of a token, priority, overflow,
            rounding, padding.
        rule: the rule by which batches are cut into groups. `switchx`: by `group_size`, each
            microbatch alone. `flaxformer`: groups of at most `group_size` places whose number
            the experts and their replicas on `ranks` devices divide; its capacity does not
            count a token's further choices. `megatron`: each rank's microbatch is one group,
            and all choices of an expert compete alike: those with the largest gates win
            (its drop policy `probs`; priority `gate`), or the first ones (`position`, where
            Megatron leaves open which win).
        ranks: devices over which the rows of a batch are split; `switchx` does not ask.
        microbatches: parts of a batch that are routed one after another.
    """

    switch: SwitchConfig
    rule: Literal["switchx", "flaxformer", "megatron"] = "switchx"
    ranks: int = 1
    microbatches: int = 1

    def __post_init__(self):
        check_choices(self)
        require_at_least(self, 1, "ranks", "microbatches")
        require(
            self.rule == "switchx" or not self.is_rerouting,
            f"Setting.rule={self.rule!r} with overflow='reroute', which {self.rule} does not "
            "have; use overflow='drop'",
        )

    @property
    def is_rerouting(self) -> bool:
        return self.switch.router.overflow == "reroute"

    @property
    def num_choices(self) -> int:
        """S, the experts that one token gets at most."""
        return self.switch.router.num_selected

    @property
    def num_ranks(self) -> int:
        """The ranks that are read: choices, or the experts that rerouting tries."""
        return self.switch.num_ranks

    def capacity(self, tokens_per_group: int, factor: float | None) -> int:
        """C; `factor` None takes what the Switch layers say of evaluation."""
        if factor is None:
            return layer_capacity(self.switch, tokens_per_group, is_training=False)
        if self.rule == "flaxformer":
            factor /= self.num_choices
        switch = dataclasses.replace(
            self.switch, eval_capacity_factor=factor, expert_capacity=None
        )
        return layer_capacity(switch, tokens_per_group, is_training=False)

    def factor(self, tokens_per_group: int, capacity: int) -> float:
        """The factor that gives a group exactly so many slots of an expert."""
        choices = 1 if self.rule == "flaxformer" else self.num_choices
        return capacity * self.switch.num_candidates / (tokens_per_group * choices)

    def groups(self, batch_size: int, length: int) -> tuple[int, int, int]:
        """(parts, G, T): parts that are cut apart, and the groups of each.

        Raises:
            ValueError: the batch has no such parts or groups.
        """
        parts = self.microbatches * (self.ranks if self.rule == "megatron" else 1)
        require(
            batch_size % parts == 0,
            f"{batch_size} rows do not divide into {parts} parts (ranks={self.ranks}, "
            f"microbatches={self.microbatches}); use divisors of {batch_size}",
        )
        rows = batch_size // parts
        if self.rule == "megatron":
            return parts, 1, rows * length
        if self.rule == "flaxformer":
            return parts, *self._flaxformer_groups(rows * length)
        return parts, *layer_groups(self.switch, rows, length)

    def _flaxformer_groups(self, num_tokens: int) -> tuple[int, int]:
        """The fewest groups that the experts' places divide and that divide the tokens."""
        E = self.switch.num_experts
        places = E * max(1, self.ranks // E)
        least = max(num_tokens // self.switch.group_size, places)
        first = math.ceil(least / places) * places
        for G in range(first, num_tokens + 1, places):
            if num_tokens % G == 0:
                return G, num_tokens // G
        raise ValueError(
            f"rule='flaxformer': {num_tokens} tokens have no equal groups whose number "
            f"{places} divides ({E} experts on {self.ranks} devices); use other ranks or "
            "microbatches"
        )


def setting_of(
    info: RecordInfo,
    *,
    group_size: int | None = None,
    num_selected: int | None = None,
    priority: Literal["position", "gate"] | None = None,
    rounds: int | None = None,
    rule: Literal["switchx", "flaxformer", "megatron"] = "switchx",
    ranks: int = 1,
    microbatches: int = 1,
) -> Setting:
    """A record's own setting with changes; where nothing was dropped, with `overflow="drop"`.

    Args:
        group_size: places routed together; None keeps the groups.
        num_selected: S; None keeps it.
        priority: order of the choices; None keeps it, with `rule="megatron"` takes `gate`.
        rounds: experts that a token without a slot tries, 1 for none but its first.
        rule, ranks, microbatches: see `Setting`.

    Raises:
        ValueError: the router cannot be replayed, ranks were not recorded that this needs, or
            the settings do not go together.
    """
    switch, router = info.switch, info.switch.router
    require(
        router.kind != "expert_choice",
        "RouterConfig.kind='expert_choice': its experts choose tokens by all probabilities, "
        "which a record does not have; record a model whose tokens choose (kind='top_k')",
    )
    require(
        not router.replay,
        "RouterConfig.replay=True: the recorded drops are those of given choices, not of this "
        "router's ranks; give the record whose choices were replayed",
    )
    S = num_selected or router.num_selected
    overflow, tried = router.overflow, router.max_rounds
    if rounds is not None:
        overflow, tried = ("reroute" if rounds > 1 else "drop"), rounds
    elif overflow == "dropless" or S > 1 or rule != "switchx":
        overflow = "drop"
    router = dataclasses.replace(
        router,
        num_selected=S,
        gate=router.gate if S > 1 else "softmax",
        priority=priority or ("gate" if rule == "megatron" else router.priority),
        overflow=overflow,
        max_rounds=tried,
        balance_counts="first_choice",
    )
    if group_size is not None or rule != "switchx":
        switch = dataclasses.replace(switch, expert_capacity=None)
    switch = dataclasses.replace(
        switch, router=router, group_size=group_size or switch.group_size
    )
    setting = Setting(switch, rule, ranks, microbatches)
    _require_ranks(info, setting)
    return setting


def _require_ranks(info: RecordInfo, setting: Setting) -> None:
    own, asked = info.switch.router, setting.switch.router
    rounds = asked.max_rounds if setting.is_rerouting else 1
    needed = max(rounds, asked.num_selected)
    more = (
        ", or record with --gin.RouterConfig.overflow=reroute "
        f"--gin.RouterConfig.max_rounds={needed}"
    )
    require(
        needed <= info.num_ranks,
        f"{needed} experts a token (num_selected={asked.num_selected}, rounds={rounds}) with a "
        f"record of {info.num_ranks} ranks; use at most {info.num_ranks}"
        + (more if own.kind == "top_k" and own.num_selected == 1 else ""),
    )


# Slots of a batch.


@dataclasses.dataclass(frozen=True)
class _Groups:
    """A batch's ranks, cut into groups.

    Attributes:
        rank_KTR: experts by rank, `num_experts` for a place that takes part in nothing; K is
            all groups of all layers.
        prob_KTR: their probabilities.
        num_layers: N of the batch.
        parts: parts that are cut apart; the last group of each ends in padding.
        places, left_out: places in whole groups, of B L, and the others.
    """

    rank_KTR: np.ndarray
    prob_KTR: np.ndarray
    num_layers: int
    parts: int
    places: int
    left_out: int

    def flat(self, array_KTS: np.ndarray) -> np.ndarray:
        """`[K, T, S]` -> `[N, places, S]`, in the batch's order."""
        S = array_KTS.shape[-1]
        array = array_KTS.reshape(self.num_layers, self.parts, -1, S)
        return array[:, :, : self.places // self.parts].reshape(self.num_layers, -1, S)


def _cut(batch: RecordedBatch, setting: Setting) -> _Groups:
    _require_ranks(batch.info, setting)
    N, B, L, _ = batch.rank_NBLR.shape
    parts, G, T = setting.groups(batch.batch_size, L)
    is_whole = batch.batch_size == B
    places = B * L if is_whole else B * L // T * T
    require(
        is_whole or (parts == 1 and places > 0),
        f"{B} rows of {L} places of a batch of {batch.batch_size} rows, and {parts} x {G} "
        f"groups of {T} places: the record has no whole ones; record whole batches "
        "(switchx eval --record), or use smaller groups",
    )
    R, E = setting.num_ranks, setting.switch.num_experts
    routed_BL = batch.is_token_BL | (setting.switch.router.padding == "counted")
    rank_NBLR = np.where(routed_BL[..., None], batch.rank_NBLR[..., :R], np.int16(E))

    def grouped(x_NBLR, fill):
        x = x_NBLR.reshape(N, B * L, R)[:, :places].reshape(N * parts, -1, R)
        x = np.pad(x, ((0, 0), (0, -x.shape[1] % T), (0, 0)), constant_values=fill)
        return x.reshape(-1, T, R)

    return _Groups(
        grouped(rank_NBLR, E),
        grouped(batch.prob_NBLR[..., :R], 0),
        num_layers=N,
        parts=parts,
        places=places,
        left_out=B * L - places,
    )


def queue_slots(expert_GQ: np.ndarray) -> np.ndarray:
    """The number of earlier entries of the same expert in each entry's queue."""
    order_GQ = np.argsort(expert_GQ, axis=-1, kind="stable")
    sorted_GQ = np.take_along_axis(expert_GQ, order_GQ, axis=-1)
    place_Q = np.arange(expert_GQ.shape[-1])
    is_first_GQ = np.ones(sorted_GQ.shape, bool)
    is_first_GQ[:, 1:] = sorted_GQ[:, 1:] != sorted_GQ[:, :-1]
    first_GQ = np.maximum.accumulate(np.where(is_first_GQ, place_Q, 0), axis=-1)
    slot_GQ = np.empty_like(order_GQ)
    np.put_along_axis(slot_GQ, order_GQ, place_Q - first_GQ, axis=-1)
    return slot_GQ


def _in_order(order_GQ: np.ndarray, function, array_GQ: np.ndarray) -> np.ndarray:
    """What `function` returns of the entries in another order, in the old one."""
    result = np.empty_like(order_GQ)
    found_GQ = function(np.take_along_axis(array_GQ, order_GQ, axis=1))
    np.put_along_axis(result, order_GQ, found_GQ, axis=1)
    return result


def _slots(groups: _Groups, setting: Setting) -> np.ndarray:
    """`[K, T, S]` slots of choices, without rerouting; see `moe.capacity.assign_slots`."""
    K, T, _ = groups.rank_KTR.shape
    S, router = setting.num_choices, setting.switch.router
    expert_KTS, prob_KTS = groups.rank_KTR[..., :S], groups.prob_KTR[..., :S]
    if setting.rule == "megatron":  # a queue of all choices alike, by token
        expert_KQ, order_KQ = expert_KTS.reshape(K, T * S), None
        if router.priority == "gate":
            gate_KTS = gates(setting.switch, expert_KTS, prob_KTS, expert_KTS)
            order_KQ = np.argsort(-gate_KTS.reshape(K, T * S), axis=-1, kind="stable")
    else:  # all first choices before any second one
        expert_KQ, order_KQ = expert_KTS.transpose(0, 2, 1).reshape(K, S * T), None
        if router.priority == "gate":
            order_KT = np.argsort(-prob_KTS[..., 0], axis=-1, kind="stable")
            order_KQ = np.concatenate([order_KT + s * T for s in range(S)], axis=-1)
    if order_KQ is None:
        slot_KQ = queue_slots(expert_KQ)
    else:
        slot_KQ = _in_order(order_KQ, queue_slots, expert_KQ)
    if setting.rule == "megatron":
        return slot_KQ.reshape(K, T, S)
    return slot_KQ.reshape(K, S, T).transpose(0, 2, 1)


def _waiting(rank_GTR: np.ndarray, num_experts: int, capacity: int) -> np.ndarray:
    """`[G, T]` tokens that find no slot in any round; see `moe.capacity.reroute`."""
    G, T, R = rank_GTR.shape
    waits_GT = rank_GTR[..., 0] < num_experts
    used_GE = np.zeros((G, num_experts + 1), int)
    first_G1 = np.arange(G)[:, None] * (num_experts + 1)
    for r in range(R):
        asked_GT = np.where(waits_GT, rank_GTR[..., r], num_experts)
        slot_GT = queue_slots(asked_GT) + np.take_along_axis(used_GE, asked_GT, axis=1)
        waits_GT = waits_GT & (slot_GT >= capacity)
        asked_GE = np.bincount((asked_GT + first_G1).reshape(-1), minlength=used_GE.size)
        used_GE = np.minimum(used_GE + asked_GE.reshape(used_GE.shape), capacity)
    return waits_GT


def _dropped(groups: _Groups, setting: Setting, capacity: int) -> np.ndarray:
    """`[K, T, S]` choices without a slot."""
    E = setting.switch.num_experts
    if not setting.is_rerouting:
        is_routed_KTS = groups.rank_KTR[..., : setting.num_choices] < E
        return is_routed_KTS & (_slots(groups, setting) >= capacity)
    if setting.switch.router.priority == "position":
        return _waiting(groups.rank_KTR, E, capacity)[..., None]
    order_KT = np.argsort(-groups.prob_KTR[..., 0], axis=-1, kind="stable")
    waits_KT = np.empty(order_KT.shape, bool)
    ranked_KTR = np.take_along_axis(groups.rank_KTR, order_KT[..., None], axis=1)
    np.put_along_axis(waits_KT, order_KT, _waiting(ranked_KTR, E, capacity), axis=1)
    return waits_KT[..., None]


def dropped(batch: RecordedBatch, setting: Setting, factor: float | None = None) -> np.ndarray:
    """The choices that would get no slot.

    Args:
        factor: the capacity factor; None takes the capacity of `setting.switch` in evaluation.

    Returns:
        `[N, places, S]` booleans, the places of the batch `[B, L]` in order, as far as they are
        in whole groups: all where the record has whole batches.

    Raises:
        ValueError: the batch has no such groups.
    """
    groups = _cut(batch, setting)
    capacity = setting.capacity(groups.rank_KTR.shape[1], factor)
    return groups.flat(_dropped(groups, setting, capacity))


# A whole record.


class Drops:
    """The drops of a record under one setting, by layer, for every capacity factor.

    The record is read once; where tokens are rerouted, once for each factor.

    Attributes:
        setting: the setting.
        layers: names of the Switch layers, N of them.
        choices_N: choices of each layer.
        places: places of the record in whole groups, in all stacks.
        left_out: places that are in no whole group, because batches were not recorded whole.
    """

    def __init__(self, record: RoutingRecord, setting: Setting):
        """Raises ValueError: the record cannot be read, or has no such groups."""
        self._record, self.setting = record, setting
        self.layers = record.info.all_layers
        N = len(self.layers)
        self.choices_N = np.zeros(N, np.int64)
        self.places = self.left_out = 0
        self._groups: dict[int, np.ndarray] = {}  # by T: groups by layer and number of tokens
        self._slots: dict[int, np.ndarray] = {}  # by T: choices by layer and slot
        for where, groups in self._batches():
            self._count(where, groups)
        self._dropped = functools.cache(self._dropped_N)

    def _batches(self) -> Iterator[tuple[slice, _Groups]]:
        """Each batch's groups, and which of all layers are in it."""
        for batch in self._record.batches():
            first = self.layers.index(batch.layers[0])
            yield slice(first, first + len(batch.layers)), _cut(batch, self.setting)

    def _count(self, where: slice, groups: _Groups) -> None:
        K, T, _ = groups.rank_KTR.shape
        N, E = len(self.layers), self.setting.switch.num_experts
        n_K = np.arange(where.start, where.stop).repeat(K // groups.num_layers)
        is_routed_KT = groups.rank_KTR[..., 0] < E
        tokens_NT = self._groups.setdefault(T, np.zeros((N, T + 1), np.int64))
        np.add.at(tokens_NT, (n_K, is_routed_KT.sum(axis=1)), 1)
        S = self.setting.num_choices
        self.choices_N += S * np.bincount(n_K, is_routed_KT.sum(axis=1), N).astype(np.int64)
        self.places += groups.places
        self.left_out += groups.left_out
        if self.setting.is_rerouting:
            return
        slots_NT = self._slots.setdefault(T, np.zeros((N, T), np.int64))
        place_KTS = n_K[:, None, None] * T + _slots(groups, self.setting)
        is_choice_KTS = np.broadcast_to(is_routed_KT[..., None], place_KTS.shape)
        count = np.bincount(place_KTS[is_choice_KTS], minlength=N * T)
        slots_NT += count.reshape(N, T)

    @property
    def name(self) -> str:
        """The setting in words, as far as it is no usual one."""
        setting, router = self.setting, self.setting.switch.router
        parts = [f"groups of {' and '.join(f'{T:,}' for T in self.capacities(None))}"]
        if setting.rule != "switchx":
            parts.append(f"{setting.rule} on {setting.ranks} ranks")
        if setting.microbatches > 1:
            parts.append(f"{setting.microbatches} microbatches")
        if router.num_selected > 1:
            parts.append(f"{router.num_selected} choices")
        if router.priority == "gate":
            parts.append("by gate")
        if setting.is_rerouting:
            parts.append(f"{router.max_rounds} rounds")
        return ", ".join(parts)

    def capacities(self, factor: float | None) -> dict[int, int]:
        """C by the places of a group T, of the sizes of groups that there are."""
        return {T: self.setting.capacity(T, factor) for T in sorted(self._groups)}

    def dropped_N(self, factor: float | None = None) -> np.ndarray:
        """Choices of each layer that get no slot; `factor` as in `dropped`."""
        return self._dropped(tuple(self.capacities(factor).items()))

    def _dropped_N(self, capacities: tuple[tuple[int, int], ...]) -> np.ndarray:
        N = len(self.layers)
        if not self.setting.is_rerouting:
            return sum(self._slots[T][:, C:].sum(axis=1) for T, C in capacities)
        found_N = np.zeros(N, np.int64)
        for where, groups in self._batches():
            capacity = dict(capacities)[groups.rank_KTR.shape[1]]
            is_dropped = groups.flat(_dropped(groups, self.setting, capacity))
            found_N[where] += is_dropped.sum(axis=(1, 2))
        return found_N

    def share_N(self, factor: float | None = None) -> np.ndarray:
        """Share of each layer's choices that get no slot."""
        return self.dropped_N(factor) / np.maximum(self.choices_N, 1)

    def share(self, factor: float | None = None) -> float:
        """Share of the choices of all layers that get no slot."""
        return float(self.dropped_N(factor).sum() / max(self.choices_N.sum(), 1))

    def balanced_share(self, factor: float | None = None) -> float | None:
        """The share that a balanced router drops which knows nothing of the other tokens.

        The least that a balance loss can reach (`moe.balance.expected_drops`). None where
        there is no formula: with rerouting, and where a token's experts are its task's.
        """
        switch = self.setting.switch
        if self.setting.is_rerouting or switch.router.kind == "task":
            return None
        expected = sum(
            expected_drops(np.arange(T + 1), self.setting.num_choices, switch.num_experts, C)
            @ self._groups[T].sum(axis=0)
            for T, C in self.capacities(factor).items()
        )
        return float(expected / max(self.choices_N.sum(), 1))

    def slots_per_token(self, factor: float | None = None) -> float:
        """Slots of all experts over the places of the groups, full or empty."""
        capacities, E = self.capacities(factor), self.setting.switch.num_experts
        groups = {T: counts.sum() for T, counts in self._groups.items()}
        slots = sum(E * C * groups[T] for T, C in capacities.items())
        return float(slots / sum(T * count for T, count in groups.items()))

    def smallest_factor(self, most: float) -> float:
        """The smallest capacity factor whose whole slots drop no more than a share `most`.

        It is the shortest decimal of these slots. With one slot less more would be dropped.
        """
        whole = [
            self.setting.factor(T, np.arange(self.setting.capacity(T, 1e-9), T + 1))
            for T in self._groups
        ]
        factors = np.unique(np.concatenate([[1.0], *whole]))
        number = bisect.bisect_left(factors, True, key=lambda each: self.share(each) <= most)
        exact = float(factors[number])
        wanted = self.capacities(exact)
        for digits, to_whole in itertools.product(range(1, 10), (math.floor, math.ceil)):
            short = to_whole(exact * 10**digits) / 10**digits
            if short > 0 and self.capacities(short) == wanted:
                return short
        return exact


def differing_choices(record: RoutingRecord) -> tuple[int, int]:
    """Choices whose recorded drop does not follow from the record's ranks, and all choices.

    Raises:
        ValueError: the router cannot be replayed.
    """
    setting_of(record.info)  # refuses routers that cannot be replayed
    different = total = 0
    for batch in record.batches():
        found_NPS = dropped(batch, Setting(batch.info.switch))
        there_NPS = batch.is_dropped_NBLS.reshape(len(batch.layers), -1, found_NPS.shape[-1])
        different += int((found_NPS != there_NPS[:, : found_NPS.shape[1]]).sum())
        total += found_NPS.size
    return different, total


@dataclasses.dataclass
class PredictionError:
    """Predicted and measured drops of a Switch layer.

    Attributes:
        choices: choices of the layer.
        predicted, measured: drops among these, from a record at another capacity, and recorded
            at this one.
        both: choices that are dropped in both.
    """

    choices: int = 0
    predicted: int = 0
    measured: int = 0
    both: int = 0

    @property
    def differing(self) -> int:
        """Choices that are dropped in one of the two."""
        return self.predicted + self.measured - 2 * self.both

    @property
    def jaccard(self) -> float:
        """Choices dropped in both over those dropped in one; 1 where none is."""
        either = self.predicted + self.measured - self.both
        return self.both / either if either else 1.0


def prediction_errors(
    record: RoutingRecord, measured: RoutingRecord
) -> dict[str, PredictionError]:
    """What a record predicts of the capacity of another one, against that one, by layer.

    Args:
        measured: record of the same model and rows, at another capacity, groups or order.

    Raises:
        ValueError: the records are of other rows or layers, or lack ranks.
    """
    found = {layer: PredictionError() for layer in record.info.all_layers}
    setting_of(measured.info)  # refuses routers that cannot be replayed
    setting = Setting(measured.info.switch)
    for batch, there in paired_batches(record, measured):
        predicted_NPS = dropped(batch, setting)
        P, S = predicted_NPS.shape[1:]
        measured_NPS = there.is_dropped_NBLS.reshape(len(there.layers), -1, S)[:, :P]
        choices = P * S if setting.switch.router.padding == "counted" else 0
        choices = choices or int(there.is_token_BL.reshape(-1)[:P].sum()) * S
        for layer, p_PS, m_PS in zip(batch.layers, predicted_NPS, measured_NPS, strict=True):
            error = found[layer]
            error.choices += choices
            error.predicted += int(p_PS.sum())
            error.measured += int(m_PS.sum())
            error.both += int((p_PS & m_PS).sum())
    return found


def sentence(current: Drops, factor: float, others: Sequence[Drops], most: float = 0.01) -> str:
    """What a model drops, and what other settings and capacities would change, in words.

    Args:
        factor: the factor that is compared at.
        others: drops under other settings.
        most: share of drops that a larger capacity is named for.
    """
    said = (
        f"At factor {factor:g} and {current.name} this model drops "
        f"{current.share(factor):.2%} of its choices"
    )
    if (least := current.balanced_share(factor)) is not None:
        said += f" (a balanced random router {least:.2%})"
    said += "".join(f"; {x.name} would drop {x.share(factor):.2%}" for x in others)
    enough = current.smallest_factor(most)
    slots = " and ".join(str(C) for C in current.capacities(enough).values())
    return f"{said}. {most:.2%} takes factor {enough:g}, {slots} slots of an expert and group."


def of_switch(
    record: RoutingRecord, layers: Sequence[str], switch: SwitchConfig, group_size: int
) -> Drops:
    """The drops of a record under the settings that Switch layers have in training.

    Args:
        layers, switch: the Switch layers.
        group_size: places of a group, as the batches are that are planned.

    Raises:
        ValueError: the record is of other Switch layers or has no such groups.
    """
    there = record.info.switch.num_experts, record.info.all_layers
    require(
        there == (switch.num_experts, list(layers)),
        f"{record.path} is of {there[0]} experts in {', '.join(there[1])}, and the model has "
        f"{switch.num_experts} in {', '.join(layers)}; give a record of this model",
    )
    router, is_rerouting = switch.router, switch.router.overflow == "reroute"
    setting = setting_of(
        record.info,
        group_size=group_size,
        num_selected=router.num_selected,
        priority=router.priority,
        rounds=router.max_rounds if is_rerouting else 1,
    )
    names = ("min_capacity", "capacity_rounding")
    own = {name: getattr(switch, name) for name in names}
    switch = dataclasses.replace(setting.switch, **own)
    return Drops(record, dataclasses.replace(setting, switch=switch))


def training_note(
    folder: pathlib.Path, layers: Sequence[str], switch: SwitchConfig, group_size: int
) -> str | None:
    """What the newest record in a `routing/` says of training's capacity, in words.

    None where there is no record, or the layers drop nothing, have no capacity factor, or have
    experts that choose.

    Args:
        folder: `routing/` of the run that goes on, or that parameters are taken from.
        group_size: places of the largest groups that training has.
    """
    router, path = switch.router, max(folder.glob("step_*.parquet"), default=None)
    drops_none = router.overflow == "dropless" or router.kind == "expert_choice"
    if path is None or drops_none or switch.expert_capacity is not None:
        return None
    where = f"{path.name} of {folder.parent}"
    try:
        record = open_record(path)
        drops = of_switch(record, layers, switch, group_size)
    except ValueError as error:
        return f"{where} says nothing of drops: {error}"
    others = []
    with contextlib.suppress(ValueError):  # it may have no such groups
        larger = of_switch(record, layers, switch, 4 * group_size)
        others = [larger] if larger.capacities(None) != drops.capacities(None) else []
    return f"{where}: {sentence(drops, switch.capacity_factor, others)}"
