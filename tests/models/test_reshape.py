# SPDX-License-Identifier: Apache-2.0
"""Fewer experts: those that NumPy would keep, and merged ones that compute the same.

Dims: B batch, L length, D model, E experts, R rows
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from switchx import tree
from switchx.models.config import ModelConfig, RouterConfig, SwitchConfig
from switchx.models.params import abstract_params
from switchx.models.reshape import (
    SCORES,
    LayerSample,
    cluster_experts,
    drop_experts,
    gates_of_rows,
    merge_experts,
    novice_experts,
    taken,
)
from tests.cases import slow
from tests.data.refusals import refused
from tests.models.batches import layer_of
from tests.training.jobs import make_params, with_switch

E, D = 4, 8
ROUTER = RouterConfig(overflow="dropless", jitter=0.0)
SWITCH = SwitchConfig(E, every=1, expert_bias=True, router=ROUTER)
CONFIG = ModelConfig("decoder_only", 12, D, 12, 2, 4, 2, switch=SWITCH)
PATH = "decoder/blocks/layer_1/ffn/"


def samples(config=CONFIG, rows: int = 40, load_E=(1, 5, 2, 3)) -> list[LayerSample]:
    rng = np.random.default_rng(1)
    x_RD = rng.normal(size=(rows, D)).astype(np.float32)
    return [LayerSample(np.array(load_E), x_RD) for _ in config.sparse_layer_names]


def with_twins(params: dict, config=CONFIG) -> dict:
    """Expert 2 of all layers a copy of expert 0, its hidden units in another order."""
    order_F = np.random.default_rng(2).permutation(config.d_ff)

    def copy(name, leaf):
        array, last = np.array(leaf), name.rsplit("/", 1)[-1]
        if last == "w_router_DE":
            array[:, 2] = array[:, 0]
        elif last == "b_router_E":
            array[2] = array[0]
        elif "/experts/" in name:
            axis = last.rsplit("_", 1)[-1][1:].find("F")
            array[2] = array[0] if axis < 0 else np.take(array[0], order_F, axis=axis)
        return jnp.asarray(array)

    return tree.map_named(copy, params)


def test_dropping_keeps_what_numpy_would_keep():
    params = make_params(CONFIG)
    config, found, _ = drop_experts(CONFIG, params, samples(), 2, "frequency")
    assert config.switch.num_experts == 2 and not config.switch.router.counts_merged
    before, after = tree.named_leaves(params), tree.named_leaves(found)
    assert before.keys() == after.keys()
    kept = [1, 3]  # loads of 5 and 3
    for name, leaf in before.items():
        expected = np.asarray(leaf)
        if name.endswith("w_router_DE"):
            expected = expected[:, kept]
        elif "/experts/" in name:
            expected = expected[kept]
        assert np.array_equal(after[name], expected), name
    wanted = tree.named_leaves(abstract_params(config))
    assert {n: x.shape for n, x in after.items()} == {n: x.shape for n, x in wanted.items()}


def test_experts_of_equal_use_stay_in_their_order():
    params, equal = make_params(CONFIG), samples(load_E=(2, 2, 2, 2))
    _, found, _ = drop_experts(CONFIG, params, equal, 3, "frequency")
    before = tree.named_leaves(make_params(CONFIG))[f"{PATH}experts/w_in_EDF"]
    assert np.array_equal(tree.named_leaves(found)[f"{PATH}experts/w_in_EDF"], before[:3])


@pytest.mark.parametrize("activation", ["relu", slow("geglu")])
def test_merging_equal_experts_keeps_the_function_of_the_layer(activation):
    router = dataclasses.replace(ROUTER, has_logit_bias=activation == "relu")
    config = dataclasses.replace(with_switch(CONFIG, router=router), activation=activation)
    params = with_twins(make_params(config), config)
    merged_config, merged, _ = merge_experts(config, params, samples(), 3)
    assert merged_config.switch.num_experts == 3
    leaves = tree.named_leaves(merged)
    assert leaves[f"{PATH}experts/w_in_EDF"].shape == (3, D, 12)
    # Of three experts the first stands for two.
    log_count_E = leaves[f"{PATH}router_log_count_E"]
    np.testing.assert_allclose(log_count_E, [np.log(2), 0, 0], atol=1e-6)
    y_BLD, expected = layer_of(merged_config, merged), layer_of(config, params)
    np.testing.assert_allclose(y_BLD, expected, rtol=2e-5, atol=2e-6)
    assert float(np.abs(expected).max()) > 0.1


def test_merged_experts_are_means_weighted_by_use():
    params = make_params(CONFIG)
    _, merged, _ = merge_experts(CONFIG, params, samples(), 1)
    before = tree.named_leaves(params)[f"{PATH}experts/b_out_ED"]
    found = tree.named_leaves(merged)[f"{PATH}experts/b_out_ED"]
    expected_D = np.array([1, 5, 2, 3]) / 11 @ np.asarray(before, np.float64)
    np.testing.assert_allclose(found[0], expected_D, rtol=1e-5)


def test_no_fewer_experts_than_a_token_chooses():
    router = dataclasses.replace(ROUTER, num_selected=2)
    with refused("RouterConfig.num_selected=2 with num_experts=1: "):
        merge_experts(with_switch(CONFIG, router=router), {}, [], 1)


@pytest.mark.parametrize("scan", [False, True])
def test_as_many_experts_as_there_are_is_the_identity(scan):
    config = dataclasses.replace(CONFIG, scan_layers=scan)
    params = make_params(config)
    found_config, found, _ = merge_experts(config, params, samples(), E)
    assert found_config == CONFIG
    leaf = tree.named_leaves(params)
    for name, array in tree.named_leaves(found).items():
        stacked = name.replace("layer_1", "layer_0") if scan and "layer_" in name else name
        expected = leaf[stacked]
        if scan and "layer_" in name:
            expected = expected[int("layer_1" in name)]
        assert np.array_equal(array, expected), name


def test_clusters_are_of_like_experts_whatever_their_order():
    rng = np.random.default_rng(3)
    centers = rng.normal(size=(3, 6, D))
    label_E = [2, 0, 1, 0, 2, 2]
    y_ERD = np.stack([centers[k] + 0.01 * rng.normal(size=(6, D)) for k in label_E])
    assert cluster_experts(y_ERD, 3) == [[0, 4, 5], [1, 3], [2]]
    assert cluster_experts(y_ERD, 6) == [[e] for e in range(6)]
    assert cluster_experts(y_ERD, 1) == [list(range(6))]
    # Experts that are equal to the bit are still as many clusters as are asked for.
    assert len(cluster_experts(np.ones((4, 2, D)), 3)) == 3


@pytest.mark.parametrize(
    ("changes", "number", "said"),
    [
        ({}, 5, "experts=5 of a model with 4: experts are dropped or merged, not added"),
        ({}, 0, "experts=0 of a model with 4: "),
        ({"switch": None}, 2, "experts=2 of a dense model, which has none"),
        (
            {"switch": SwitchConfig(4, router=RouterConfig("hash", exploration="none"))},
            2,
            "experts=2 with RouterConfig.kind='hash': ",
        ),
        (
            {"switch": SwitchConfig(4, every=1, sublayers="attention")},
            2,
            "experts=2 with SwitchConfig.sublayers='attention': ",
        ),
    ],
)
def test_what_cannot_be_is_refused(changes, number, said):
    config = dataclasses.replace(CONFIG, **changes)
    for reshape in (drop_experts, merge_experts):
        with refused(said):
            reshape(config, {}, [], number)


TOP_2 = dataclasses.replace(ROUTER, num_selected=2, gate="normalized")


def arrays_of(params: dict) -> dict[str, np.ndarray]:
    """The arrays of the last block's Switch layer, without its path."""
    leaves = tree.named_leaves(params).items()
    return {n.removeprefix(PATH): np.asarray(x) for n, x in leaves if n.startswith(PATH)}


def mean_over_rms(layer, e: int) -> float:
    w = np.concatenate([x[e].ravel() for name, x in layer.items() if "/w_" in name])
    w = w.astype(np.float64)
    return np.abs(w).sum() / np.sqrt(len(w) * (w**2).sum())


def test_scores_are_those_of_a_loop_over_tokens():
    """EAN, mean norm and REAP by their formulas, token by token, with gates of the layer."""
    router = dataclasses.replace(TOP_2, has_logit_bias=True)
    config = with_switch(CONFIG, router=router)
    layer = arrays_of(make_params(config))
    x_RD = np.random.default_rng(3).normal(size=(30, D))
    counted = np.zeros((3, E))
    for x_D in x_RD:
        logits_E = x_D @ layer["w_router_DE"] + layer["b_router_E"]
        prob_E = np.exp(logits_E) / np.exp(logits_E).sum()
        chosen = np.argsort(-prob_E)[:2]
        for e in chosen:
            h_F = np.maximum(
                x_D @ layer["experts/w_in_EDF"][e] + layer["experts/b_in_EF"][e], 0
            )
            y_D = h_F @ layer["experts/w_out_EFD"][e] + layer["experts/b_out_ED"][e]
            norm = np.sqrt((y_D**2).sum())
            counted[:, e] += 1, norm, norm * prob_E[e] / prob_E[chosen].sum()
            (gate,) = gates_of_rows(config, layer, x_D[None], np.array([e]))
            np.testing.assert_allclose(gate, prob_E[e] / prob_E[chosen].sum(), rtol=1e-9)
    sample = LayerSample(counted[0], x_RD, counted[1], counted[2])
    want = {
        "frequency": counted[0],
        "ean": counted[1],
        "mean_norm": counted[1] / counted[0],
        "reap": counted[2] / counted[0],
        "aimer": [mean_over_rms(layer, e) for e in range(E)],
    }
    for name, score_E in want.items():
        np.testing.assert_allclose(SCORES[name](layer, sample), score_E, rtol=1e-5)


def test_a_novice_gives_its_mean_output_with_the_gate_that_it_had():
    config = dataclasses.replace(with_switch(CONFIG, expert_bias=False), activation="relu")
    params, rng = make_params(config), np.random.default_rng(5)
    norm_E = np.array([3, 9, 8, 4])  # means over loads of 1, 5, 2, 3: 3, 1.8, 4, 1.3
    measured = [
        dataclasses.replace(each, norm_E=norm_E, sum_ED=rng.normal(size=(E, D)))
        for each in samples(config)
    ]
    novices, found, _ = novice_experts(config, params, measured, 2, "mean_norm")
    assert novices.switch.num_experts == E
    x_BLD = np.random.default_rng(7).normal(size=(3, 5, D))  # that of `layer_of`
    layer = arrays_of(params)
    logits_BLE = x_BLD @ layer["w_router_DE"]
    prob_BLE = np.exp(logits_BLE) / np.exp(logits_BLE).sum(axis=-1, keepdims=True)
    expected_BLD, chosen = np.zeros_like(x_BLD), set()
    for b, length in np.ndindex(3, 5):
        x_D, e = x_BLD[b, length], int(np.argmax(prob_BLE[b, length]))
        y_D = np.maximum(x_D @ layer["experts/w_in_EDF"][e], 0) @ layer["experts/w_out_EFD"][e]
        if e in (1, 3):
            y_D = measured[1].sum_ED[e] / measured[1].load_E[e]
        expected_BLD[b, length] = prob_BLE[b, length, e] * y_D
        chosen.add(e in (1, 3))
    assert chosen == {True, False}
    y_BLD = layer_of(novices, found)
    np.testing.assert_allclose(y_BLD, expected_BLD, rtol=1e-4, atol=1e-6)


drop_by_frequency = functools.partial(drop_experts, score="frequency")


@pytest.mark.parametrize("reduce", [drop_by_frequency, merge_experts])
def test_a_shared_expert_and_its_gate_stay_as_they_are(reduce):
    config = with_switch(CONFIG, shared_d_ff=8, shared_gate=True)
    params = make_params(config)
    found = reduce(config, params, samples(config), 2)
    before, after = tree.named_leaves(params), tree.named_leaves(found.params)
    shapes = tree.named_leaves(abstract_params(found.config))
    assert {n: x.shape for n, x in after.items()} == {n: x.shape for n, x in shapes.items()}
    for name in (each for each in before if "shared_" in each):
        assert np.array_equal(before[name], after[name])


def test_loads_of_the_experts_that_stay_are_shares_of_one():
    layer = {"router_load_E": np.array([0.5, 0.25, 0.25, 0.0]), "experts/w": np.arange(4)}
    found = taken(layer, np.array([0, 1]))
    np.testing.assert_allclose(found["router_load_E"], [2 / 3, 1 / 3])
    assert found["experts/w"].tolist() == [0, 1]
    assert taken(layer, np.array([0, 1, 2, 3] * 2))["router_load_E"].sum() == pytest.approx(1)
    assert taken(layer, np.array([3]))["router_load_E"].tolist() == [0]  # nothing is known
