# SPDX-License-Identifier: Apache-2.0
"""The atlas of a model: what its experts take from labelled texts, counted in a routing record.

Co-activation, domain and vocabulary specialization are those of OLMoE (Muennighoff et al. 2024,
arXiv:2409.02060, sections 5.2 to 5.4). A record is read one Switch layer at a time. Tokens of
one text are not independent, so labels are permuted among texts, never among tokens. Padding,
start tokens and rows that fill up a batch are left out.

Dims: R texts, K labels, B rows of the record, T tokens of a stack, S choices, E experts,
V token ids, X removed experts
"""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from switchx.analysis.drops import DropsByFactor
from switchx.analysis.routing import (
    Snapshot,
    TokenCounts,
    TypicalToken,
    expert_pairs,
    information,
    token_counts,
    transitions_between,
    typical_tokens,
)
from switchx.fields import require
from switchx.routing_record import RoutingRecord

NUM_PERMUTATIONS = 1000
NUM_RESAMPLES = 1000
# Token ids that are seen less often tell nothing about vocabulary specialization.
LEAST_TIMES = 10
NUM_TYPICAL_TOKENS = 8
NUM_EXAMPLES = 4
# Tokens shown on either side of an example, and candidates among which examples are chosen.
CONTEXT, NUM_CANDIDATES = 8, 4096


@dataclasses.dataclass(frozen=True)
class Labels:
    """The labels of the texts to which a record's rows belong.

    Attributes:
        names: names of the labels.
        label_R: label of each text.
        text_B: text of each row, by the row's id in the record.
    """

    names: tuple[str, ...]
    label_R: np.ndarray
    text_B: np.ndarray

    @property
    def texts_K(self) -> np.ndarray:
        """Number of texts of each label."""
        return np.bincount(self.label_R, minlength=len(self.names))

    def by_text(self, value_B) -> np.ndarray:
        """Sums of rows' values by text, `[R]`."""
        return np.bincount(self.text_B, value_B, len(self.label_R))

    def by_label(self, value_RX: np.ndarray) -> np.ndarray:
        """Sums of texts' values by label, `[K, X]`."""
        return _sums(value_RX, self.label_R, len(self.names))

    def permuted(self, value_RX: np.ndarray, num: int, seed: int) -> Iterator[np.ndarray]:
        """`by_label` for `num` random permutations of the labels."""
        rng = np.random.default_rng(seed)
        for _ in range(num):
            yield _sums(value_RX, rng.permutation(self.label_R), len(self.names))

    def half(self, is_used_R: np.ndarray, seed: int) -> np.ndarray:
        """Whether each used text is in a random half of its label's used texts."""
        rng = np.random.default_rng(seed)
        is_first_R = np.zeros(len(self.label_R), bool)
        for k in range(len(self.names)):
            own = np.flatnonzero(is_used_R & (self.label_R == k))
            is_first_R[rng.permutation(own)[::2]] = True
        return is_first_R

    def resampled(self, value_RX: np.ndarray, seed: int) -> Iterator[np.ndarray]:
        """`by_label` of texts drawn with replacement, as many of each label as there are."""
        rng = np.random.default_rng(seed)
        for _ in range(NUM_RESAMPLES):
            times_R = np.zeros(len(self.label_R))
            for own in (np.flatnonzero(self.label_R == k) for k in range(len(self.names))):
                drawn = rng.integers(max(len(own), 1), size=len(own))
                times_R[own] = np.bincount(drawn, minlength=len(own))
            yield self.by_label(value_RX * times_R[:, None])


def _sums(value_RX: np.ndarray, label_R: np.ndarray, num_labels: int) -> np.ndarray:
    is_label_KR = label_R == np.arange(num_labels)[:, None]
    return is_label_KR.astype(value_RX.dtype) @ value_RX


@dataclasses.dataclass(frozen=True)
class Specialization:
    """Choices of experts by label, and what to expect if labels are permuted.

    Attributes:
        count_EK: choices of each expert by tokens of each label.
        tokens_K: number of tokens of each label.
        p_EK: share of permutations whose N(e, label) / N(label) is at least as large.
        mutual: I(expert; label) of a choice, in nats.
        labels: entropy of the labels.
        permuted: mean of I over permutations.
        p: share of permutations whose I is at least as large.
    """

    count_EK: np.ndarray
    tokens_K: np.ndarray
    p_EK: np.ndarray
    mutual: float
    labels: float
    permuted: float
    p: float

    @property
    def share_EK(self) -> np.ndarray:
        """N(e, label) / N(label): the share of the label's tokens that chose the expert."""
        return self.count_EK / np.maximum(self.tokens_K, 1)


@dataclasses.dataclass(frozen=True)
class Example:
    """A token that an expert took, with its neighbours.

    Attributes:
        text: number of the text.
        token: token id; `before` and `after` are those of its neighbours in the row.
        gate: weight of the expert's output.
    """

    text: int
    before: list[int]
    token: int
    after: list[int]
    gate: float


@dataclasses.dataclass(frozen=True)
class LayerAtlas:
    """One Switch layer.

    Attributes:
        layer: name of the layer; `previous` is that of the Switch layer before it in its stack.
        num_tokens: T; `num_choices` is S, the choices of each token.
        load_E: number of choices of each expert.
        dropped: share of the choices that asked for a slot and got none.
        probability, margin: means of the first choice's probability, and of the last choice's
            score over the next expert's.
        together_EE: tokens that chose both experts; on the diagonal, those that chose one.
        arrivals_EE: tokens from each expert of the previous layer; None in a first layer.
        specialization: choices by label.
        tokens: choices by token id; None after `without_tokens`.
        vocabulary: mean over tokens of max_e N(e, id) / N(id), for ids seen at least
            `LEAST_TIMES`; `vocabulary_by_chance` is the same with choices shuffled over tokens.
        typical: typical tokens of each expert.
        examples: examples of each expert.
    """

    layer: str
    previous: str | None
    num_tokens: int
    num_choices: int
    load_E: np.ndarray
    dropped: float
    probability: float
    margin: float
    together_EE: np.ndarray
    arrivals_EE: np.ndarray | None
    specialization: Specialization
    tokens: TokenCounts | None
    vocabulary: float
    vocabulary_by_chance: float
    typical: list[list[TypicalToken]]
    examples: list[list[Example]]

    @property
    def num_experts(self) -> int:
        return len(self.load_E)

    def without_tokens(self) -> "LayerAtlas":
        """The layer without the counts of all token ids, which are most of its memory."""
        return dataclasses.replace(self, tokens=None)

    @property
    def even_share(self) -> float:
        """The share of tokens that an expert has when all are alike: S / E if each token
        makes S choices."""
        return float(self.load_E.mean()) / self.num_tokens

    @property
    def effective_experts(self) -> float:
        """exp of the entropy of the load: the number of evenly loaded experts that have it."""
        return math.exp(information(self.load_E[:, None]).rows)

    @property
    def together_by_chance(self) -> float:
        """Mean of `coactivation_EE` if experts are alike: (S - 1) / (E - 1) if each token
        makes S choices."""
        others = self.together_EE.sum() - np.trace(self.together_EE)
        return float(others) / max(self.load_E.sum() * (self.num_experts - 1), 1)

    @property
    def coactivation_EE(self) -> np.ndarray:
        """N(i and j) / N(i), to compare with (S - 1) / (E - 1); NaN on the diagonal and if no
        token chose i."""
        share_EE = np.full(self.together_EE.shape, np.nan)
        own_E1 = np.diag(self.together_EE)[:, None]
        np.divide(self.together_EE, own_E1, out=share_EE, where=own_E1 > 0)
        np.fill_diagonal(share_EE, np.nan)
        return share_EE


@dataclasses.dataclass(frozen=True)
class _Routed:
    """The tokens of texts in a layer's stack, in the order of the record, and their choices."""

    token_T: np.ndarray
    row_T: np.ndarray
    expert_TS: np.ndarray
    gate_TS: np.ndarray
    prob_T: np.ndarray
    margin_T: np.ndarray
    is_dropped_TS: np.ndarray


def read_layers(
    record: RoutingRecord, labels: Labels, seed: int = 0, start_id: int | None = 0
) -> Iterator[LayerAtlas]:
    """Yields every Switch layer of a record, the encoder's first; one at a time is in memory.

    Args:
        seed: seed of permutations and shuffles.
        start_id: id that a decoder read before each text, which no text has; None for none.

    Raises:
        ValueError: the record has rows that `labels` does not know, or has no tokens.
    """
    for stack, names in record.info.layers.items():
        previous_TS = None
        for previous, name in zip([None, *names], names, strict=False):
            routed = _read(record, stack, name, len(labels.text_B), start_id)
            E = record.info.switch.num_experts
            yield _layer_atlas(name, previous, previous_TS, routed, labels, E, seed)
            previous_TS = routed.expert_TS


def _read(record: RoutingRecord, stack: str, name: str, num_rows: int, start_id) -> _Routed:
    parts = []
    for batch in record.batches([stack], [name]):
        row_B1 = batch.row_B[:, None].astype(np.int32)
        # Neither padding, nor start tokens, nor rows that fill up a batch.
        where = batch.is_token_BL & (row_B1 >= 0)
        where &= batch.token_BL != (-1 if start_id is None else start_id)
        found = (
            batch.token_BL,
            np.broadcast_to(row_B1, where.shape),
            batch.chosen_NBLS[0],
            batch.gate_NBLS[0],
            batch.prob_NBLR[0, ..., 0],
            batch.margin_NBL[0],
            batch.is_dropped_NBLS[0],
        )
        parts.append([each[where] for each in found])
    routed = _Routed(*map(np.concatenate, zip(*parts, strict=True)))
    require(
        len(routed.token_T),
        f"{record.path} has no token of the {stack}; record texts that are not empty",
    )
    last = int(routed.row_T.max())
    require(
        last < num_rows,
        f"{record.path} has rows up to {last}, and labels are given of {num_rows}; give those "
        "of the texts that were recorded",
    )
    return routed


def _layer_atlas(
    name: str,
    previous: str | None,
    before_TS: np.ndarray | None,
    routed: _Routed,
    labels: Labels,
    num_experts: int,
    seed: int,
) -> LayerAtlas:
    expert_TS, E = routed.expert_TS, num_experts
    num_tokens, num_choices = expert_TS.shape
    num_asked = np.sum((expert_TS < E) | routed.is_dropped_TS)
    text_T = labels.text_B[routed.row_T]
    counts = token_counts(expert_TS, routed.token_T, E)
    shuffled_T = np.random.default_rng(seed).permutation(num_tokens)
    by_chance = token_counts(expert_TS[shuffled_T], routed.token_T, E)
    return LayerAtlas(
        layer=name,
        previous=previous,
        num_tokens=num_tokens,
        num_choices=num_choices,
        load_E=np.bincount(expert_TS.reshape(-1), minlength=E + 1)[:E],
        dropped=float(routed.is_dropped_TS.sum() / max(num_asked, 1)),
        probability=float(routed.prob_T.mean(dtype=np.float64)),
        margin=float(routed.margin_T.mean(dtype=np.float64)),
        together_EE=coactivations(expert_TS, E),
        arrivals_EE=None if previous is None else transitions_between(before_TS, expert_TS, E),
        specialization=specialization(expert_TS, text_T, labels, E, seed),
        tokens=counts,
        vocabulary=vocabulary_specialization(counts),
        vocabulary_by_chance=vocabulary_specialization(by_chance),
        typical=[typical_tokens(counts, e, NUM_TYPICAL_TOKENS) for e in range(E)],
        examples=examples(routed, labels, E),
    )


def coactivations(expert_TS: np.ndarray, num_experts: int) -> np.ndarray:
    """Tokens that chose both experts, `[E, E]`, symmetric; on the diagonal, those of one."""
    ones_T = np.ones(len(expert_TS))  # a token chooses an expert at most once
    return expert_pairs(expert_TS, expert_TS, num_experts, ones_T).astype(np.int64)


def vocabulary_specialization(counts: TokenCounts, least_times: int = LEAST_TIMES) -> float:
    """The mean over tokens of max_e N(e, id) / N(id) (OLMoE, section 5.4).

    Ids seen fewer than `least_times` times are left out; NaN if all are.
    """
    largest_V = np.zeros(len(counts.token_V))
    np.maximum.at(largest_V, counts.index_X, counts.share_X)
    weight_V = np.where(counts.times_V >= least_times, counts.times_V, 0)
    return float(largest_V @ weight_V / weight_V.sum()) if weight_V.any() else math.nan


def specialization(
    expert_TS: np.ndarray,
    text_T: np.ndarray,
    labels: Labels,
    num_experts: int,
    seed: int,
    num_permutations: int = NUM_PERMUTATIONS,
) -> Specialization:
    """What labels and experts tell about each other.

    A p-value is (1 + permutations at least as large) / (1 + permutations): Phipson and Smyth
    2010 (arXiv:1603.05766).
    """
    E = num_experts
    R = len(labels.label_R)
    K = len(labels.names)
    is_choice_TS = expert_TS < E
    text_TS = np.broadcast_to(text_T[:, None], expert_TS.shape)[is_choice_TS]
    cells = text_TS.astype(np.int64) * E + expert_TS[is_choice_TS]
    count_RE = np.bincount(cells, minlength=R * E).reshape(R, E)
    tokens_R1 = np.bincount(text_T, minlength=R)[:, None]
    value_RX = np.concatenate([count_RE, tokens_R1], axis=1).astype(np.float64)

    def shares(sums_KX):
        return sums_KX[:, :E] / np.maximum(sums_KX[:, E:], 1)

    observed_KX = labels.by_label(value_RX)
    observed_KE, told = shares(observed_KX), information(observed_KX[:, :E])
    as_large_KE, permuted = np.zeros((K, E)), []
    if K > 1:
        for sums_KX in labels.permuted(value_RX, num_permutations, seed):
            as_large_KE += shares(sums_KX) >= observed_KE - 1e-12
            permuted.append(information(sums_KX[:, :E]).mutual)
    total = 1 + len(permuted)
    return Specialization(
        count_EK=observed_KX[:, :E].T.astype(np.int64),
        tokens_K=observed_KX[:, E].astype(np.int64),
        p_EK=(1 + as_large_KE.T) / total,
        mutual=told.mutual,
        labels=told.rows,
        permuted=float(np.mean(permuted)) if permuted else 0.0,
        p=(1 + sum(each >= told.mutual - 1e-12 for each in permuted)) / total,
    )


def examples(routed: _Routed, labels: Labels, num_experts: int) -> list[list[Example]]:
    """The tokens that each expert takes with its largest gates, one per token id."""
    num_choices, found = routed.expert_TS.shape[1], []
    expert_X, gate_X = routed.expert_TS.reshape(-1), routed.gate_TS.reshape(-1)
    order = np.lexsort((-gate_X, expert_X))
    bounds = np.searchsorted(expert_X[order], np.arange(num_experts + 1))
    for first, end in zip(bounds, bounds[1:], strict=False):
        own = order[first:end][:NUM_CANDIDATES]
        _, index = np.unique(routed.token_T[own // num_choices], return_index=True)
        best = own[np.sort(index)[:NUM_EXAMPLES]]
        found.append([_example(routed, labels, int(i) // num_choices, gate_X[i]) for i in best])
    return found


def _example(routed: _Routed, labels: Labels, place: int, gate: float) -> Example:
    window = np.arange(max(place - CONTEXT, 0), place + CONTEXT + 1)
    window = window[window < len(routed.row_T)]
    near = window[routed.row_T[window] == routed.row_T[place]]
    before, (token,), after = (
        routed.token_T[each].tolist()
        for each in (near[near < place], [place], near[near > place])
    )
    text = int(labels.text_B[routed.row_T[place]])
    return Example(text, before, token, after, float(gate))


@dataclasses.dataclass(frozen=True)
class KnockOuts:
    """The loss of a model without one expert, for each of X experts removed alone.

    Attributes:
        experts: Switch layer and number of each removed expert.
        loss_K: nats per target token of each label, with nothing removed.
        change_XK: loss without the expert less `loss_K`; NaN for a label without texts, such as
            one with a single text, none of which is held out.
        low_XK, high_XK: ends of the change's 95% interval: percentiles of the bootstrap that
            resamples the label's texts; NaN for fewer than two.
        p_XK: share of permutations of the labels among texts for which the label's change
            exceeds that of all others by as much; NaN if there is one label.
        tokens_K, texts_K: numbers of target tokens and texts of each label.
        specialist_K: index in `experts` of the removal whose harm to the label exceeds that to
            the others most, found on half of the label's texts.
        held_out: knock-outs on the other half; None if these are a half.
    """

    experts: list[tuple[str, int]]
    loss_K: np.ndarray
    change_XK: np.ndarray
    low_XK: np.ndarray
    high_XK: np.ndarray
    p_XK: np.ndarray
    tokens_K: np.ndarray
    texts_K: np.ndarray
    specialist_K: np.ndarray
    held_out: "KnockOuts | None"


def knock_outs(
    experts: Sequence[tuple[str, int]],
    loss_R: np.ndarray,
    loss_XR: np.ndarray,
    tokens_R: np.ndarray,
    labels: Labels,
    seed: int = 0,
    has_halves: bool = True,
) -> KnockOuts:
    """Changes of loss by label, how sure they are, and how they compare with permuted labels.

    Args:
        experts: Switch layer and number of each removed expert.
        loss_R, loss_XR: sums of the negative log-likelihoods of each text's target tokens, in
            nats, with all experts and without one.
        tokens_R: number of target tokens of each text; 0 leaves it out.
        has_halves: whether specialists are found on one half of the texts and tested on the
            other.
    """
    finding, held_out = None, None
    if has_halves:
        is_first_R, losses = labels.half(tokens_R > 0, seed), (loss_R, loss_XR)
        finding, held_out = (
            knock_outs(experts, *losses, tokens_R * is_in_R, labels, seed, has_halves=False)
            for is_in_R in (is_first_R, ~is_first_R)
        )
    is_used_R = tokens_R > 0
    labels = dataclasses.replace(labels, label_R=labels.label_R[is_used_R])
    value_RX = np.column_stack([np.transpose(loss_XR - loss_R), loss_R, tokens_R])[is_used_R]
    total_X = value_RX.sum(axis=0)

    def means(sums_KX):
        return sums_KX[:, :-1] / np.maximum(sums_KX[:, -1:], 1)

    def excess(sums_KX):
        """A label's change per token less that of all other labels."""
        return means(sums_KX) - means(total_X - sums_KX)

    observed_KX = labels.by_label(value_RX)
    p_KX = np.full((len(labels.names), len(experts)), math.nan)
    if len(labels.names) > 1:
        num_as_large_KX = sum(
            excess(sums_KX) >= excess(observed_KX) - 1e-12
            for sums_KX in labels.permuted(value_RX, NUM_PERMUTATIONS, seed)
        )
        p_KX = (1 + num_as_large_KX[:, :-1]) / (1 + NUM_PERMUTATIONS)
    resampled = [means(sums_KX)[:, :-1] for sums_KX in labels.resampled(value_RX, seed)]
    low_KX, high_KX = np.quantile(resampled, (0.025, 0.975), axis=0)
    *change_XK, loss_K = means(observed_KX).T
    change_XK, texts_K = np.array(change_XK), labels.texts_K
    change_XK[:, texts_K == 0] = p_KX[texts_K == 0] = math.nan
    low_KX[texts_K < 2] = high_KX[texts_K < 2] = math.nan
    found_K = np.argmax(excess(observed_KX)[:, :-1], axis=1)
    return KnockOuts(
        list(experts),
        loss_K,
        change_XK,
        low_KX.T,
        high_KX.T,
        p_KX.T,
        observed_KX[:, -1].astype(np.int64),
        texts_K,
        found_K if finding is None else finding.specialist_K,
        held_out,
    )


def all_experts(layers: Sequence[LayerAtlas]) -> list[tuple[str, int]]:
    """Switch layer and number of every expert."""
    return [(layer.layer, e) for layer in layers for e in range(layer.num_experts)]


def largest_takers(layers: Sequence[LayerAtlas]) -> list[tuple[str, int]]:
    """For each label the expert, of any layer, whose share of the label's tokens most exceeds
    that of other labels: the largest N(e, label) / N(label) - N(e, others) / N(others)."""
    excess = []
    for layer in layers:
        own = layer.specialization
        others_K = np.maximum(own.tokens_K.sum() - own.tokens_K, 1)
        excess.append(own.share_EK - (layer.load_E[:, None] - own.count_EK) / others_K)
    every = all_experts(layers)
    return [every[i] for i in np.argmax(np.concatenate(excess), axis=0)]


@dataclasses.dataclass(frozen=True)
class Atlas:
    """What was counted and measured for a model on labelled texts.

    Attributes:
        name: name of the model.
        labels: labels of the texts.
        layers: Switch layers, without the counts of all token ids.
        how: what the stacks read.
        loss_K: nats per target token, by label.
        drops: dropped shares by capacity factor, predicted and measured; or why there are none.
        knock_outs: losses without single experts; None if none was removed.
        snapshots: samples of the same tokens that the run recorded, by step.
        text_of, piece_of: functions for the text of a list of token ids, and of one id.
        record: file of the routing record.
    """

    name: str
    labels: Labels
    layers: Sequence[LayerAtlas]
    how: str
    loss_K: np.ndarray
    drops: DropsByFactor | str
    knock_outs: KnockOuts | None
    snapshots: Sequence[Snapshot]
    text_of: Callable[[list[int]], str]
    piece_of: Callable[[int], str]
    record: pathlib.Path

    def label_of(self, text: int) -> str:
        return self.labels.names[self.labels.label_R[text]]
