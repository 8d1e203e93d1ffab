# SPDX-License-Identifier: Apache-2.0
"""Slots of recorded choices: the rules by which choices get them, and which choices get none.

A choice's slot is the number of earlier choices of the same expert in the queue of its group;
it is dropped if the capacity is no larger. A record's ranks (`switchx/routing_record.py`)
give the slots at every group size, number of choices and order. Rerouting (Fedus et al. 2021,
arXiv:2101.03961, appendix B) is run again for each capacity.
Dims: B rows, L places of a row, N Switch layers, G groups of a part, T places of a group,
K all groups of all layers, S choices, R ranks, Q entries of a queue, E experts, C slots of an
expert, P places of a batch in whole groups
"""

import dataclasses
import math
from typing import Literal

import numpy as np

from switchx.fields import check_choices, require, require_at_least
from switchx.moe.capacity import layer_capacity, layer_groups
from switchx.moe.config import SwitchConfig
from switchx.routing_record import RecordedBatch, RecordInfo, gates


@dataclasses.dataclass(frozen=True)
class Setting:
    """How choices get slots, except for the capacity factor.

    Attributes:
        switch: configuration of the Switch layers: group size, choices of a token, priority,
            overflow, rounding, padding.
        rule: the rule by which batches are cut into groups. `switchx`: by `group_size`, each
            microbatch alone. `flaxformer`: groups of at most `group_size` places whose number
            the experts and their copies on `ranks` devices divide; its capacity does not
            count a token's further choices. `megatron`: each rank's microbatch is one group,
            and all choices of an expert compete alike: those with the largest gates win
            (its drop policy `probs`; priority `gate`), or the first ones (`position`, where
            Megatron leaves open which win).
        ranks: number of devices over which a batch's rows are split; `switchx` ignores it.
        microbatches: number of parts of a batch that are routed one after another.
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
    def is_by_gate(self) -> bool:
        return self.switch.router.priority == "gate"

    @property
    def num_choices(self) -> int:
        """S, the most experts that one token gets."""
        return self.switch.router.num_selected

    def capacity(self, tokens_per_group: int, factor: float | None) -> int:
        """C; for `factor` None, that of the Switch layers in evaluation."""
        if factor is None:
            return layer_capacity(self.switch, tokens_per_group, is_training=False)
        if self.rule == "flaxformer":
            factor /= self.num_choices
        switch = dataclasses.replace(
            self.switch, eval_capacity_factor=factor, expert_capacity=None
        )
        return layer_capacity(switch, tokens_per_group, is_training=False)

    def factor(self, tokens_per_group: int, capacity: int) -> float:
        """The factor that gives a group exactly `capacity` slots of an expert."""
        choices = 1 if self.rule == "flaxformer" else self.num_choices
        return capacity * self.switch.num_candidates / (tokens_per_group * choices)

    def groups(self, batch_size: int, length: int) -> tuple[int, int, int]:
        """(parts, G, T): parts that are cut separately, and the groups of each.

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
    """A record's own setting with changes; if nothing was dropped, with `overflow="drop"`.

    Args:
        group_size: number of places routed together; None keeps the groups.
        num_selected: S; None keeps it.
        priority: order of the choices; None keeps it, or with `rule="megatron"` takes `gate`.
        rounds: number of experts that a token without a slot tries, 1 for only its first.
        rule, ranks, microbatches: see `Setting`.

    Raises:
        ValueError: the router cannot be replayed, ranks that this needs were not recorded, or
            the settings do not go together.
    """
    switch, router = info.switch, info.switch.router
    require(
        not router.has_choosing_experts,
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
    require(
        S == 1 or rounds in (None, 1),
        f"rounds={rounds} with num_selected={S}: a token that chooses several experts tries no "
        "others; use rounds=1, or num_selected=1",
    )
    if rounds is not None:
        overflow = "reroute" if rounds > 1 else "drop"
        tried = rounds
    elif overflow == "dropless" or S > 1 or rule != "switchx":
        overflow = "drop"
    router = dataclasses.replace(
        router,
        num_selected=S,
        gate=router.gate if S > 1 else router.undivided_gate,
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
    own = info.switch.router
    is_by_score = setting.is_by_gate and rule != "megatron"
    require(
        not is_by_score or own.score == "softmax" or own.gate != "normalized",
        f"RouterConfig.score={own.score!r}, gate='normalized' and priority='gate': queues are "
        "by scores, and a record has their shares of a token's sum; use priority='position'",
    )
    _require_ranks(info, setting)
    return setting


def _require_ranks(info: RecordInfo, setting: Setting) -> None:
    own, asked = info.switch.router, setting.switch.router
    rounds = asked.max_rounds if setting.is_rerouting else 1
    needed, name = max((rounds, "rounds"), (asked.num_selected, "num_selected"))
    more = ": a router with num_selected above 1 records its choices alone"
    if own.kind == "top_k" and own.num_selected == 1:
        more = (
            ", or record with --gin.RouterConfig.overflow=reroute "
            f"--gin.RouterConfig.max_rounds={needed}"
        )
    require(
        needed <= info.num_ranks,
        f"{name}={needed} needs the {needed} best experts of each token, and the record has "
        f"{info.num_ranks}; use {name} of at most {info.num_ranks}{more}",
    )


@dataclasses.dataclass(frozen=True)
class Groups:
    """A batch's ranks, cut into groups.

    Attributes:
        setting: rules by which they were cut.
        rank_KTR: experts by rank, `num_experts` for a place that takes no part in routing.
        prob_KTR: probabilities of these experts.
        num_layers: N of the batch.
        parts: number of parts that are cut separately; the last group of each ends in padding.
        places, left_out: numbers of places, of B L, that are in whole groups, and the others.
    """

    setting: Setting
    rank_KTR: np.ndarray
    prob_KTR: np.ndarray
    num_layers: int
    parts: int
    places: int
    left_out: int

    @property
    def size(self) -> int:
        """T."""
        return self.rank_KTR.shape[1]

    @property
    def is_routed_KT(self) -> np.ndarray:
        return self.rank_KTR[..., 0] < self.setting.switch.num_experts

    def slots_KTS(self) -> np.ndarray:
        """Slots of choices, without rerouting; see `moe.capacity.assign_slots`."""
        setting, S = self.setting, self.setting.num_choices
        expert_KTS, key_KTS = self.rank_KTR[..., :S], -self.prob_KTR[..., :1]
        if setting.rule == "megatron":  # all choices of a group compete alike
            key_KTS = -gates(setting.switch, expert_KTS, self.prob_KTR[..., :S], expert_KTS)
        keys = [key_KTS] if setting.is_by_gate else []
        if setting.rule != "megatron":  # all first choices come before any second one
            keys.append(np.arange(S))
        return queue_slots(expert_KTS, *keys)

    def _waiting_KT(self, capacity: int) -> np.ndarray:
        """Tokens that find no slot in any round; see `moe.capacity.reroute`."""
        K, E = len(self.rank_KTR), self.setting.switch.num_experts
        keys = [-self.prob_KTR[..., 0]] if self.setting.is_by_gate else []
        waits_KT, used_KE = self.is_routed_KT, np.zeros((K, E + 1), int)
        for rank_KT in np.moveaxis(self.rank_KTR, -1, 0):
            asked_KT = np.where(waits_KT, rank_KT, E)
            slot_KT = queue_slots(asked_KT, *keys)
            slot_KT += np.take_along_axis(used_KE, asked_KT, axis=1)
            waits_KT = waits_KT & (slot_KT >= capacity)
            np.add.at(used_KE, (np.arange(K)[:, None], asked_KT), 1)
            used_KE = np.minimum(used_KE, capacity)
        return waits_KT

    def dropped_NPS(self, capacity: int) -> np.ndarray:
        """Choices without a slot, in the batch's order."""
        if self.setting.is_rerouting:
            dropped_KTS = self._waiting_KT(capacity)[..., None]
        else:
            dropped_KTS = self.is_routed_KT[..., None] & (self.slots_KTS() >= capacity)
        N, S = self.num_layers, dropped_KTS.shape[-1]
        dropped = dropped_KTS.reshape(N, self.parts, -1, S)
        return dropped[:, :, : self.places // self.parts].reshape(N, -1, S)


def cut(batch: RecordedBatch, setting: Setting) -> Groups:
    """The groups of a recorded batch under a setting.

    Raises:
        ValueError: the batch has no such groups, or lacks ranks.
    """
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
    R, E = setting.switch.num_ranks, setting.switch.num_experts
    routed_BL = batch.is_token_BL | (setting.switch.router.padding == "counted")
    rank_NBLR = np.where(routed_BL[..., None], batch.rank_NBLR[..., :R], np.int16(E))

    def grouped(x_NBLR, fill):
        x = x_NBLR.reshape(N, B * L, R)[:, :places].reshape(N * parts, -1, R)
        x = np.pad(x, ((0, 0), (0, -x.shape[1] % T), (0, 0)), constant_values=fill)
        return x.reshape(-1, T, R)

    prob_KTR = grouped(batch.prob_NBLR[..., :R], 0)
    return Groups(setting, grouped(rank_NBLR, E), prob_KTR, N, parts, places, B * L - places)


def queue_slots(expert: np.ndarray, *keys) -> np.ndarray:
    """The number of earlier entries of the same expert in each entry's queue, `[K, ...]`.

    Args:
        keys: sort keys of each group's entries, the last one first; entries that are equal in
            all keep the order of `expert`.
    """
    flat = [np.broadcast_to(x, expert.shape).reshape(len(expert), -1) for x in (*keys, expert)]
    order_KQ = np.lexsort(flat, axis=-1)
    sorted_KQ = np.take_along_axis(flat[-1], order_KQ, axis=-1)
    place_Q = np.arange(order_KQ.shape[-1])
    is_first_KQ = np.diff(sorted_KQ, prepend=-1) != 0
    first_KQ = np.maximum.accumulate(np.where(is_first_KQ, place_Q, 0), axis=-1)
    slot_KQ = np.empty_like(order_KQ)
    np.put_along_axis(slot_KQ, order_KQ, place_Q - first_KQ, axis=-1)
    return slot_KQ.reshape(expert.shape)


def dropped(batch: RecordedBatch, setting: Setting, factor: float | None = None) -> np.ndarray:
    """The choices that would get no slot.

    Args:
        factor: the capacity factor; None takes the capacity of `setting.switch` in evaluation.

    Returns:
        `[N, P, S]` booleans, for the places of the batch `[B, L]` in order, as far as they are
        in whole groups: all if the record has whole batches.

    Raises:
        ValueError: the batch has no such groups.
    """
    groups = cut(batch, setting)
    return groups.dropped_NPS(setting.capacity(groups.size, factor))
