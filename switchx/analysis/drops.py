# SPDX-License-Identifier: Apache-2.0
"""Choices that a recorded model would drop at other capacities, groups, orders and meshes.

One histogram of slots (`slots.py`) gives the drops at every capacity. Rerouting is run again
for each capacity; its drops are nested in the capacity, too.

Predictions are exact for layers that read what they read when recorded: for the first Switch
layer of an encoder or of a decoder-only model. Tokens dropped there change what later layers
read; for these it is a first-order estimate (docs/drops.md has its error by depth). It says
nothing about the loss.
Dims: N Switch layers, T places of a group, K groups of all layers, S choices, E experts,
C slots of an expert, P places of a batch in whole groups
"""

import bisect
import contextlib
import dataclasses
import functools
import itertools
import math
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np

from switchx.analysis.drift import paired_batches
from switchx.analysis.slots import Groups, Setting, cut, dropped, setting_of
from switchx.moe.config import SwitchConfig
from switchx.moe.load_evenness import expected_drops
from switchx.routing_record import RoutingRecord, open_record


class Drops:
    """The drops of a record under one setting, by layer, for every capacity factor.

    The record is read once; if tokens are rerouted, once for each factor.

    Attributes:
        setting: setting under which choices get slots.
        layers: names of the Switch layers, N of them.
        choices_N: number of choices of each layer.
        places: number of places of the record in whole groups, in all stacks.
        left_out: number of places in no whole group, because batches were not recorded whole.
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

    def _batches(self) -> Iterator[tuple[slice, Groups]]:
        """Each batch's groups, and which of all layers are in the batch."""
        for batch in self._record.batches():
            first = self.layers.index(batch.layers[0])
            yield slice(first, first + len(batch.layers)), cut(batch, self.setting)

    def _count(self, where: slice, groups: Groups) -> None:
        N, T, S = len(self.layers), groups.size, self.setting.num_choices
        is_routed_KT = groups.is_routed_KT
        n_K = np.arange(where.start, where.stop).repeat(len(is_routed_KT) // groups.num_layers)
        tokens_NT = self._groups.setdefault(T, np.zeros((N, T + 1), np.int64))
        np.add.at(tokens_NT, (n_K, is_routed_KT.sum(axis=1)), 1)
        np.add.at(self.choices_N, n_K, S * is_routed_KT.sum(axis=1))
        self.places += groups.places
        self.left_out += groups.left_out
        if not self.setting.is_rerouting:
            slots_NT = self._slots.setdefault(T, np.zeros((N, T), np.int64))
            place_KTS = n_K[:, None, None] * T + groups.slots_KTS()
            count = np.bincount(place_KTS[is_routed_KT].reshape(-1), minlength=N * T)
            slots_NT += count.reshape(N, T)

    @property
    def name(self) -> str:
        """The setting in words, as far as it is not the usual one."""
        setting, router = self.setting, self.setting.switch.router
        parts = [f"groups of {' and '.join(f'{T:,}' for T in self.capacities(None))}"]
        if setting.rule != "switchx":
            parts.append(f"{setting.rule} on {setting.ranks} ranks")
        if setting.microbatches > 1:
            parts.append(f"{setting.microbatches} microbatches")
        if router.num_selected > 1 or self._record.info.switch.router.num_selected > 1:
            parts.append(f"{router.num_selected} choice{'s' * (router.num_selected > 1)}")
        if setting.is_by_gate:
            parts.append("by gate")
        if setting.is_rerouting:
            parts.append(f"{router.max_rounds} rounds")
        return ", ".join(parts)

    def capacities(self, factor: float | None) -> dict[int, int]:
        """C by the group size T, for all group sizes of the record."""
        return {T: self.setting.capacity(T, factor) for T in sorted(self._groups)}

    def dropped_N(self, factor: float | None = None) -> np.ndarray:
        """Choices of each layer that get no slot; `factor` as in `slots.dropped`."""
        return self._dropped(tuple(self.capacities(factor).items()))

    def _dropped_N(self, capacities: tuple[tuple[int, int], ...]) -> np.ndarray:
        if not self.setting.is_rerouting:
            return sum(self._slots[T][:, C:].sum(axis=1) for T, C in capacities)
        found_N = np.zeros(len(self.layers), np.int64)
        for where, groups in self._batches():
            found_NPS = groups.dropped_NPS(dict(capacities)[groups.size])
            found_N[where] += found_NPS.sum(axis=(1, 2))
        return found_N

    def share_N(self, factor: float | None = None) -> np.ndarray:
        """Share of each layer's choices that get no slot."""
        return self.dropped_N(factor) / np.maximum(self.choices_N, 1)

    def share(self, factor: float | None = None) -> float:
        """Share of the choices of all layers that get no slot."""
        return float(self.dropped_N(factor).sum() / max(self.choices_N.sum(), 1))

    def balanced_share(self, factor: float | None = None) -> float | None:
        """The share dropped by a balanced router that knows nothing about the other tokens.

        The least that a balance loss can reach (`moe.load_evenness.expected_drops`). None if
        there is no formula: with rerouting, or if a token's experts are its task's.
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

        It is the shortest decimal for these slots. With one slot fewer, more would be dropped.
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


@dataclasses.dataclass
class PredictionError:
    """Predicted and measured drops of a Switch layer.

    Attributes:
        choices: number of choices of the layer.
        predicted, measured: numbers of drops among these, from a record's ranks, and recorded.
        both: number of choices that are dropped in both.
    """

    choices: int = 0
    predicted: int = 0
    measured: int = 0
    both: int = 0

    @property
    def differing(self) -> int:
        """Number of choices that are dropped in only one of the two."""
        return self.predicted + self.measured - 2 * self.both

    @property
    def predicted_share(self) -> float:
        return self.predicted / max(self.choices, 1)

    @property
    def measured_share(self) -> float:
        return self.measured / max(self.choices, 1)

    @property
    def jaccard(self) -> float:
        """Choices dropped in both over those dropped in either; 1 if none is."""
        either = self.predicted + self.measured - self.both
        return self.both / either if either else 1.0


def prediction_errors(
    record: RoutingRecord, measured: RoutingRecord
) -> dict[str, PredictionError]:
    """Compares what a record predicts for another record's capacity with that, by layer.

    Args:
        measured: record of the same model and rows, at another capacity, groups or order; or
            the record itself, whose drops follow from its own ranks.

    Raises:
        ValueError: the records differ in rows or layers, lack ranks, or are of a router that
            cannot be replayed.
    """
    found = {layer: PredictionError() for layer in record.info.all_layers}
    setting_of(measured.info)  # refuses routers that cannot be replayed
    setting = Setting(measured.info.switch)
    for batch, measured_batch in paired_batches(record, measured):
        predicted_NPS = dropped(batch, setting)
        N, P, S = predicted_NPS.shape
        measured_NPS = measured_batch.is_dropped_NBLS.reshape(N, -1, S)[:, :P]
        is_routed_BL = batch.is_token_BL | (setting.switch.router.padding == "counted")
        choices = S * int(is_routed_BL.reshape(-1)[:P].sum())
        for layer, p_PS, m_PS in zip(batch.layers, predicted_NPS, measured_NPS, strict=True):
            error = found[layer]
            error.choices += choices
            error.predicted += int(p_PS.sum())
            error.measured += int(m_PS.sum())
            error.both += int((p_PS & m_PS).sum())
    return found


# Share of drops that counts as few, for which a capacity is sought.
FEW = 0.01
NUM_PREDICTED = 41


@dataclasses.dataclass(frozen=True)
class DropsByFactor:
    """A model's drops by capacity factor: predicted from one record, and measured.

    Attributes:
        layers: names of the Switch layers, N of them.
        factor_P, share_PN: capacity factors, and predicted shares of each layer's choices.
        errors: predicted and measured drops of each layer, by measured factor.
        own: factor of evaluation, if it has one.
        least: smallest factor that drops at most `FEW` of all choices.
        dropless: smallest factor that drops none.
        saved: slots of `dropless` minus those of `least`, as a share of the former.
        saved_bytes: the same in bytes of slots' vectors, per token and layer.
    """

    layers: list[str]
    factor_P: np.ndarray
    share_PN: np.ndarray
    errors: dict[float, dict[str, PredictionError]]
    own: float | None
    least: float
    dropless: float
    saved: float
    saved_bytes: float

    @classmethod
    def of(
        cls,
        drops: Drops,
        errors: dict[float, dict[str, PredictionError]],
        own: float | None,
        slot_bytes: int,
    ) -> "DropsByFactor":
        """Predicts from a record's drops, from the least measured factor to `dropless`.

        `slot_bytes` are the bytes of a slot's vector.
        """
        least, dropless = drops.smallest_factor(FEW), drops.smallest_factor(0.0)
        factors = sorted({*errors, least, dropless, own or least})
        if not drops.setting.is_rerouting:  # rerouting reads the record for each factor
            factors = sorted({*factors, *np.linspace(factors[0], factors[-1], NUM_PREDICTED)})
        few = drops.slots_per_token(least)
        none = drops.slots_per_token(dropless)
        return cls(
            drops.layers,
            np.array(factors),
            np.array([drops.share_N(each) for each in factors]),
            errors,
            own,
            least,
            dropless,
            1 - few / none,
            (none - few) * slot_bytes,
        )


def sentence(current: Drops, factor: float, others: Sequence[Drops], most: float = 0.01) -> str:
    """What one setting drops, and what other settings and capacities would change, in words.

    Args:
        factor: capacity factor at which settings are compared.
        others: drops under other settings.
        most: share of drops for which a larger capacity is named.
    """
    text = (
        f"At factor {factor:g} and {current.name} "
        f"{current.share(factor):.2%} of the choices find no slot"
    )
    if (least := current.balanced_share(factor)) is not None:
        text += f" (a balanced random router {least:.2%})"
    text += "".join(f"; {x.name} would drop {x.share(factor):.2%}" for x in others)
    enough = current.smallest_factor(most)
    slots = " and ".join(str(C) for C in current.capacities(enough).values())
    return f"{text}. {most:.2%} takes factor {enough:g}, {slots} slots of an expert and group."


def of_switch(
    record: RoutingRecord, layers: Sequence[str], switch: SwitchConfig, group_size: int
) -> Drops:
    """The drops of a record under the settings that Switch layers have in training.

    Args:
        layers, switch: the Switch layers.
        group_size: number of places of a group in the planned batches.

    Raises:
        ValueError: the record is of other Switch layers or has no such groups.
    """
    record.require_model(layers, switch.num_experts)
    router, is_rerouting = switch.router, switch.router.overflow == "reroute"
    setting = setting_of(
        record.info,
        group_size=group_size,
        num_selected=router.num_selected,
        priority=router.priority,
        rounds=router.max_rounds if is_rerouting else 1,
    )
    switch = dataclasses.replace(
        setting.switch,
        min_capacity=switch.min_capacity,
        capacity_rounding=switch.capacity_rounding,
    )
    return Drops(record, dataclasses.replace(setting, switch=switch))


def training_note(
    folder: pathlib.Path, layers: Sequence[str], switch: SwitchConfig, group_size: int
) -> str | None:
    """What the newest record in a `routing/` says about training's capacity, in words.

    None if there is no record, or the layers drop nothing, have no capacity factor, or have
    experts that choose.

    Args:
        folder: `routing/` of the run that goes on, or from which parameters are taken.
        group_size: number of places in the largest groups of training.
    """
    router = switch.router
    records = folder.glob("step_*.parquet")
    path = max(records, default=None, key=lambda path: (len(path.name), path.name))
    drops_none = router.overflow == "dropless" or router.has_choosing_experts
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
    expected = sentence(drops, switch.capacity_factor, others)
    sample = "All this is of that one checkpoint, routed without exploration such as jitter."
    return f"{where}: {expected} {sample}"
