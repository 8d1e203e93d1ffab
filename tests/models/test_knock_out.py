# SPDX-License-Identifier: Apache-2.0
"""A model without one expert is the model from which it was dropped, by one program."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from switchx.models.config import ModelConfig, RouterConfig, SwitchConfig
from switchx.models.knock_out import with_logit_biases, without_each, without_expert
from switchx.models.reshape import LayerSample, drop_experts
from switchx.models.unroll import unrolled
from switchx.moe.router import NEVER, router_scores
from switchx.moe.routing_plan import choice_scores, choose_experts
from switchx.tree import named_leaves
from tests.data.refusals import refused
from tests.training.jobs import (
    DENSE,
    ENCODER_DECODER,
    TINY,
    make_batch,
    make_params,
    run_model,
    stacked,
)

E = 4
ROUTERS = {
    "top 1": RouterConfig(overflow="dropless"),
    "top 2": RouterConfig(overflow="dropless", num_selected=2, gate="normalized"),
    "bias": RouterConfig(overflow="dropless", bias_update_rate=0.001),
}


@dataclasses.dataclass(frozen=True)
class Model:
    config: ModelConfig
    params: dict


def model_of(router: RouterConfig, **changes):
    switch = SwitchConfig(E, every=2, expert_capacity=1, router=router, **changes)
    return dataclasses.replace(ENCODER_DECODER, switch=switch)


def logits(model, params, batch):
    return run_model(model, params, batch, is_training=False)[0]


def choices(model, params, batch):
    return run_model(model, params, batch, is_training=False)[1].choices


@pytest.mark.parametrize(
    "name", ["bias", *(pytest.param(f"top {s}", marks=pytest.mark.slow) for s in (1, 2))]
)
def test_it_is_the_model_without_the_expert(name):
    """One sparse layer, whose expert 2 is dropped by `drop_experts`."""
    switch = SwitchConfig(E, every=1, expert_capacity=1, router=ROUTERS[name])
    model = dataclasses.replace(TINY, switch=switch)
    batch, params = make_batch(model, 4), make_params(model)
    biased, with_biases = with_logit_biases(model, params)
    before = logits(model, params, batch)
    np.testing.assert_array_equal(logits(biased, with_biases, batch), before)
    removed = without_expert(biased, with_biases, "decoder 0", 2)
    sample = LayerSample(np.array([3, 3, 0, 3]), np.zeros((1, model.d_model), np.float32))
    dropped = drop_experts(model, params, [sample], E - 1, "frequency")
    num_programs = run_model._cache_size()
    found = logits(biased, removed, batch)
    assert run_model._cache_size() == num_programs  # that of the model with all experts
    np.testing.assert_allclose(found, logits(*dropped[:2], batch), atol=1e-5)
    assert np.abs(found - before).max() > 1e-3


def test_an_expert_that_is_removed_leaves_its_group_of_two():
    """Its neighbour is chosen where it is better than a whole other group."""
    router = RouterConfig(
        num_selected=2, score="sigmoid", gate="normalized", bias_update_rate=0.001,
        num_expert_groups=2, expert_groups_per_token=1, overflow="dropless",
    )  # fmt: skip
    logits_GTE = jnp.array([[[4.0, 3.0, -3.0, -4.0]]]).at[..., 0].set(NEVER)
    bias_E = jnp.zeros(4).at[0].set(NEVER)
    score_GTE = router_scores("sigmoid", logits_GTE)
    chosen = choose_experts(choice_scores(router, logits_GTE, score_GTE, bias_E=bias_E), 2)
    assert chosen.ravel().tolist()[0] == 1


@pytest.mark.slow
def test_one_layer_changes_alone_and_one_program_runs_all():
    model = model_of(ROUTERS["top 2"])
    batch = make_batch(model, 4)
    model, params = with_logit_biases(model, make_params(model))
    before = choices(model, params, batch)
    size = run_model._cache_size()
    for name, stack in (("encoder 1", 0), ("decoder 1", 1)):
        for expert in range(E):
            removed = without_expert(model, params, name, expert)
            found = choices(model, removed, batch)
            experts = found[stack].expert_BLS
            is_routed = before[stack].expert_BLS < E
            assert (np.asarray(experts)[np.asarray(is_routed)] != expert).all()
            # A token that chose it keeps its other choice, unless its inputs changed.
            had = (np.asarray(before[stack].expert_BLS[0]) == expert).any(axis=-1)
            same = np.asarray(experts[0] == before[stack].expert_BLS[0]).all(axis=-1)
            np.testing.assert_array_equal(same, ~had)
            if name == "decoder 1":
                np.testing.assert_array_equal(found[0].expert_BLS, before[0].expert_BLS)
    assert run_model._cache_size() == size


@pytest.mark.slow
def test_scanned_layers_are_masked_as_unrolled_ones():
    model = stacked(model_of(ROUTERS["bias"]))
    model, params = with_logit_biases(model, make_params(model))
    flat, flat_params = unrolled(model, params)
    for name in ("encoder 1", "encoder 3", "decoder 3"):
        found = named_leaves(unrolled(model, without_expert(model, params, name, 1))[1])
        want = named_leaves(without_expert(flat, flat_params, name, 1))
        assert found.keys() == want.keys()
        for leaf, value in want.items():
            np.testing.assert_array_equal(found[leaf], value)
            number = name.replace(" ", "/blocks/layer_")
            is_masked = leaf.startswith(f"{number}/ffn/") and leaf.endswith(
                ("b_router_E", "bias_E")
            )
            assert (np.asarray(value).min() < -1e8) == is_masked, leaf


@pytest.mark.slow
def test_experts_of_attention_are_removed():
    model = model_of(RouterConfig(), sublayers="both")
    batch = make_batch(model, 4)
    names = model.sparse_layer_names
    whole = Model(model, make_params(model))
    experts = [("encoder 1 attention", 0), ("encoder 1 ffn", 0)]
    _, *without = without_each(whole, experts)
    for (name, _), each in zip(experts, without, strict=True):
        chosen = choices(each.config, each.params, batch)[0].expert_BLS[names.index(name)]
        assert (np.asarray(chosen) != 0).all()


def test_models_without_a_choice_are_refused():
    for model in (
        DENSE,
        model_of(RouterConfig(kind="hash", exploration="none")),
        dataclasses.replace(ENCODER_DECODER, switch=SwitchConfig(1, every=2)),
    ):
        with refused("experts cannot be removed one by one<any>; leave the knock-outs out"):
            with_logit_biases(model, {})
