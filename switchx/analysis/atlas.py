# SPDX-License-Identifier: Apache-2.0
"""The atlas of a model: what its experts take of labelled texts, counted in a routing record.

Co-activation, domain and vocabulary specialization are those of OLMoE (Muennighoff et al. 2024,
arXiv:2409.02060, sections 5.2 to 5.4). A record is read one Switch layer at a time. Tokens of
one text are not independent, so labels are permuted among texts, never among tokens. Padding,
start tokens and rows that fill up a batch are left out.

Dims: R texts, K labels, B rows of the record, T tokens of a stack, S choices, E experts,
V token ids, X removed experts
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

from switchx.analysis.routing import (
    TokenCounts,
    TypicalToken,
    information,
    saturation,
    token_counts,
    transitions_between,
    typical_tokens,
)
from switchx.fields import require
from switchx.routing_record import RecordedBatch, RoutingRecord

NUM_PERMUTATIONS = 1000
# Token ids that are seen less often tell nothing of a vocabulary.
LEAST_TIMES = 10
NUM_TYPICAL_TOKENS = 8
NUM_EXAMPLES = 4
# Tokens shown on either side of an example, and candidates among which examples are chosen.
CONTEXT, NUM_CANDIDATES = 8, 4096
PAD_ID = 0


@dataclasses.dataclass(frozen=True)
class Labels:
    """The labels of the texts that a record's rows are parts of.

    Attributes:
        names: names of the labels.
        label_R: label of each text.
        text_B: text of each row, by the row's id in the record.
    """

    names: tuple[str, ...]
    label_R: np.ndarray
    text_B: np.ndarray


@dataclasses.dataclass(frozen=True)
class Specialization:
    """Choices of experts by label, and what would be expected of permuted labels.

    Attributes:
        count_EK: choices of each expert by tokens of each label.
        tokens_K: tokens of each label.
        p_EK: share of permutations whose N(e, label) / N(label) is as large.
        mutual: I(expert; label) of a choice, in nats.
        labels: entropy of the labels.
        permuted: mean of I over permutations.
        p: share of permutations whose I is as large.
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
    """A token that an expert took, among its neighbours.

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
        layer: name of the layer; `previous` that of the Switch layer before it in its stack.
        num_tokens: T, and `num_choices` S of each.
        load_E: choices of each expert.
        dropped: share of the choices that asked for a slot and got none.
        probability, margin: means of the first choice's probability, and of the last choice's
            score over the next expert's.
        together_EE: tokens that chose both experts; the diagonal has those that chose one.
        arrivals_EE: tokens from each expert of the previous layer; None in a first layer.
        specialization: the choices by label.
        tokens: the choices by token id; None `without_tokens`.
        vocabulary: mean over tokens of max_e N(e, id) / N(id), of ids seen at least
            `LEAST_TIMES`; `vocabulary_by_chance` is the same of choices shuffled over tokens.
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
        """The layer without the counts of all token ids, the most of what it holds."""
        return dataclasses.replace(self, tokens=None)

    @property
    def even_share(self) -> float:
        """The share of tokens that an expert has when all are alike: S / E where each token
        makes S choices."""
        return float(self.load_E.mean()) / self.num_tokens

    @property
    def effective_experts(self) -> float:
        """exp of the entropy of the load: as many experts, evenly loaded, have it."""
        return math.exp(information(self.load_E[:, None]).rows)

    @property
    def coactivation_EE(self) -> np.ndarray:
        """N(i and j) / N(i), against (S - 1) / (E - 1); NaN on the diagonal and without i."""
        share_EE = np.full(self.together_EE.shape, np.nan)
        own_E1 = np.diag(self.together_EE)[:, None]
        np.divide(self.together_EE, own_E1, out=share_EE, where=own_E1 > 0)
        np.fill_diagonal(share_EE, np.nan)
        return share_EE


@dataclasses.dataclass(frozen=True)
class _Stack:
    """The tokens of a stack: ids, texts, and rows, in the order of the record."""

    token_T: np.ndarray
    text_T: np.ndarray
    row_T: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Routed:
    """A layer's choices of the same tokens, and sums over them."""

    expert_TS: np.ndarray
    gate_TS: np.ndarray
    dropped: float
    probability: float
    margin: float


def read_layers(record: RoutingRecord, labels: Labels, seed: int = 0) -> Iterator[LayerAtlas]:
    """Yields every Switch layer of a record, the encoder's first; one at a time is in memory.

    Args:
        seed: seed of permutations and shuffles.

    Raises:
        ValueError: the record has rows that `labels` does not know, or it has no tokens.
    """
    E = record.info.switch.num_experts
    for stack, names in record.info.layers.items():
        tokens, before = _read_tokens(record, stack, labels), None
        for previous, name in zip([None, *names], names, strict=False):
            routed = _read_layer(record, stack, name)
            arrivals_EE = None
            if before is not None:
                arrivals_EE = transitions_between(before, routed.expert_TS, E)
            yield _layer_atlas(name, previous, routed, arrivals_EE, tokens, labels, E, seed)
            before = routed.expert_TS


def _is_text(batch: RecordedBatch) -> np.ndarray:
    """True for the tokens of texts: neither padding, nor start tokens, nor rows that fill."""
    is_row_B1 = batch.row_B[:, None] >= 0
    return batch.is_token_BL & (batch.token_BL != PAD_ID) & is_row_B1


def _read_tokens(record: RoutingRecord, stack: str, labels: Labels) -> _Stack:
    parts = []
    for batch in record.batches([stack], []):
        where = _is_text(batch)
        row_BL = np.broadcast_to(batch.row_B[:, None], where.shape)
        parts.append((batch.token_BL[where], row_BL[where].astype(np.int32)))
    require(
        any(len(token_T) for token_T, _ in parts),
        f"{record.path} has no token of the {stack}; record texts that are not empty",
    )
    token_T, row_T = map(np.concatenate, zip(*parts, strict=True))
    require(
        int(row_T.max()) < len(labels.text_B),
        f"{record.path} has rows up to {row_T.max()}, and labels are given of "
        f"{len(labels.text_B)}; give those of the texts that were recorded",
    )
    return _Stack(token_T, labels.text_B[row_T].astype(np.int32), row_T)


def _read_layer(record: RoutingRecord, stack: str, name: str) -> _Routed:
    experts, gates, sums, num_tokens = [], [], np.zeros(3), 0
    for batch in record.batches([stack], [name]):
        where = _is_text(batch)
        experts.append(batch.expert_NBLS[0][where])
        gates.append(batch.gate_NBLS[0][where])
        dropped = batch.is_dropped_NBLS[0][where].sum() / batch.is_dropped_NBLS.shape[-1]
        probability = batch.prob_NBLR[0, ..., 0][where].sum(dtype=np.float64)
        sums += dropped, probability, batch.margin_NBL[0][where].sum(dtype=np.float64)
        num_tokens += int(where.sum())
    return _Routed(np.concatenate(experts), np.concatenate(gates), *(sums / num_tokens))


def _layer_atlas(
    name: str,
    previous: str | None,
    routed: _Routed,
    arrivals_EE: np.ndarray | None,
    tokens: _Stack,
    labels: Labels,
    num_experts: int,
    seed: int,
) -> LayerAtlas:
    expert_TS, E = routed.expert_TS, num_experts
    num_tokens, num_choices = expert_TS.shape
    counts = token_counts(expert_TS, tokens.token_T, E)
    shuffled_T = np.random.default_rng(seed).permutation(num_tokens)
    by_chance = token_counts(expert_TS[shuffled_T], tokens.token_T, E)
    return LayerAtlas(
        layer=name,
        previous=previous,
        num_tokens=num_tokens,
        num_choices=num_choices,
        load_E=np.bincount(expert_TS.reshape(-1), minlength=E + 1)[:E],
        dropped=routed.dropped,
        probability=routed.probability,
        margin=routed.margin,
        together_EE=coactivations(expert_TS, E),
        arrivals_EE=arrivals_EE,
        specialization=specialization(expert_TS, tokens.text_T, labels, E, seed),
        tokens=counts,
        vocabulary=vocabulary_specialization(counts),
        vocabulary_by_chance=vocabulary_specialization(by_chance),
        typical=[typical_tokens(counts, e, NUM_TYPICAL_TOKENS) for e in range(E)],
        examples=examples(expert_TS, routed.gate_TS, tokens, E),
    )


def coactivations(expert_TS: np.ndarray, num_experts: int) -> np.ndarray:
    """Tokens that chose both experts, `[E, E]`, symmetric; on the diagonal those of one."""
    E = num_experts
    counts = np.zeros(E * E, np.int64)
    for here_T in expert_TS.T:
        for there_T in expert_TS.T:
            is_pair_T = (here_T < E) & (there_T < E)
            # A token chooses an expert once: equal experts are of the same choice.
            pair = here_T[is_pair_T].astype(np.int64) * E + there_T[is_pair_T]
            counts += np.bincount(pair, minlength=E * E)
    return counts.reshape(E, E)


def vocabulary_specialization(counts: TokenCounts, least_times: int = LEAST_TIMES) -> float:
    """The mean over tokens of max_e N(e, id) / N(id) (OLMoE, section 5.4).

    Ids that are seen less than `least_times` are left out; NaN where all are.
    """
    largest_V = np.zeros(len(counts.token_V))
    np.maximum.at(largest_V, counts.index_X, counts.share_X)
    weight_V = np.where(counts.times_V >= least_times, counts.times_V, 0)
    return float(largest_V @ weight_V / weight_V.sum()) if weight_V.any() else math.nan


def permuted_sums(
    value_RX: np.ndarray, label_R: np.ndarray, num_labels: int, num: int, seed: int
) -> Iterator[np.ndarray]:
    """Sums of texts' values by label, `[K, X]`, for `num` random permutations of the labels."""
    rng = np.random.default_rng(seed)
    for _ in range(num):
        yield sums_by_label(value_RX, rng.permutation(label_R), num_labels)


def sums_by_label(value_RX: np.ndarray, label_R: np.ndarray, num_labels: int) -> np.ndarray:
    """Sums of texts' values by label, `[K, X]`."""
    is_label_KR = label_R == np.arange(num_labels)[:, None]
    return is_label_KR.astype(value_RX.dtype) @ value_RX


def specialization(
    expert_TS: np.ndarray,
    text_T: np.ndarray,
    labels: Labels,
    num_experts: int,
    seed: int,
    num_permutations: int = NUM_PERMUTATIONS,
) -> Specialization:
    """What labels and experts tell of each other.

    A p-value is (1 + permutations that are as large) / (1 + permutations): Phipson and Smyth
    2010 (arXiv:1603.05766).
    """
    E, R, K = num_experts, len(labels.label_R), len(labels.names)
    is_choice_TS = expert_TS < E
    text_TS = np.broadcast_to(text_T[:, None], expert_TS.shape)[is_choice_TS]
    cells = text_TS.astype(np.int64) * E + expert_TS[is_choice_TS]
    count_RE = np.bincount(cells, minlength=R * E).reshape(R, E)
    tokens_R1 = np.bincount(text_T, minlength=R)[:, None]
    value_RX = np.concatenate([count_RE, tokens_R1], axis=1).astype(np.float64)

    def shares(sums_KX):
        return sums_KX[:, :E] / np.maximum(sums_KX[:, E:], 1)

    observed_KX = sums_by_label(value_RX, labels.label_R, K)
    observed_KE, told = shares(observed_KX), information(observed_KX[:, :E])
    as_large_KE, permuted = np.zeros((K, E)), []
    if K > 1:
        for sums_KX in permuted_sums(value_RX, labels.label_R, K, num_permutations, seed):
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


def examples(
    expert_TS: np.ndarray, gate_TS: np.ndarray, tokens: _Stack, num_experts: int
) -> list[list[Example]]:
    """The tokens that each expert takes with its largest gates, one of each token id."""
    num_choices, found = expert_TS.shape[1], []
    order = np.lexsort((-gate_TS.reshape(-1), expert_TS.reshape(-1)))
    bounds = np.searchsorted(expert_TS.reshape(-1)[order], np.arange(num_experts + 1))
    for first, end in zip(bounds, bounds[1:], strict=False):
        own = order[first:end][:NUM_CANDIDATES]
        _, index = np.unique(tokens.token_T[own // num_choices], return_index=True)
        best = own[np.sort(index)[:NUM_EXAMPLES]]
        found.append([_example(tokens, i // num_choices, gate_TS.flat[i]) for i in best])
    return found


def _example(tokens: _Stack, place: int, gate: float) -> Example:
    place = int(place)
    window = slice(max(place - CONTEXT, 0), place + CONTEXT + 1)
    is_own = tokens.row_T[window] == tokens.row_T[place]
    here = place - window.start
    ids, is_before = tokens.token_T[window], np.arange(len(is_own)) < here
    is_after = np.arange(len(is_own)) > here
    return Example(
        int(tokens.text_T[place]),
        ids[is_own & is_before].tolist(),
        int(tokens.token_T[place]),
        ids[is_own & is_after].tolist(),
        float(gate),
    )


@dataclasses.dataclass(frozen=True)
class KnockOuts:
    """The loss of a model without one expert, for each of X experts removed alone.

    Attributes:
        layers, experts: the removed expert's Switch layer and its number, X of both.
        loss_K: nats a target token of each label, nothing removed.
        change_XK: loss without the expert less `loss_K`.
        p_XK: share of permutations of the labels among texts for which the label's change
            exceeds that of all others by as much; NaN where there is one label.
        tokens_K, texts_K: target tokens and texts of each label.
        num_all: experts of all layers, of which X were removed.
    """

    layers: list[str]
    experts: list[int]
    loss_K: np.ndarray
    change_XK: np.ndarray
    p_XK: np.ndarray
    tokens_K: np.ndarray
    texts_K: np.ndarray
    num_all: int

    def row(self, layer: str, expert: int) -> int | None:
        """The row of an expert; None where it was not removed."""
        pairs = list(zip(self.layers, self.experts, strict=True))
        return pairs.index((layer, expert)) if (layer, expert) in pairs else None


def knock_outs(
    removed: Sequence[tuple[str, int]],
    loss_R: np.ndarray,
    loss_XR: np.ndarray,
    tokens_R: np.ndarray,
    labels: Labels,
    num_all: int,
    seed: int = 0,
    num_permutations: int = NUM_PERMUTATIONS,
) -> KnockOuts:
    """Changes of loss by label, and how they compare with permuted labels.

    Args:
        removed: layer and expert of each removal.
        loss_R, loss_XR: sums of the negative log-likelihoods of each text's target tokens, in
            nats, with all experts and without one.
        tokens_R: target tokens of each text; 0 leaves it out.
    """
    is_used_R, K = tokens_R > 0, len(labels.names)
    label_R = labels.label_R[is_used_R]
    change_RX = (loss_XR - loss_R).T
    value_RX = np.concatenate([change_RX, tokens_R[:, None]], axis=1)[is_used_R]
    total_X = value_RX.sum(axis=0)

    def excess(sums_KX):
        """A label's change a token less that of all other labels."""
        others_KX = total_X - sums_KX
        return _means(sums_KX) - _means(others_KX)

    observed_KX = sums_by_label(value_RX, label_R, K)
    p_KX = np.full((K, len(removed)), math.nan)
    if K > 1:
        excess_KX, as_large_KX = excess(observed_KX), np.zeros(p_KX.shape)
        for sums_KX in permuted_sums(value_RX, label_R, K, num_permutations, seed):
            as_large_KX += excess(sums_KX) >= excess_KX - 1e-12
        p_KX = (1 + as_large_KX) / (1 + num_permutations)
    loss_K1 = sums_by_label(np.stack([loss_R, tokens_R], axis=1)[is_used_R], label_R, K)
    return KnockOuts(
        [layer for layer, _ in removed],
        [expert for _, expert in removed],
        _means(loss_K1)[:, 0],
        _means(observed_KX).T,
        p_KX.T,
        observed_KX[:, -1].astype(np.int64),
        np.bincount(label_R, minlength=K),
        num_all,
    )


def _means(sums_KX: np.ndarray) -> np.ndarray:
    """All columns but the last, divided by the last."""
    return sums_KX[:, :-1] / np.maximum(sums_KX[:, -1:], 1)


def specialists(layers: Sequence[LayerAtlas]) -> list[tuple[str, int]]:
    """For each label the expert, of any layer, that takes most more of the label's tokens than
    of the others': the largest N(e, label) / N(label) - N(e, others) / N(others)."""
    found = []
    for k in range(len(layers[0].specialization.tokens_K)):
        best = (-math.inf, layers[0].layer, 0)
        for layer in layers:
            own = layer.specialization
            tokens = own.tokens_K.sum() - own.tokens_K[k]
            others_E = (layer.load_E - own.count_EK[:, k]) / max(tokens, 1)
            excess_E = own.share_EK[:, k] - others_E
            e = int(np.argmax(excess_E))
            best = max(best, (float(excess_E[e]), layer.layer, e), key=lambda each: each[0])
        found.append(best[1:])
    return found


@dataclasses.dataclass(frozen=True)
class Flips:
    """Choices of two models for the same tokens, of one Switch layer.

    Attributes:
        differing: share of the tokens whose set of experts is another.
        overlap: mean share of the second's experts that the first chose, too.
    """

    layer: str
    differing: float
    overlap: float


def flips(one: RoutingRecord, other: RoutingRecord) -> list[Flips] | str:
    """Where two records of the same texts differ; or why they cannot be compared."""
    if one.info.layers != other.info.layers:
        return "the models have other Switch layers"
    E = one.info.switch.num_experts
    if other.info.switch.num_experts != E:
        return f"the models have {E} and {other.info.switch.num_experts} experts"
    found = []
    for stack, names in one.info.layers.items():
        for name in names:
            pair = [_sorted_choices(record, stack, name) for record in (one, other)]
            (place, here_TS), (other_place, there_TS) = pair
            if not np.array_equal(place, other_place):
                return "the models read other token ids of the texts"
            sets = [np.sort(each, axis=1) for each in (here_TS, there_TS)]
            is_same = here_TS.shape == there_TS.shape
            differing = 1.0 - (float((sets[0] == sets[1]).all(axis=1).mean()) if is_same else 0)
            overlap = float(saturation(here_TS[None], there_TS[None], E)[0])
            found.append(Flips(name, differing, overlap))
    return found


def _sorted_choices(record: RoutingRecord, stack: str, name: str):
    """Row, place and id of each token, `[T, 3]`, in their order, and the experts it chose."""
    places, experts = [], []
    for batch in record.batches([stack], [name]):
        where = _is_text(batch)
        row, place = np.nonzero(where)
        places.append(np.stack([batch.row_B[row], place, batch.token_BL[where]], axis=1))
        experts.append(batch.expert_NBLS[0][where])
    place_T3, expert_TS = np.concatenate(places), np.concatenate(experts)
    order = np.lexsort((place_T3[:, 1], place_T3[:, 0]))
    return place_T3[order], expert_TS[order]
