# SPDX-License-Identifier: Apache-2.0
"""The drift of two records: against a loop over tokens, bounds, and records of other things."""

import math

import numpy as np
import pytest

from switchx.analysis.drift import drift, loss_drift
from switchx.moe.config import RouterConfig, SwitchConfig
from switchx.routing_record import RecordInfo, RecordWriter, StackRecord, open_record
from tests.data.refusals import refused

E, LAYERS = 5, {"decoder": ["decoder 1", "decoder 3"]}


def switch_of(ranks: int) -> SwitchConfig:
    return SwitchConfig(E, router=RouterConfig(num_selected=ranks))


def probabilities(seed: int, noise: float) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(size=(2, 4, 6, E))
    logits += noise * np.random.default_rng(seed + 1).normal(size=logits.shape)
    return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


def write(path, prob_NBLE, ranks: int, **changes):
    """A record of one batch; some of its places are padding."""
    switch = changes.pop("switch", switch_of(ranks))
    rank = np.argsort(-prob_NBLE, axis=-1)
    prob = np.take_along_axis(prob_NBLE, rank, -1)
    last = min(ranks, E - 1)
    margin = prob[..., last - 1] - prob[..., last]
    segment = np.ones((4, 6), np.int32)
    segment[1, 3:] = 0
    token = np.arange(24).reshape(4, 6) * segment + changes.pop("first", 0)
    nothing = np.zeros((*rank.shape[:-1], ranks), bool)
    part = StackRecord(
        *(token, segment, rank[..., :ranks].astype(np.int16)),
        *(prob[..., :ranks].astype(np.float32), margin.astype(np.float32), nothing, rank),
    )
    info = RecordInfo(switch, changes.pop("layers", LAYERS), 1, "eval", **changes)
    with RecordWriter(path, info) as writer:
        writer.add(0, {"decoder": part}, 4)
    return open_record(path)


def loop(p_NBLE, q_NBLE, n: int, ranks: int):
    """Other sets, overlap and KL of each token of a layer, one by one."""
    tokens = [(b, i) for b in range(4) for i in range(6) if not (b == 1 and i >= 3)]
    for b, i in tokens:
        p, q = p_NBLE[n, b, i], q_NBLE[n, b, i]
        first, second = (set(np.argsort(-x)[:ranks].tolist()) for x in (p, q))
        both = sorted(first & second)
        p_parts, q_parts = ([*x[both], 1 - x[both].sum()] for x in (p, q))
        pairs = zip(p_parts, q_parts, strict=True)
        kl = sum(x * math.log(x / y) for x, y in pairs if x > 1e-6)
        yield first != second, len(both) / ranks, kl, float(np.sum(p * np.log(p / q)))


@pytest.mark.parametrize("ranks", [1, 2, E])
def test_sums_are_those_of_a_loop_over_tokens(tmp_path, ranks):
    p, q = probabilities(0, 0.0), probabilities(0, 0.6)
    a, b = write(tmp_path / "a", p, ranks), write(tmp_path / "b", q, ranks)
    found = drift(a, b)
    for n, layer in enumerate(LAYERS["decoder"]):
        differs, overlap, kl, whole = map(np.array, zip(*loop(p, q, n, ranks), strict=True))
        each = found[layer]
        assert each.tokens == 21 and each.differing == differs.sum()
        assert each.overlap == pytest.approx(overlap.mean())
        assert each.kl == pytest.approx(kl.sum(), rel=1e-4, abs=1e-5)
        assert each.kl <= whole.sum() * (1 + 1e-5)
        assert (each.differing > 0) == (ranks < E)
        if ranks == E:
            assert each.kl == pytest.approx(whole.sum(), rel=1e-4)


def test_scores_that_are_no_shares_have_no_divergence(tmp_path):
    """Of sigmoids, which need not sum to one."""
    router = RouterConfig(num_selected=2, score="sigmoid", gate="score")
    switch = SwitchConfig(E, router=router)
    a = write(tmp_path / "a", probabilities(0, 0.0), 2, switch=switch)
    found = drift(a, write(tmp_path / "b", probabilities(0, 0.6), 2, switch=switch))
    assert {each.kl for each in found.values()} == {None} and found["decoder 1"].overlap < 1


def test_choices_flip_where_the_margin_is_at_most_twice_the_change(tmp_path):
    # With all scores known, and what the record has of the margins.
    p, q = probabilities(3, 0.0), probabilities(3, 0.2)
    found = drift(write(tmp_path / "a", p, 1), write(tmp_path / "b", q, 1))
    for n, layer in enumerate(LAYERS["decoder"]):
        is_token = np.ones((4, 6), bool)
        is_token[1, 3:] = False
        ordered = np.sort(p[n], axis=-1)
        margin = (ordered[..., -1] - ordered[..., -2])[is_token]
        flips = (p[n].argmax(-1) != q[n].argmax(-1))[is_token]
        change = np.abs(p[n] - q[n]).max(-1)[is_token]
        assert (margin[flips] <= 2 * change[flips]).all()
        each = found[layer]
        assert each.largest_flipped_margin == pytest.approx(margin[flips].max(initial=0))
        for quantile in (0.1, 0.5, 0.9):
            want = np.quantile(margin, quantile, method="inverted_cdf")
            assert each.margin(quantile) == pytest.approx(want, rel=0.03)
            if flips.any():
                want = np.quantile(margin[flips], quantile, method="inverted_cdf")
                assert each.margin(quantile, flipped=True) == pytest.approx(want, rel=0.03)
    same = open_record(tmp_path / "a")
    assert drift(same, same)["decoder 1"].margin(0.5, flipped=True) is None
    a, b = np.log([0.5, 0.2, 0.9]), np.log([0.4, 0.5, 0.9])
    d = a - b
    assert loss_drift(a, b) == pytest.approx(
        {
            "loss_a": -a.mean(),
            "loss_b": -b.mean(),
            "mean_change": np.abs(d).mean(),
            "k3": np.mean(np.array([0.4 / 0.5, 0.5 / 0.2, 1]) - 1 + d),
            "far_share": 1 / 3,
        }
    )


def test_records_of_other_things_are_refused_by_name(tmp_path):
    p = probabilities(0, 0.0)
    a = write(tmp_path / "a", p, 1, vocabulary="words")
    others = {
        "Switch layers decoder 1, decoder 3, decoder 0, decoder 2": {
            "layers": {"decoder": ["decoder 0", "decoder 2"]}
        },
        "experts 5, 6": {"switch": SwitchConfig(6)},
        "router top_k, hash": {
            "switch": SwitchConfig(E, router=RouterConfig(kind="hash", exploration="none"))
        },
        "are of two vocabularies": {"vocabulary": "pieces"},
        "batch 0 has other tokens in its decoder": {"first": 1},
    }
    for said, changes in others.items():
        with refused(said):
            drift(a, write(tmp_path / "b", p, 1, **changes))
    with refused("experts a token 1, 2"):
        drift(a, write(tmp_path / "b", p, 2))
    p[1, 2, 4] = np.nan
    with refused(f"{tmp_path / 'b'} has router probabilities that are no numbers, in batch 0"):
        drift(a, write(tmp_path / "b", p, 1, vocabulary="words"))
    p = probabilities(0, 0.0)
    (part,) = write(tmp_path / "b", p, 1).batches()
    with RecordWriter(tmp_path / "c", part.info) as writer:
        writer.add(0, {"decoder": part}, 4)
        writer.add(1, {"decoder": part}, 4)
    with refused(f"({tmp_path / 'a'} ends before {tmp_path / 'c'})"):
        drift(a, open_record(tmp_path / "c"))
    with RecordWriter(tmp_path / "d", part.info) as writer:
        writer.add(0, {"decoder": part.first(2)}, 2)
    with refused("batch 0 has other rows or lengths"):
        drift(a, open_record(tmp_path / "d"))
