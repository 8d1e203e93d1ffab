# SPDX-License-Identifier: Apache-2.0
"""Where two models route tokens differently: precisions, artifacts, checkpoints, meshes.

Two records (`switchx/routing_record.py`) of the same rows are read side by side. A token's
routing differs if the *set* of its experts does; their order does not matter. A choice can only
flip if the margin of the last choice over the next expert is at most twice the largest change
of a score, so flips are at small margins if two runs differ only by rounding.
Dims: B rows, L places of a row, N Switch layers, T tokens, S choices, R ranks,
E experts, M bins of margins
"""

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from switchx.fields import require
from switchx.routing_record import RecordedBatch, RoutingRecord

# Margins are counted in bins 2.3% wide, from 1e-8; those below are nearly ties.
_EDGES_M = np.concatenate([[0.0], np.logspace(-8, 1, 901)])


def _no_margins() -> np.ndarray:
    return np.zeros(len(_EDGES_M) - 1, np.int64)


@dataclasses.dataclass
class LayerDrift:
    """Sums over the tokens of one Switch layer that are in two records.

    Attributes:
        tokens: number of tokens that are routed in both.
        differing: number of tokens whose sets of experts differ.
        common: share of a token's experts in a that it also has in b, summed over tokens.
        kl: sum over tokens of KL(a || b) between router probabilities, with the experts that
            are not ranked in both records counted as one: at most the whole divergence, and
            equal to it if all experts are ranked. None if a router's gates are scores that need
            not sum to one.
        largest_change: largest change of a probability, of experts that both rank.
        largest_flipped_margin: largest margin, in a, of a token whose set differs.
        margins_M, flipped_margins_M: tokens by their margins in a: all, and those whose sets
            differ.
    """

    tokens: int = 0
    differing: int = 0
    common: float = 0.0
    kl: float | None = 0.0
    largest_change: float = 0.0
    largest_flipped_margin: float = 0.0
    margins_M: np.ndarray = dataclasses.field(default_factory=_no_margins)
    flipped_margins_M: np.ndarray = dataclasses.field(default_factory=_no_margins)

    @property
    def differing_share(self) -> float:
        return self.differing / max(self.tokens, 1)

    @property
    def overlap(self) -> float:
        """Mean share of a token's experts that both records have."""
        return self.common / max(self.tokens, 1)

    def margin(self, quantile: float, *, flipped: bool = False) -> float | None:
        """A quantile of the margins, accurate to 2.3%; None without tokens."""
        count_M = self.flipped_margins_M if flipped else self.margins_M
        if not count_M.any():
            return None
        index = np.searchsorted(np.cumsum(count_M), quantile * count_M.sum())
        return float(_EDGES_M[index + 1])

    def add(self, num_experts: int, chosen, ranks, probs, margin_T) -> None:
        """Adds tokens.

        Args:
            num_experts: E, which also stands for no expert.
            chosen: `[T, S]` sorted experts of a and of b.
            ranks, probs: `[T, R]` experts by rank, and their probabilities, of a and of b.
            margin_T: margins in a.
        """
        a_TS, b_TS = chosen
        differs_T = (a_TS != b_TS).any(axis=-1)
        self.tokens += len(differs_T)
        self.differing += int(differs_T.sum())
        is_expert_TS = a_TS < num_experts
        is_common_TS = (a_TS[:, :, None] == b_TS[:, None, :]).any(axis=-1) & is_expert_TS
        number_T = is_expert_TS.sum(axis=-1)
        common_T = is_common_TS.sum(axis=-1) / np.maximum(number_T, 1)
        self.common += float(np.where(number_T > 0, common_T, ~differs_T).sum())
        margin_T = np.clip(margin_T, 0, _EDGES_M[-1])
        self.margins_M += np.histogram(margin_T, _EDGES_M)[0]
        self.flipped_margins_M += np.histogram(margin_T[differs_T], _EDGES_M)[0]
        flipped = float(margin_T[differs_T].max(initial=0))
        self.largest_flipped_margin = max(self.largest_flipped_margin, flipped)
        is_same_TRR = ranks[0][:, :, None] == ranks[1][:, None, :]
        p_TR, b_TR = (prob_TR.astype(np.float64) for prob_TR in probs)
        q_TR = np.where(is_same_TRR, b_TR[:, None, :], 0.0).sum(axis=-1)
        is_both_TR = is_same_TRR.any(axis=-1)
        change = np.abs(p_TR - q_TR)[is_both_TR].max(initial=0)
        self.largest_change = max(self.largest_change, float(change))
        p_TR, q_TR = (np.where(is_both_TR, x, 0.0) for x in (p_TR, q_TR))
        rest_p_T, rest_q_T = (np.maximum(1 - x.sum(axis=-1), 0) for x in (p_TR, q_TR))
        if self.kl is not None:
            self.kl += float(_divergence(p_TR, q_TR) + _divergence(rest_p_T, rest_q_T))


def _divergence(p, q) -> float:
    """The sum of p log(p / q) + q - p, which is not negative; 0 where p is 0."""
    tiny = np.finfo(np.float32).tiny
    logs = np.log(np.maximum(p, tiny)) - np.log(np.maximum(q, tiny))
    return float(np.sum(np.where(p > 0, p * logs, 0.0) + q - p))


def drift(a: RoutingRecord, b: RoutingRecord) -> dict[str, LayerDrift]:
    """The differences between two records of the same rows, by layer.

    Raises:
        ValueError: as for `paired_batches`.
    """
    # Such gates are the scores themselves, which need not sum to one.
    has_shares = "score" not in (a.info.switch.router.gate, b.info.switch.router.gate)
    found = {layer: LayerDrift(kl=0.0 if has_shares else None) for layer in a.info.all_layers}
    for both in paired_batches(a, b):
        is_routed_BL = both[0].is_token_BL & both[1].is_token_BL
        for record, batch in zip((a, b), both, strict=True):
            require(
                np.isfinite(batch.prob_NBLR[:, is_routed_BL]).all(),
                f"{record.path} has router probabilities that are no numbers, in batch "
                f"{batch.number}: its model had diverged; record an earlier checkpoint",
            )
        for n, layer in enumerate(both[0].layers):
            found[layer].add(
                a.info.switch.num_experts,
                [_chosen(batch, n)[is_routed_BL] for batch in both],
                [batch.rank_NBLR[n][is_routed_BL] for batch in both],
                [batch.prob_NBLR[n][is_routed_BL] for batch in both],
                both[0].margin_NBL[n][is_routed_BL],
            )
    return found


def paired_batches(
    a: RoutingRecord, b: RoutingRecord
) -> Iterator[tuple[RecordedBatch, RecordedBatch]]:
    """The batches of two records of the same rows.

    Raises:
        ValueError: the records differ in layers, experts, vocabularies or rows, or one of
            them cannot be read.
    """
    _require_comparable(a, b)
    for first, second in itertools.zip_longest(a.batches(), b.batches()):
        _require_same_rows(a, b, first, second)
        yield first, second


def _chosen(batch: RecordedBatch, n: int) -> np.ndarray:
    """`[B, L, S]` experts that tokens would choose, sorted by number."""
    if batch.info.has_choosing_experts:
        return np.sort(batch.chosen_NBLS[n], axis=-1)
    return np.sort(batch.rank_NBLR[n, ..., : batch.info.num_choices], axis=-1)


def _require_comparable(a: RoutingRecord, b: RoutingRecord) -> None:
    def about(info):
        router = info.switch.router
        return {
            "Switch layers": ", ".join(info.all_layers),
            "experts": info.switch.num_experts,
            "experts a token": router.num_selected,
            "router": router.kind,
        }

    first, second = about(a.info), about(b.info)
    wrong = [f"{name} {x}, {second[name]}" for name, x in first.items() if x != second[name]]
    require(
        not wrong,
        f"{a.path} and {b.path} are of other models ({'; '.join(wrong)}); give two records of "
        "models of one shape",
    )
    vocabularies = {a.info.vocabulary, b.info.vocabulary} - {None}
    require(
        len(vocabularies) < 2,
        f"{a.path} and {b.path} are of two vocabularies: a token of one is no token of the "
        "other; give records of one vocabulary",
    )


def _require_same_rows(a, b, first: RecordedBatch | None, second: RecordedBatch | None) -> None:
    wrong = None
    if first is None or second is None:
        shorter, longer = (a, b) if first is None else (b, a)
        wrong = f"{shorter.path} ends before {longer.path}"
    elif (first.stack, first.token_BL.shape) != (second.stack, second.token_BL.shape):
        wrong = f"batch {first.number} has other rows or lengths"
    elif not all(
        np.array_equal(getattr(first, name), getattr(second, name))
        for name in ("row_B", "token_BL", "segment_BL")
    ):
        wrong = f"batch {first.number} has other tokens in its {first.stack}"
    require(
        wrong is None,
        f"{a.path} and {b.path} are not of the same inputs ({wrong}); record both with the "
        "same data, batch size and number of places",
    )


def loss_drift(logprob_a_T: np.ndarray, logprob_b_T: np.ndarray) -> dict[str, float]:
    """The difference between two models' log-probabilities of the same target tokens.

    Returns:
        loss_a, loss_b: mean negative log-likelihoods per token, in nats.
        mean_change: mean of |d|, where d is the log-probability in a minus that in b.
        k3: mean of e^-d - 1 + d, a nonnegative estimate of KL(a || b) of the tokens.
        far_share: share of the tokens with |d| > ln 2.
    """
    d_T = logprob_a_T - logprob_b_T
    return {
        "loss_a": float(-logprob_a_T.mean()),
        "loss_b": float(-logprob_b_T.mean()),
        "mean_change": float(np.abs(d_T).mean()),
        "k3": float(np.mean(np.expm1(-d_T) + d_T)),
        "far_share": float(np.mean(np.abs(d_T) > np.log(2))),
    }
