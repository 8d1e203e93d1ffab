# SPDX-License-Identifier: Apache-2.0
"""Dense models with experts, and back: which outputs are equal, and what they are otherwise."""

import dataclasses

import numpy as np
import pytest

from switchx import tree
from switchx.models.config import ModelConfig, RouterConfig, SwitchConfig
from switchx.models.params import abstract_params
from switchx.models.reshape import (
    LayerSample,
    dense_config,
    drop_experts,
    merge_experts,
    reduced_config,
    to_dense,
)
from switchx.models.upcycle import multiplied_config, multiply_experts, upcycle, upcycled_config
from switchx.moe.routing_plan import best_copies, choose_experts
from tests.cases import slow
from tests.compare import assert_close
from tests.data.refusals import refused
from tests.models.batches import layer_of
from tests.training.jobs import ENCODER_DECODER, make_batch, make_params, run_model, with_switch

DENSE = dataclasses.replace(ENCODER_DECODER, switch=None, activation="geglu")
# One block, whose input of the FFN `layer_of` gives.
BIASED = ModelConfig(
    "decoder_only", 12, 8, 12, 2, 4, 2, activation="gelu", norm="layer", use_bias=True
)


def dropless(config: ModelConfig) -> ModelConfig:
    router = dataclasses.replace(config.switch.router, overflow="dropless")
    return with_switch(config, router=router)


def shapes(params) -> dict:
    return {name: leaf.shape for name, leaf in tree.named_leaves(params).items()}


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_with_normalized_gates_the_sparse_model_is_the_dense_one(scan):
    config = dataclasses.replace(DENSE, scan_layers=scan)
    dense = make_params(config)
    sparse = upcycled_config(config, 4, num_selected=2)
    params = upcycle(sparse, config, dense).params
    assert shapes(params) == shapes(abstract_params(sparse))
    assert sparse.sparse_layer_names == ["encoder 1", "decoder 1"]
    batch = make_batch(config, 4)
    expected, _ = run_model(config, dense, batch, is_training=False)
    found, stats = run_model(dropless(sparse), params, batch, is_training=False)
    is_token_BL = batch["decoder_segment_ids"] > 0  # padding is not routed
    np.testing.assert_allclose(found[is_token_BL], expected[is_token_BL], rtol=1e-4, atol=1e-5)
    assert np.all(np.asarray(stats.load_E).sum(axis=-1) > 0)
    # Routers are drawn, and tell tokens apart.
    assert np.std(tree.named_leaves(params)["encoder/blocks/layer_1/ffn/w_router_DE"]) > 0


def test_one_expert_a_token_gives_the_dense_output_times_its_gate():
    """Layer by layer: with k=1 the gate is the router's probability, and has a gradient."""
    params = make_params(BIASED)
    sparse = dropless(upcycled_config(BIASED, 4, num_selected=1, every=1))
    one = upcycle(sparse, BIASED, params).params
    twice = dropless(upcycled_config(BIASED, 4, num_selected=2, every=1))
    # Two normalized gates sum up to 1, so this is the dense layer's output.
    dense = upcycle(twice, BIASED, params).params
    expected, found = layer_of(twice, dense), layer_of(sparse, one)
    ratio_BL = np.median(found / expected, axis=-1)
    np.testing.assert_allclose(found, expected * ratio_BL[..., None], rtol=1e-3, atol=1e-5)
    assert np.all(ratio_BL > 1 / 4 - 1e-6) and np.all(ratio_BL < 1)
    assert np.abs(np.asarray(expected)).max() > 0.1


def samples(config: ModelConfig) -> list[LayerSample]:
    x_RD = np.random.default_rng(1).normal(size=(50, config.d_model)).astype(np.float32)
    load_E = np.arange(1, config.switch.num_experts + 1)
    return [LayerSample(load_E, x_RD) for _ in config.sparse_layer_names]


@pytest.mark.parametrize("is_merged", [False, True])
def test_upcycled_and_back_it_is_the_dense_model(is_merged):
    params = make_params(BIASED)
    sparse = upcycled_config(BIASED, 3, every=1)
    config, found, _ = to_dense(
        sparse, upcycle(sparse, BIASED, params).params, samples(sparse), is_merged=is_merged
    )
    assert config == BIASED
    assert_close(found, params, rtol=1e-5)


def test_one_of_the_experts_times_the_mean_gate():
    switch = SwitchConfig(3, every=1, expert_bias=True, router=RouterConfig(num_selected=1))
    config = dataclasses.replace(BIASED, switch=switch)
    params, sample = make_params(config), samples(config)
    path = "decoder/blocks/layer_1/ffn/"
    before = {n: np.asarray(x, np.float64) for n, x in tree.named_leaves(params).items()}
    logits_RE = sample[1].x_RD @ before[f"{path}w_router_DE"]
    prob_RE = np.exp(logits_RE) / np.exp(logits_RE).sum(axis=1, keepdims=True)
    gate = prob_RE.max(axis=1).mean()
    assert 1 / 3 < gate < 1
    for is_merged, share_E in ((False, np.array([0, 0, 1])), (True, np.array([1, 2, 3]) / 6)):
        dense = to_dense(config, params, sample, is_merged=is_merged).params
        found = tree.named_leaves(dense)
        expected_D = gate * (share_E @ before[f"{path}experts/b_out_ED"])
        np.testing.assert_allclose(found[f"{path}b_out_D"], expected_D, rtol=1e-5)
    dense = to_dense(config, params, sample, is_merged=False).params
    found = tree.named_leaves(dense)
    for name in ("w_in_EDF", "b_in_EF"):  # before the activation nothing is scaled
        expected = before[f"{path}experts/{name}"][2]
        np.testing.assert_array_equal(found[path + name.replace("_E", "_")], expected)


def test_what_cannot_be_made_is_refused():
    sparse = upcycled_config(DENSE, 4)
    with refused("only a dense model is upcycled, and this one has experts"):
        upcycled_config(sparse, 8)
    with refused("experts=1 of a dense model: it is made sparse"):
        upcycled_config(DENSE, 1)
    with refused("RouterConfig.num_selected=5 with num_experts=4"):
        upcycled_config(DENSE, 4, num_selected=5)
    with refused("num_encoder_layers=2 is not divisible by switch.every=3"):
        upcycled_config(DENSE, 4, every=3)
    for change in ({"d_ff": 7}, {"shared_d_ff": 8}, {"expert_bias": True}):
        ((name, value),) = change.items()
        with refused(f"experts=0 of a model with SwitchConfig.{name}={value}"):
            dense_config(with_switch(sparse, **change))


def distance(config, params, expected_config, expected) -> float:
    """The largest difference between the outputs of two models' last FFNs."""
    expected_BLD = np.asarray(layer_of(expected_config, expected))
    assert np.abs(expected_BLD).max() > 0.1
    return np.abs(layer_of(config, params) - expected_BLD).max()


@pytest.mark.parametrize("activation", [slow("relu"), "gelu", slow("geglu")])
def test_virtual_groups_are_the_dense_layer(activation):
    config = dataclasses.replace(BIASED, activation=activation)
    params = make_params(config)
    copies = dropless(upcycled_config(config, 6, every=1))  # the dense layer's output
    sparse = dropless(upcycled_config(config, 6, num_selected=3, every=1, way="virtual_groups"))
    groups = upcycle(sparse, config, params, "virtual_groups").params
    assert shapes(groups) == shapes(abstract_params(sparse))
    assert distance(sparse, groups, copies, upcycle(copies, config, params).params) < 1e-5
    w_router_DE = tree.named_leaves(groups)["decoder/blocks/layer_1/ffn/w_router_DE"]
    assert np.array_equal(w_router_DE[:, :2], w_router_DE[:, 2:4])
    assert np.abs(w_router_DE[:, 0] - w_router_DE[:, 1]).max() > 0


def test_a_share_of_hidden_units_is_drawn_anew():
    params, path = make_params(DENSE), "decoder/blocks/layer_1/ffn/"
    sparse, dense = upcycled_config(DENSE, 4, way="drop"), tree.named_leaves(params)
    for share in (0.0, 0.25, 1.0):
        found = tree.named_leaves(upcycle(sparse, DENSE, params, "drop", share).params)
        kept = []
        for name, dims in (("w_in", "DF"), ("w_gate", "DF"), ("w_out", "FD")):
            old, new = dense[f"{path}{name}_{dims}"], found[f"{path}experts/{name}_E{dims}"]
            kept.append(np.all(new == np.asarray(old), axis=1 + dims.find("D")))  # [E, F]
            assert abs(np.std(new) / np.std(old) - 1) < 0.1
        assert np.array_equal(kept[0], kept[1]) and np.array_equal(kept[0], kept[2])
        assert np.all(kept[0].sum(axis=1) == round((1 - share) * DENSE.d_ff))
        assert (share == 0.25) == (not np.array_equal(kept[0][0], kept[0][1]))


def biased_router(num_selected: int, **more) -> ModelConfig:
    of = {"num_selected": num_selected, "bias_update_rate": 0.1, "overflow": "dropless"}
    router = RouterConfig(**of, **more)
    switch = SwitchConfig(3, every=1, expert_bias=True, router=router)
    return dataclasses.replace(BIASED, switch=switch)


@pytest.mark.parametrize(
    ("way", "S"),
    [("exclusive", 2), slow("counts_merged", 1), *(slow("more_choices", S) for S in (1, 2))],
)
def test_more_experts_compute_the_same(way, S):
    """Softmax gates, and biases that decide: S = 1 or 2 of 3 experts, of which 9 are made."""
    config = biased_router(S)
    bias_E = np.array([0.0, 0.4, -0.3], np.float32)
    leaves = tree.named_leaves(make_params(config))
    params = tree.nested({n: bias_E if "router_bias" in n else x for n, x in leaves.items()})
    grown, found, origin_NE = multiply_experts(config, params, 9, way)
    assert shapes(found) == shapes(abstract_params(grown))
    assert [list(each) for each in origin_NE] == [[0, 1, 2] * 3] * 2
    assert distance(grown, found, config, params) < 1e-5
    plain, copies, _ = multiply_experts(config, params, 9, "copies")
    assert distance(plain, copies, config, params) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("S", "way"), [(1, "counts_merged"), (2, "exclusive"), (2, "more_choices")]
)
def test_copies_of_experts_change_no_auxiliary_loss(S, way):
    config = biased_router(S)
    params, batch = make_params(config), make_batch(config, 4)
    grown, found, _ = multiply_experts(config, params, 9, way)
    (_, before), (_, after) = (
        run_model(dropless(model), each, batch, is_training=False)
        for model, each in ((config, params), (grown, found))
    )
    np.testing.assert_allclose(after.balance_loss, before.balance_loss, rtol=1e-5)
    same_z = way != "more_choices"  # whose softmax has copies
    if same_z:
        np.testing.assert_allclose(after.router_z_loss, before.router_z_loss, rtol=1e-5)


@pytest.mark.parametrize("gate", ["normalized", "score"])
def test_more_choices_of_sigmoids_compute_the_same(gate):
    """The gates of DeepSeek's kin; undivided ones would add up to three times as much."""
    config = biased_router(2, score="sigmoid", gate=gate, gate_scale=2.5)
    params = make_params(config)
    grown, found, _ = multiply_experts(config, params, 9, "more_choices")
    assert grown.switch.router.num_selected == 6
    assert distance(grown, found, config, params) < 1e-5


@pytest.mark.parametrize("change", [drop_experts, merge_experts])
def test_models_whose_experts_exclude_each_other_are_changed(change):
    """Copies of fewer experts are fewer experts of the copies, up to the noise of `TIES`."""
    config, (sample, _) = biased_router(2), samples(biased_router(2))
    sample = dataclasses.replace(sample, gated_norm_E=np.array([2.0, 1.0, 6.0]))
    params = make_params(config)
    few = change(config, params, [sample] * 2, 2)
    want = multiply_experts(few.config, few.params, 4, "exclusive")
    many = multiply_experts(config, params, 6, "exclusive")
    twice = {n: np.tile(getattr(sample, n), 2) for n in ("load_E", "gated_norm_E")}
    sample = dataclasses.replace(sample, **twice)
    found = change(many.config, many.params, [sample] * 2, 4)
    assert found.config == want.config
    assert_close(found.params, want.params, rtol=1e-4)
    again = multiply_experts(many.config, many.params, 12, "exclusive")
    assert again.config.switch.router.num_copies == 4
    assert distance(*again[:2], config, params) < 1e-5


def test_a_token_chooses_the_best_copies_of_different_experts():
    """Against a loop: scores from the highest, those of experts that are chosen left out."""
    score_GTE = np.random.default_rng(2).normal(size=(2, 30, 12)).astype(np.float32)
    score_GTE[0, :5] = score_GTE[0, :5].round()  # ties
    found = choose_experts(best_copies(score_GTE, 3), 2)
    for g, t in np.ndindex(2, 30):
        first, *rest = np.argsort(-score_GTE[g, t], kind="stable").tolist()
        second = next(e for e in rest if e % 4 != first % 4)
        assert found[g, t].tolist() == [first, second]


def test_what_cannot_be_added_is_refused():
    for way, S, other in (("exclusive", 1, "counts_merged"), ("counts_merged", 2, "exclusive")):
        with refused(f"upcycle={way!r} with RouterConfig.num_selected={S}: use {other!r}"):
            multiplied_config(biased_router(S), 6, way)
    with refused("experts=7 of a model with 3: each expert gets as many copies"):
        multiplied_config(biased_router(1), 7, "counts_merged")
    exclusive = multiplied_config(biased_router(2), 6, "exclusive")
    with refused("upcycle='copies' with RouterConfig.num_copies=2: "):
        multiplied_config(exclusive, 12, "copies")
    with refused("experts=3 with RouterConfig.num_copies=2: <any>use a multiple of 2"):
        reduced_config(exclusive, 3, is_merged=True)
    with refused("upcycle='virtual_groups' with experts=6, num_selected=4 and d_ff=12"):
        upcycled_config(BIASED, 6, num_selected=4, way="virtual_groups")
    for S in (1, 4):
        with refused(f"RouterConfig.num_copies=2 <any>num_experts=6 and num_selected={S}"):
            SwitchConfig(6, router=RouterConfig(num_selected=S, num_copies=2))
