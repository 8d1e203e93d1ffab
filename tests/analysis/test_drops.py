# SPDX-License-Identifier: Apache-2.0
"""Drops from a record: against the layer's own slots, loops over tokens and counts."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from switchx.analysis.drops import Drops, prediction_errors
from switchx.analysis.slots import Setting, dropped, setting_of
from switchx.moe.capacity import into_groups, layer_groups
from switchx.moe.config import RouterConfig, SwitchConfig
from switchx.moe.routing_plan import make_plan
from switchx.routing_record import (
    RecordedBatch,
    RecordInfo,
    RecordWriter,
    open_record,
)
from tests.analysis.recorded import write_record
from tests.data.refusals import refused

E = 4
LAYERS = {"encoder": ["encoder 1", "encoder 3"]}


def batch_of(
    switch: SwitchConfig, seed: int, B: int, L: int, rows: int | None = None
) -> RecordedBatch:
    """Two layers' choices by probabilities that have ties; some places are padding."""
    random = np.random.default_rng(seed)
    logits = random.integers(0, 4, (2, B, L, E)) + random.normal(0, 0.01, E)
    prob = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    rank = np.argsort(-prob, axis=-1, kind="stable")[..., : switch.num_ranks].astype(np.int16)
    segment = (random.random((B, L)) < 0.9).astype(np.int32)
    prob = np.take_along_axis(prob, rank.astype(int), -1).astype(np.float32)
    return RecordedBatch(
        segment,
        segment,
        rank,
        prob,
        margin_NBL=prob[..., 0],
        is_dropped_NBLS=np.zeros(rank.shape, bool),
        expert_NBLS=rank,
        info=info_of(switch),
        stack="encoder",
        batch_size=rows or B,
        layers=tuple(LAYERS["encoder"]),
    )


def info_of(switch: SwitchConfig) -> RecordInfo:
    return RecordInfo(switch, LAYERS, 3, "eval")


def switch_of(group_size: int, factor: float = 1.0, min_capacity: int = 1, **router):
    return SwitchConfig(
        E,
        group_size=group_size,
        eval_capacity_factor=factor,
        min_capacity=min_capacity,
        router=RouterConfig(**router),
    )


# With the group size and the factor: whole groups, and groups that end in padding.
ROUTERS = {
    "top 1": (8, 1.0, {}),
    "top 2": (5, 0.75, {"num_selected": 2}),
    "by gate": (8, 0.75, {"num_selected": 2, "priority": "gate"}),
    "reroute": (5, 0.5, {"overflow": "reroute", "max_rounds": 3}),
    "reroute by gate": (8, 0.75, {"overflow": "reroute", "max_rounds": 3, "priority": "gate"}),
    "counted": (5, 1.0, {"padding": "counted"}),
    "slots of a row": (8, 1.0, {"num_selected": 2}),
    "dropless": (8, 1.0, {"overflow": "dropless"}),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_they_are_those_of_the_layers_own_plan(name):
    size, factor, router = ROUTERS[name]
    switch = switch_of(size, factor, **router)
    if name == "slots of a row":
        switch = dataclasses.replace(switch, expert_capacity=1)
    batch = batch_of(switch, 0, B=64, L=6)
    setting, (G, T) = Setting(switch), layer_groups(switch, 64, 6)
    found_NPS = dropped(batch, setting)
    make = jax.jit(make_plan, static_argnums=(0, 4))
    for n in range(2):
        # Scores that have the recorded order: those of the ranks, and less for all others.
        prob_BLE = np.full((64, 6, E), 1e-6, np.float32)
        np.put_along_axis(prob_BLE, batch.rank_NBLR[n].astype(int), batch.prob_NBLR[n], -1)
        is_token_BL = batch.is_token_BL | (switch.router.padding == "counted")
        prob_GTE, is_token_GT = (into_groups(x, G, T) for x in (prob_BLE, is_token_BL))
        C = setting.capacity(T, None)
        plan = make(switch.router, prob_GTE, prob_GTE, is_token_GT, C)
        want_PS = np.asarray(plan.is_dropped_GTS).reshape(G * T, -1)[:384]
        np.testing.assert_array_equal(found_NPS[n], want_PS)
        assert want_PS.any() == (name != "dropless")


def test_a_record_of_scoring_has_its_rows_as_groups_and_any_factor():
    """Where nothing was dropped, `overflow` and `expert_capacity` say nothing of capacity."""
    switch = dataclasses.replace(switch_of(8, overflow="dropless"), expert_capacity=1)
    batch = batch_of(switch, 0, B=8, L=6)
    setting = setting_of(batch.info)
    want = by_loop(
        batch,
        [range(first, first + 6) for first in range(0, 48, 6)],
        lambda n, places: [(place, 0) for place in places],
        lambda T: math.ceil(T / E * 0.5),
    )
    np.testing.assert_array_equal(dropped(batch, setting, 0.5), want)
    larger = setting_of(batch.info, group_size=24)
    assert larger.groups(8, 6) == (1, 2, 24) and larger.capacity(24, 1.0) == 6


def by_loop(batch, groups, order, capacity) -> np.ndarray:
    """`[N, B L, S]` drops, a choice after the other.

    Args:
        groups: lists of places.
        order: function of layer and places that returns (place, choice) in the queue's order.
    """
    N, B, L, S = batch.rank_NBLR.shape
    want = np.zeros((N, B * L, S), bool)
    for n in range(N):
        rank = batch.rank_NBLR[n].reshape(B * L, S)
        for places in groups:
            used = [0] * E
            for place, s in order(n, [x for x in places if batch.is_token_BL.flat[x]]):
                e = rank[place, s]
                want[n, place, s] = used[e] >= capacity(len(places))
                used[e] += 1
    return want


@pytest.mark.parametrize("priority", ["gate", "position"])
@pytest.mark.parametrize("gate", ["softmax", "normalized"])
def test_megatrons_groups_are_ranks_microbatches_and_all_choices_compete(priority, gate):
    switch = switch_of(7, num_selected=2, gate=gate)
    batch = batch_of(switch, 3, B=8, L=6)
    setting = setting_of(
        batch.info, rule="megatron", ranks=2, microbatches=2, priority=priority
    )
    prob = batch.prob_NBLR.reshape(2, 48, 2)
    scale = prob.sum(-1, keepdims=True) if gate == "normalized" else 1.0
    gates = (prob / scale).astype(np.float32)

    def order(n, places):
        both = [(place, s) for place in places for s in range(2)]
        return both if priority == "position" else sorted(both, key=lambda x: -gates[n][x])

    want = by_loop(
        batch,
        [range(first, first + 12) for first in range(0, 48, 12)],
        order,
        lambda T: math.ceil(T * 2 / E * 0.75),
    )
    np.testing.assert_array_equal(dropped(batch, setting, 0.75), want)
    assert want.any()


def test_flaxformers_groups_follow_the_devices_and_its_capacity_one_choice():
    switch = dataclasses.replace(
        switch_of(16, num_selected=2), capacity_rounding="nearest", min_capacity=1
    )
    batch = batch_of(switch, 4, B=8, L=6)
    # 48 tokens, at most 16 a group: 3 would do, but 4 experts' places must divide them, and
    # the 8 places of two replicas on 8 devices.
    for ranks, G in ((1, 4), (4, 4), (8, 8)):
        setting = setting_of(batch.info, rule="flaxformer", ranks=ranks)
        T = 48 // G
        assert setting.groups(8, 6) == (1, G, T)
        want = by_loop(
            batch,
            [range(first, first + T) for first in range(0, 48, T)],
            lambda n, places: [(place, s) for s in range(2) for place in places],
            lambda T: max(1, round(T * 1.25 / E)),
        )
        np.testing.assert_array_equal(dropped(batch, setting, 1.25), want)
        assert want.any()


def record_of(path, switch, batches, B=8, L=6, rows=None):
    """A record of an encoder; drops in it are those of `switch`."""
    with RecordWriter(path, info_of(switch)) as writer:
        for number in range(batches):
            batch = batch_of(switch, number, B, L, rows)
            found = dropped(batch, Setting(switch)).reshape(2, B, L, -1)
            part = dataclasses.replace(batch, is_dropped_NBLS=found)
            writer.add(number, {"encoder": part}, rows or B)
    return open_record(path)


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    path = tmp_path_factory.mktemp("drops") / "record.parquet"
    return record_of(path, switch_of(16, num_selected=2), batches=3)


SETTINGS = {
    "recorded": {},
    "larger groups": {"group_size": 48},
    "uneven groups": {"group_size": 11},
    "one choice": {"num_selected": 1},
    "by gate": {"priority": "gate"},
    "microbatches": {"microbatches": 4},
    "two rounds": {"num_selected": 1, "rounds": 2},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_histogram_has_the_drops_at_every_factor(record, name):
    setting = setting_of(record.info, **SETTINGS[name])
    drops = Drops(record, setting)
    shares = []
    for factor in (0.3, 0.5, 1.0, 1.5, 4.0):
        want_N, S = np.zeros(2), setting.num_choices
        for batch in record.batches():
            want_N += dropped(batch, setting, factor).sum(axis=(1, 2))
        np.testing.assert_array_equal(drops.dropped_N(factor), want_N)
        tokens = sum(batch.is_token_BL.sum() for batch in record.batches())
        np.testing.assert_array_equal(drops.choices_N, [tokens * S] * 2)
        assert drops.share(factor) == want_N.sum() / (2 * tokens * S)
        shares.append(drops.share(factor))
    assert shares == sorted(shares, reverse=True) and shares[0] > 0.2 and shares[-1] == 0
    assert (drops.places, drops.left_out) == (3 * 48, 0)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_smallest_factor_keeps_the_bound_and_one_slot_less_does_not(record, name):
    setting = setting_of(record.info, **SETTINGS[name])
    for rounding, most in (("up", 0.02), ("nearest", 0.1), ("down", 0.0)):
        switch = dataclasses.replace(setting.switch, capacity_rounding=rounding)
        drops = Drops(record, dataclasses.replace(setting, switch=switch))
        factor = drops.smallest_factor(most)
        ((T, C),) = drops.capacities(factor).items()
        assert drops.share(factor) <= most < drops.share(drops.setting.factor(T, C - 1))
        assert len(f"{factor:g}") <= 6


def test_balanced_choices_are_not_dropped_at_factor_1_and_one_expert_drops_none(tmp_path):
    rank, one = np.tile(np.arange(E), 12).reshape(1, 8, 6, 1), np.zeros((1, 8, 6, 1))
    single = dataclasses.replace(switch_of(16), num_experts=1)
    for switch, ranks, share in (
        (switch_of(16), rank, 0.0),
        (switch_of(16), one, 0.75),
        (single, one, 0.0),
    ):
        record = write_record(tmp_path / "record.parquet", switch, [ranks])
        assert Drops(record, Setting(switch)).share(1.0) == share


def test_a_random_router_drops_what_the_formula_of_a_balanced_one_says(tmp_path):
    """Within four standard errors, over groups; nearly 1 / sqrt(2 pi l) where E is large."""
    random, experts, T, groups = np.random.default_rng(0), 64, 4096, 40
    switch = SwitchConfig(experts, group_size=T, min_capacity=1, eval_capacity_factor=1.0)
    ranks = random.integers(0, experts, (groups, 1, T // 64, 64, 1))
    drops = Drops(write_record(tmp_path / "record.parquet", switch, ranks), Setting(switch))
    loads = [np.bincount(rank.reshape(-1), minlength=experts) for rank in ranks]
    shares = [np.maximum(load - T // experts, 0).sum() / T for load in loads]
    error = np.std(shares) / math.sqrt(groups)
    assert drops.share(1.0) == pytest.approx(np.mean(shares))
    assert abs(drops.share(1.0) - drops.balanced_share(1.0)) < 4 * error
    assert drops.balanced_share(1.0) == pytest.approx(1 / math.sqrt(2 * math.pi * 64), rel=0.02)


def test_a_record_says_whether_its_drops_follow_from_it(record, tmp_path):
    errors = prediction_errors(record, record).values()
    tokens = sum(batch.is_token_BL.sum() for batch in record.batches())
    assert [(each.choices, each.differing) for each in errors] == [(2 * tokens, 0)] * 2
    other = dataclasses.replace(record.info.switch, eval_capacity_factor=1.25)
    info = dataclasses.replace(record.info, switch=other)
    with RecordWriter(tmp_path / "other.parquet", info) as writer:
        for batch in record.batches():
            writer.add(batch.number, {"encoder": batch}, 8)
    changed = open_record(tmp_path / "other.parquet")
    errors = prediction_errors(changed, changed).values()
    assert all(0 < each.differing < 100 for each in errors)


def test_what_is_in_no_whole_group_is_counted(tmp_path):
    cut = record_of(tmp_path / "r.parquet", switch_of(12), batches=2, B=4, rows=8)
    assert [Drops(cut, Setting(cut.info.switch)).left_out] == [0]
    larger = Drops(cut, setting_of(cut.info, group_size=16))
    assert (larger.places, larger.left_out) == (32, 16)


def test_what_a_record_cannot_say_is_refused_by_name(tmp_path):
    cut = record_of(tmp_path / "r.parquet", switch_of(12), batches=1, B=4, rows=8)
    with refused("4 rows of 6 places of a batch of 8 rows, and 1 x 1 groups of 48 places"):
        Drops(cut, setting_of(cut.info, group_size=48))
    with refused("4 rows of 6 places of a batch of 8 rows, and 2 x <any>whole batches"):
        Drops(cut, setting_of(cut.info, microbatches=2))
    with refused("8 rows do not divide into 3 parts (ranks=1, microbatches=3)"):
        setting_of(cut.info, microbatches=3).groups(8, 6)
    with refused("rule='flaxformer': 14 tokens have no equal groups whose number 4 divides"):
        setting_of(cut.info, rule="flaxformer").groups(2, 7)
    with refused(
        "rounds=3 needs the 3 best experts of each token, and the record has 1; use rounds of "
        "at most 1, or record with --gin.RouterConfig.overflow=reroute "
        "--gin.RouterConfig.max_rounds=3"
    ):
        setting_of(cut.info, rounds=3)
    two = info_of(switch_of(12, num_selected=2))
    with refused("num_selected=3 needs the 3 best experts of each token, and the record has 2"):
        setting_of(two, num_selected=3)
    with refused("rounds=2 with num_selected=2: a token that chooses several experts tries no"):
        setting_of(two, rounds=2)
    by_score = switch_of(12, num_selected=2, score="sigmoid", gate="normalized")
    setting_of(info_of(by_score))
    setting_of(info_of(by_score), rule="megatron")
    with refused("RouterConfig.score='sigmoid', gate='normalized' and priority='gate': queues"):
        setting_of(info_of(by_score), priority="gate")
    choice = RouterConfig(kind="expert_choice")
    with refused("RouterConfig.kind='expert_choice': its experts choose tokens by all"):
        setting_of(info_of(SwitchConfig(E, stacks="encoder", router=choice)))
