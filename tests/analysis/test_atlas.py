# SPDX-License-Identifier: Apache-2.0
"""The atlas' numbers against loops over tokens, exact enumeration and scipy."""

import collections
import dataclasses
import itertools
import math
import re
import subprocess
import sys

import numpy as np
import pyarrow.parquet
import pytest
import scipy.stats

from switchx.analysis import atlas
from switchx.analysis.atlas import Atlas, Labels
from switchx.analysis.atlas_page import differences, overview, sections
from switchx.analysis.atlas_tables import TableFolder, layer_tables, model_tables
from switchx.analysis.drift import drift
from switchx.analysis.drops import FEW, Drops, DropsByFactor, prediction_errors
from switchx.analysis.report import page
from switchx.analysis.routing import read_snapshots
from switchx.analysis.slots import setting_of
from switchx.models.config import RouterConfig, SwitchConfig
from switchx.routing_record import RecordInfo, RecordWriter, StackRecord, open_record
from tests.analysis.parsed_page import Parser
from tests.data.refusals import refused
from tests.processes import ROOT

E, S, B, L, V = 6, 2, 8, 16, 9
LAYERS = {"encoder": ["encoder 1", "encoder 3"], "decoder": ["decoder 1"]}


def random_part(rng, num_layers: int, rows=B, length=L, experts=E, choices=S, ids=V):
    """Rows of random lengths; experts by probabilities that differ from token to token."""
    shape = (num_layers, rows, length)
    rank = np.argsort(rng.random((*shape, experts), np.float32), axis=-1)[..., :choices]
    prob = -np.sort(-rng.random((*shape, choices), np.float32) / choices, axis=-1)
    is_token = np.arange(length) < rng.integers(length // 2, length + 1, (rows, 1))
    return StackRecord(
        token_BL=np.where(is_token, rng.integers(1, ids, (rows, length)), 0).astype(np.int32),
        segment_BL=is_token.astype(np.int32),
        rank_NBLR=rank.astype(np.int16),
        prob_NBLR=prob,
        margin_NBL=rng.random(shape, np.float32),
        is_dropped_NBLS=(rng.random((*shape, choices)) < 0.2) & is_token[..., None],
        expert_NBLS=rank.astype(np.int16),
    )


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """Rows 0, 1, ...; the last two rows of the last batch only fill it."""
    path, rng = (
        tmp_path_factory.mktemp("atlas") / "step_000000.parquet",
        np.random.default_rng(0),
    )
    router = RouterConfig(num_selected=S, overflow="dropless")
    info = RecordInfo(SwitchConfig(E, router=router, expert_capacity=1), LAYERS, 0, "score")
    with RecordWriter(path, info) as writer:
        for number, ids in enumerate(np.arange(3 * B).reshape(3, B)):
            parts = {stack: random_part(rng, len(names)) for stack, names in LAYERS.items()}
            parts["decoder"].token_BL[:, 0] = 0  # the start token
            writer.add(number, parts, B, np.where(ids < 3 * B - 2, ids, -1))
    return open_record(path)


@pytest.fixture(scope="module")
def labels():
    """Two rows a text, three labels."""
    return Labels(("a", "b", "c"), np.arange(11) % 3, np.arange(22) // 2)


@pytest.fixture(scope="module")
def layers(record, labels):
    return list(atlas.read_layers(record, labels))


Seen = collections.namedtuple("Seen", "row token experts gates prob margin dropped")


def tokens_of(record, layer: str) -> list[Seen]:
    """Tokens of texts as a loop finds them."""
    found = []
    for batch in record.batches([layer.split()[0]], [layer]):
        for (b, place), token in np.ndenumerate(batch.token_BL):
            row, at = int(batch.row_B[b]), (0, b, place)
            if row < 0 or not batch.segment_BL[b, place] or not token:
                continue
            experts, gates = batch.expert_NBLS[at].tolist(), batch.prob_NBLR[at].tolist()
            dropped = int(batch.is_dropped_NBLS[at].sum())
            margin = float(batch.margin_NBL[at])
            found.append(Seen(row, int(token), experts, gates, gates[0], margin, dropped))
    return found


def test_layers_by_a_loop_over_tokens(record, labels, layers):
    assert [each.layer for each in layers] == ["encoder 1", "encoder 3", "decoder 1"]
    assert [each.previous for each in layers] == [None, "encoder 1", None]
    for layer in layers:
        seen = tokens_of(record, layer.layer)
        shapes = (E, (E, E), (E, 3), 3)
        load, together, by_label, of_label = (np.zeros(shape, int) for shape in shapes)
        for each in seen:
            k = labels.label_R[labels.text_B[each.row]]
            of_label[k] += 1
            for i in each.experts:
                load[i] += 1
                by_label[i, k] += 1
                for j in each.experts:
                    together[i, j] += 1
        assert layer.num_tokens == len(seen) and layer.num_choices == S
        np.testing.assert_array_equal(layer.load_E, load)
        np.testing.assert_array_equal(layer.together_EE, together)
        np.testing.assert_array_equal(layer.specialization.count_EK, by_label)
        np.testing.assert_array_equal(layer.specialization.tokens_K, of_label)
        np.testing.assert_allclose(layer.specialization.share_EK, by_label / of_label)
        assert layer.probability == pytest.approx(np.mean([each.prob for each in seen]))
        assert layer.margin == pytest.approx(np.mean([each.margin for each in seen]))
        assert layer.dropped == pytest.approx(
            sum(each.dropped for each in seen) / len(seen) / S
        )
        effective = math.exp(scipy.stats.entropy(load))
        assert layer.effective_experts == pytest.approx(effective)
        for i, j in itertools.permutations(range(E), 2):
            assert layer.coactivation_EE[i, j] == pytest.approx(together[i, j] / load[i])
        # Of a random router each pair is as likely: (S - 1) / (E - 1) on average.
        off = layer.coactivation_EE[~np.eye(E, dtype=bool)].reshape(E, E - 1)
        np.testing.assert_allclose(off.sum(axis=1), S - 1)
        assert layer.together_by_chance == pytest.approx((S - 1) / (E - 1))
    # Experts that choose: token t is chosen by the first t experts, of 3.
    chosen_TS = np.where(np.arange(3) < np.arange(4)[:, None], np.arange(3), 3)
    own = dataclasses.replace(
        layers[0], load_E=np.bincount(chosen_TS.ravel())[:3],
        together_EE=atlas.coactivations(chosen_TS, 3),
    )  # fmt: skip
    assert own.together_by_chance == pytest.approx((0 + 0 + 2 + 6) / (2 * (1 + 2 + 3)))


def test_arrivals_by_a_loop(record, layers):
    want = np.zeros((E, E))
    for here, there in zip(
        tokens_of(record, "encoder 1"), tokens_of(record, "encoder 3"), strict=True
    ):
        for i, j in itertools.product(here.experts, there.experts):
            want[i, j] += 1 / S**2
    np.testing.assert_allclose(layers[1].arrivals_EE, want)
    assert layers[0].arrivals_EE is None and layers[2].arrivals_EE is None


def test_vocabulary_by_a_loop(record, layers):
    for layer in layers:
        seen = tokens_of(record, layer.layer)
        times = collections.Counter(each.token for each in seen)
        chosen = collections.Counter((e, each.token) for each in seen for e in each.experts)
        counts = layer.tokens
        cells = zip(
            counts.expert_X, counts.token_V[counts.index_X], counts.count_X, strict=True
        )
        assert {(e, token): count for e, token, count in cells} == chosen
        frequent = {token: n for token, n in times.items() if n >= atlas.LEAST_TIMES}
        assert frequent
        largest = sum(max(chosen[e, token] for e in range(E)) for token in frequent)
        assert layer.vocabulary == pytest.approx(largest / sum(frequent.values()))
        shuffled_T = np.random.default_rng(0).permutation(len(seen))
        pairs = zip(seen, shuffled_T, strict=True)
        chosen = collections.Counter(
            (e, each.token) for each, i in pairs for e in seen[i].experts
        )
        largest = sum(max(chosen[e, token] for e in range(E)) for token in frequent)
        assert layer.vocabulary_by_chance == pytest.approx(largest / sum(frequent.values()))


def test_examples_are_the_surest_tokens_among_their_neighbours(record, labels, layers):
    for layer in layers:
        seen = tokens_of(record, layer.layer)
        for e, found in enumerate(layer.examples):
            own = [(each.gates[each.experts.index(e)], i)
                   for i, each in enumerate(seen) if e in each.experts]  # fmt: skip
            want, ids = [], set()
            for gate, i in sorted(own, key=lambda pair: -pair[0]):
                if seen[i].token not in ids and len(want) < atlas.NUM_EXAMPLES:
                    ids.add(seen[i].token)
                    row = [j for j in range(len(seen)) if seen[j].row == seen[i].row]
                    near = [j for j in row if abs(j - i) <= atlas.CONTEXT]
                    want.append(
                        atlas.Example(
                            int(labels.text_B[seen[i].row]),
                            [seen[j].token for j in near if j < i],
                            seen[i].token,
                            [seen[j].token for j in near if j > i],
                            gate,
                        )
                    )
            assert found == want


def labelled(strength: float, rng, texts: int = 24, tokens: int = 20):
    """Choices of one expert a token, of texts of two labels that prefer their own half."""
    label_R = np.arange(texts) % 2
    text_T = np.repeat(np.arange(texts), tokens)
    own = (rng.random(len(text_T)) < strength) * label_R[text_T]
    expert_T = np.where(own > 0, 1, rng.integers(0, 4, len(text_T)))
    return (
        expert_T[:, None].astype(np.int16),
        text_T,
        Labels(("x", "y"), label_R, np.arange(texts)),
    )


def test_information_is_that_of_scipy():
    expert_TS, text_T, labels = labelled(0.5, np.random.default_rng(0))
    found = atlas.specialization(expert_TS, text_T, labels, 4, seed=0)
    table = np.zeros((4, 2))
    np.add.at(table, (expert_TS[:, 0], labels.label_R[text_T]), 1)
    # The statistic of the G-test is 2 n I.
    g = scipy.stats.chi2_contingency(
        table, correction=False, lambda_="log-likelihood"
    ).statistic
    assert found.mutual == pytest.approx(g / (2 * table.sum()))
    assert found.labels == pytest.approx(scipy.stats.entropy(table.sum(axis=0)))
    assert found.p == 1 / (1 + atlas.NUM_PERMUTATIONS) and found.permuted < found.mutual / 4
    assert found.p_EK[1, 1] == found.p  # expert 1 is of label y, and not of x
    assert found.p_EK[1, 0] == 1.0


def test_labels_that_mean_nothing_are_found_so():
    found = [
        atlas.specialization(
            *labelled(0.0, np.random.default_rng(seed)), 4, seed=0, num_permutations=99
        )
        for seed in range(40)
    ]
    # p-values of a true null hypothesis are uniform.
    assert scipy.stats.kstest([each.p for each in found], "uniform").pvalue > 0.01


def test_permutations_come_near_to_all_of_them():
    """Eight texts have 70 divisions in two labels: p by enumeration."""
    rng = np.random.default_rng(3)
    expert_TS, text_T, labels = labelled(0.15, rng, texts=8, tokens=12)
    found = atlas.specialization(expert_TS, text_T, labels, 4, seed=0)
    count_RE = np.zeros((8, 4))
    np.add.at(count_RE, (text_T, expert_TS[:, 0]), 1)

    def mutual(ones):
        table = np.array([count_RE.sum(axis=0) - count_RE[list(ones)].sum(axis=0),
                          count_RE[list(ones)].sum(axis=0)])  # fmt: skip
        joint = table / table.sum()
        return sum(
            x * math.log(x / (joint[k].sum() * joint[:, e].sum()))
            for (k, e), x in np.ndenumerate(joint)
            if x
        )

    all_of_them = [mutual(ones) for ones in itertools.combinations(range(8), 4)]
    exact = np.mean([each >= found.mutual - 1e-12 for each in all_of_them])
    assert 0.02 < exact < 0.9
    error = math.sqrt(exact * (1 - exact) / atlas.NUM_PERMUTATIONS)
    assert found.p == pytest.approx(exact, abs=4 * error + 0.001)
    assert found.permuted == pytest.approx(np.mean(all_of_them), rel=0.1)


def test_one_label_says_nothing():
    expert_TS, text_T, labels = labelled(0.5, np.random.default_rng(0))
    alone = Labels(("x",), np.zeros_like(labels.label_R), labels.text_B)
    found = atlas.specialization(expert_TS, text_T, alone, 4, seed=0)
    assert (found.mutual, found.labels, found.p) == (pytest.approx(0, abs=1e-12), 0, 1.0)


def test_knock_outs_by_a_loop():
    rng = np.random.default_rng(0)
    labels = Labels(("a", "b", "c"), np.arange(30) % 3, np.arange(30))
    tokens_R = rng.integers(3, 9, 30)
    tokens_R[[4, 11]] = 0  # these were not scored
    loss_R = rng.random(30) * tokens_R
    change_XR = rng.normal(0, 0.1, (2, 30)) * (tokens_R > 0)
    change_XR[1, labels.label_R == 2] += 1.0 * (tokens_R[labels.label_R == 2] > 0)
    removed = [("encoder 1", 3), ("decoder 1", 0)]
    found = atlas.knock_outs(removed, loss_R, loss_R + change_XR, tokens_R, labels, seed=5)
    for k in range(3):
        own = [r for r in range(30) if labels.label_R[r] == k and tokens_R[r]]
        assert found.tokens_K[k] == sum(tokens_R[r] for r in own)
        assert found.texts_K[k] == len(own)
        assert found.loss_K[k] == pytest.approx(loss_R[own].sum() / tokens_R[own].sum())
        for x in range(2):
            change = change_XR[x, own].sum() / tokens_R[own].sum()
            assert found.change_XK[x, k] == pytest.approx(change)
            # Of scipy, an interval of a ratio of sums over resampled pairs.
            ratio = lambda x, y: x.sum() / y.sum()  # noqa: E731
            pairs = change_XR[x, own], tokens_R[own]
            ours = found.low_XK[x, k], found.high_XK[x, k]
            theirs = scipy.stats.bootstrap(
                pairs, ratio, paired=True, vectorized=False, method="percentile", rng=1
            ).confidence_interval
            width = theirs.high - theirs.low
            np.testing.assert_allclose(ours, theirs, atol=0.15 * width)
    assert found.p_XK[1, 2] == 1 / (1 + atlas.NUM_PERMUTATIONS) and found.specialist_K[2] == 1
    assert found.p_XK[1, :2].min() > 0.5 and found.p_XK[0].min() > 0.001
    # A t-test of the same two groups, texts of one length, is of one mind.
    even = np.where(tokens_R > 0, 5, 0)
    p = atlas.knock_outs(removed, loss_R, loss_R + change_XR, even, labels).p_XK[0]
    for k in range(3):
        is_own = (labels.label_R == k)[even > 0]
        sample = change_XR[0, even > 0]
        test = scipy.stats.ttest_ind(sample[is_own], sample[~is_own], alternative="greater")
        assert p[k] == pytest.approx(test.pvalue, abs=0.05)


def test_specialists_are_tested_on_texts_that_did_not_find_them(monkeypatch):
    """Where no expert is special, p-values are uniform though the most special is chosen."""
    monkeypatch.setattr(atlas, "NUM_PERMUTATIONS", 99)
    monkeypatch.setattr(atlas, "NUM_RESAMPLES", 1)
    labels, tokens_R = Labels(("a", "b"), np.arange(40) % 2, np.arange(40)), np.full(40, 5)
    removed, found, chosen = [("encoder 1", e) for e in range(8)], [], []
    for seed in range(60):
        loss_XR = np.random.default_rng(seed).normal(size=(8, 40))
        all_texts = atlas.knock_outs(removed, np.zeros(40), loss_XR, tokens_R, labels, seed)
        x, held_out = all_texts.specialist_K[0], all_texts.held_out
        assert held_out.texts_K.tolist() == [10, 10]
        found.append(held_out.p_XK[x, 0])
        chosen.append(all_texts.p_XK[x, 0])
    assert scipy.stats.kstest(found, "uniform").pvalue > 0.01
    assert scipy.stats.kstest(chosen, "uniform").pvalue < 1e-6


def test_too_few_texts_held_out_give_no_number():
    """One text is all for finding; of two, one is left, which has no spread."""
    label_R = np.array([0] * 8 + [1] + [2] * 2)
    labels, removed = Labels(("a", "b", "c"), label_R, np.arange(11)), [("encoder 1", 0)]
    loss_XR = np.random.default_rng(0).normal(size=(1, 11))
    found = atlas.knock_outs(removed, np.zeros(11), loss_XR, np.full(11, 5), labels)
    held_out = found.held_out
    assert held_out.texts_K.tolist() == [4, 0, 1]
    assert np.isnan(held_out.change_XK[0]).tolist() == [False, True, False]
    assert np.isnan(held_out.p_XK[0]).tolist() == [False, True, False]
    assert np.isnan([held_out.low_XK[0], held_out.high_XK[0]]).tolist() == [
        [False, True, True]
    ] * 2  # fmt: skip
    assert np.isfinite(found.change_XK).all() and np.isnan(found.low_XK[0]).tolist() == [
        False, True, False,
    ]  # fmt: skip


def test_the_largest_taker_takes_most_more_of_its_label(layers):
    for k, (name, e) in enumerate(atlas.largest_takers(layers)):
        excess = {}
        for layer in layers:
            own = layer.specialization
            others = [j for j in range(3) if j != k]
            for i in range(E):
                here = own.count_EK[i, k] / own.tokens_K[k]
                there = own.count_EK[i, others].sum() / own.tokens_K[others].sum()
                excess[layer.layer, i] = here - there
        assert max(excess, key=excess.get) == (name, e)


@pytest.fixture(scope="module")
def mapped(record, labels, layers):
    """An atlas of the record, of which two experts were removed by made-up losses."""
    loss_R, tokens_R = np.ones(11), np.full(11, 5)
    removed = [("encoder 1", 0), ("decoder 1", 3)]
    (sample,) = read_snapshots(record.path.parent)
    errors = {2.0: prediction_errors(record, record)}
    drops = Drops(record, setting_of(record.info, group_size=L))
    return Atlas(
        name="made up",
        labels=labels,
        layers=layers,
        how="as it was made",
        loss_K=np.ones(3),
        drops=DropsByFactor.of(drops, errors, 1.5, slot_bytes=8),
        knock_outs=atlas.knock_outs(removed, loss_R, loss_R + np.eye(2, 11), tokens_R, labels),
        snapshots=[dataclasses.replace(sample, step=step) for step in (0, 5)],
        text_of=lambda ids: "".join(f"<{each}>" for each in ids),
        piece_of="<{}>".format,
        record=record.path,
    )


def test_page_shows_every_section_offline(record, mapped):
    one = sections([mapped])
    assert [each.title for each in one] == [
        "Layers", "Labels", "At a glance", "Experts by label", "Without single experts",
        "Chosen together", "From expert to expert", "Vocabulary", "Examples",
        "Saturation",
    ]  # fmt: skip
    assert len(overview([mapped, mapped]).tables[0].rows) == 2 * 3
    (table,) = differences(drift(record, record)).tables
    assert [row[1:] for row in table.rows] == [["0.00%", "100.00%"]] * 3
    assert "token: another" in differences("another").text
    parsed = Parser(page("made <up>", {}, one))
    assert len(parsed.references) == 6  # a picture each
    assert all(each.startswith("data:image/svg+xml;base64,") for each in parsed.references)
    assert not {"script", "link", "iframe"} & set(parsed.opened)
    assert {"2 of 18 experts", "made <up>"} <= {
        *re.findall(r"\d+ of \d+ experts", one[4].text), *parsed.texts
    }  # fmt: skip
    (specialists,) = one[4].tables
    assert [row[0] for row in specialists.rows] == ["a", "b", "c"]


def test_a_share_of_drops_saves_slots(record, mapped):
    """By a loop over capacities: the first that drops few, and the first that drops none."""
    drops, found = Drops(record, setting_of(record.info, group_size=L)), mapped.drops
    slots = np.arange(1, L + 1)  # of an expert in a group; factor 1 has L S / E of them
    shares = [drops.share(C * E / (L * S)) for C in slots]
    few, none = (next(C for C in slots if shares[C - 1] <= most) for most in (FEW, 0))
    assert 1 < few < none and found.saved == pytest.approx(1 - few / none)
    assert found.saved_bytes == pytest.approx((none - few) * E / L * 8)
    assert {2.0, 1.5, found.least, found.dropless} <= set(found.factor_P.tolist())
    assert (np.diff(found.share_PN, axis=0) <= 0).all() and not found.share_PN[-1].any()


def test_tables_have_all_that_was_counted(mapped, labels, tmp_path):
    with TableFolder(tmp_path, "made up") as tables:
        for layer in mapped.layers:
            layer_tables(tables, layer, labels, mapped.piece_of)
        model_tables(tables, mapped)
    found = {
        file.stem: pyarrow.parquet.read_table(file).to_pylist()
        for file in (tmp_path / "made up").glob("*.parquet")
    }
    assert {row["model"] for rows in found.values() for row in rows} == {"made up"}
    assert len(found["layers"]) == 3 and len(found["experts"]) == 3 * E
    for layer in mapped.layers:
        own = {name: [row for row in rows if row["layer"] == layer.layer]
               for name, rows in found.items()}  # fmt: skip
        assert [row["choices"] for row in own["experts"]] == layer.load_E.tolist()
        assert sum(row["choices"] for row in own["labels"]) == layer.load_E.sum()
        assert sum(row["tokens"] for row in own["coactivation"]) == layer.num_tokens * S * (
            S - 1
        )
        times = {row["token"]: row["times"] for row in own["vocabulary"]}
        chosen = sum(row["choices"] for row in own["vocabulary"])
        assert chosen == S * sum(times.values())
        assert len(own["examples"]) == sum(map(len, layer.examples))
    (moved,) = {(row["layer"], row["next_layer"]) for row in found["transitions"]}
    assert moved == ("encoder 1", "encoder 3")
    total = sum(row["tokens"] for row in found["transitions"])
    assert total == pytest.approx(mapped.layers[0].num_tokens)
    assert len(found["knockouts"]) == 2 * 3 and len(found["saturation"]) == 2 * 3


def test_labels_of_other_texts_are_refused(record):
    few = Labels(("a",), np.zeros(2, int), np.arange(2))
    with refused("has rows up to 21, and labels are given of 2"):
        list(atlas.read_layers(record, few))


COST = """
import pathlib, sys, time
import numpy as np
from switchx.analysis.atlas import Atlas, Labels, read_layers
from switchx.analysis.atlas_page import sections
from switchx.analysis.atlas_tables import TableFolder, layer_tables, model_tables
from switchx.analysis.report import page
from switchx.routing_record import open_record
from tests.processes import peak_rss_bytes

begin, folder, rows = time.perf_counter(), pathlib.Path(sys.argv[1]), int(sys.argv[2])
labels = Labels(("a", "b", "c", "d"), np.arange(rows) % 4, np.arange(rows))
layers, piece = [], "piece{:06d}".format
with TableFolder(folder / "tables", "random") as tables:
    for layer in read_layers(open_record(folder / "record.parquet"), labels):
        layer_tables(tables, layer, labels, piece)
        layers.append(layer.without_tokens())
    atlas = Atlas(
        "random", labels, layers, "", np.zeros(4), "random", None, [],
        lambda ids: " ".join(map(piece, ids)), piece, folder,
    )
    model_tables(tables, atlas)
text = page("random", {}, sections([atlas]))
seconds = time.perf_counter() - begin
peak = peak_rss_bytes() / 2**30
tables_mib = sum(file.stat().st_size for file in folder.glob("tables/*/*")) / 2**20
tokens = sum(layer.num_tokens for layer in layers) / len(layers)
print(tokens, seconds, time.process_time(), peak, len(text.encode()) / 2**20, tables_mib)
"""


@pytest.mark.slow  # minutes
@pytest.mark.timeout(1800)
def test_a_million_tokens_of_16_layers_of_64_experts(tmp_path):
    """At most 2 GiB and 10 minutes beyond the model's own passes; random choices, top-8."""
    layers, rng = {"decoder": [f"decoder {n}" for n in range(16)]}, np.random.default_rng(0)
    sizes = dict(rows=32, length=512, experts=64, choices=8, ids=32_000)
    router = RouterConfig(num_selected=8, overflow="dropless")
    info = RecordInfo(SwitchConfig(64, router=router, expert_capacity=1), layers, 0, "score")
    part, batches = random_part(rng, 16, **sizes), 82
    with RecordWriter(tmp_path / "record.parquet", info) as writer:
        for number in range(batches):  # the same choices, of other experts
            rank = (part.rank_NBLR + number) % 64
            moved = dataclasses.replace(part, rank_NBLR=rank, expert_NBLS=rank)
            writer.add(number, {"decoder": moved}, 32)
    ended = subprocess.run(
        [sys.executable, "-c", COST, str(tmp_path), str(32 * batches)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert not ended.returncode, ended.stderr
    tokens, wall_s, cpu_s, peak_gib, page_mib, tables_mib = map(float, ended.stdout.split())
    print(f"{tokens:,.0f} tokens: {wall_s:.0f} s, {cpu_s:.0f} s CPU, peak {peak_gib:.2f} GiB, "
          f"page {page_mib:.2f} MiB, tables {tables_mib:.0f} MiB")  # fmt: skip
    assert tokens > 1_000_000
    assert peak_gib < 2.0
    assert wall_s < 600
    assert page_mib < 5.0
