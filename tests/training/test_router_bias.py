# SPDX-License-Identifier: Apache-2.0
"""Loss-free balancing: the rules, whose load is whose bias, and that nothing else moves it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx import tree
from switchx.models.config import RouterConfig
from switchx.models.params import abstract_params, forward
from switchx.moe.router import router_scores
from switchx.moe.routing_plan import make_plan
from switchx.moe.stats import measure_routing
from switchx.optim.adamw import AdamW
from switchx.optim.schedules import Constant
from switchx.partitioning.mesh import MeshSpec
from switchx.training.programs import compiled_program
from switchx.training.router_bias import balanced_bias, layers_of, with_balanced_routers
from switchx.training.step import StepConfig, init_state, train_step
from tests.cases import slow, slow_unless
from tests.compare import assert_close_to_largest
from tests.training.jobs import (
    ENCODER_DECODER,
    LENGTH,
    LOSS,
    SPARSE,
    WEIGHTY,
    make_batch,
    make_job,
    make_params,
    with_padded_rows,
    with_switch,
)
from tests.training.pipelines import assert_equal, pipelined, stacked, unpipelined
from tests.training.routing_stats import with_loads
from tests.training.steps import raw_gradients

RATE = 0.25
ROUTER = RouterConfig(jitter=0.0, bias_update_rate=RATE)


def biased(config, **changes):
    return dataclasses.replace(with_switch(config, router=ROUTER), **changes)


@pytest.mark.parametrize(
    ("rule", "steps"),
    [
        # Mean 4: the busy expert goes down, the idle ones up, the one at the mean stays.
        ("sign", [-1, 1, 0, 1]),
        ("sign_centered", [-1.25, 0.75, -0.25, 0.75]),
        ("proportional", [-5 / 16, 2 / 16, 0, 3 / 16]),
    ],
)
def test_the_rules_by_hand(rule, steps):
    router = RouterConfig(bias_update_rate=0.25, bias_rule=rule)
    old_NE = jnp.array([[0.0, 1.0, -1.0, 0.5]] * 2)
    # Two stacked layers have a mean each.
    got_NE = balanced_bias(router, old_NE, with_loads([[9, 2, 4, 1], [4, 4, 4, 4]]))
    np.testing.assert_allclose(got_NE[0], old_NE[0] + 0.25 * np.array(steps), rtol=1e-6)
    np.testing.assert_array_equal(got_NE[1], old_NE[1])


def test_beside_given_choices_a_bias_balances_those_of_the_router():
    """Given choices do not follow it: by their load it would grow without end."""
    router = RouterConfig(
        num_selected=2, score="sigmoid", overflow="dropless", exploration="none",
        gate="normalized", bias_update_rate=0.01, bias_rule="sign_centered", replay=True,
    )  # fmt: skip
    logits_GTE = np.random.default_rng(0).normal(size=(1, 256, 8)).astype(np.float32)
    is_token_GT = np.ones((1, 256), bool)
    score_GTE = router_scores("sigmoid", jnp.asarray(logits_GTE))
    prob_GTE = score_GTE / jnp.sum(score_GTE, axis=-1, keepdims=True)
    crowded = np.argsort(-(logits_GTE + 2 * np.eye(8)[0]), axis=-1)[..., :2]  # by expert 0

    @jax.jit
    def stepped(bias_E, given_GTS):
        plan = make_plan(
            router, logits_GTE, score_GTE, is_token_GT, 256, bias_E=bias_E, given_GTS=given_GTS
        )
        stats = measure_routing(logits_GTE, prob_GTE, plan, is_token_GT, router, bias_E=bias_E)
        own = jax.tree.map(lambda sums: sums[None], stats.summed)
        return balanced_bias(router, bias_E[None], own)[0], stats.load_E

    free_E = given_E = jnp.zeros(8)
    for _ in range(50):
        free_E, _ = stepped(free_E, np.full_like(crowded, -1))
        given_E, load_E = stepped(given_E, crowded)
    np.testing.assert_array_equal(given_E, free_E)
    assert load_E[0] == np.sum(crowded == 0) > 150  # what is reported was done


def test_rows_are_in_the_order_of_the_statistics():
    """Blocks by number, not by name: layer_11 comes after layer_9."""
    unrolled = biased(SPARSE, num_decoder_layers=12)
    rows = layers_of(abstract_params(unrolled), "router_bias_E")
    assert {name.split("/")[2]: where for name, where in rows.items()} == {
        f"layer_{2 * i + 1}": [i] for i in range(6)
    }
    both = biased(ENCODER_DECODER, num_encoder_layers=4, num_decoder_layers=6, scan_layers=True)
    assert layers_of(abstract_params(both), "router_bias_E") == {
        "encoder/blocks/layer_1/ffn/router_bias_E": [0, 1],
        "decoder/blocks/layer_1/ffn/router_bias_E": [2, 3, 4],
    }


def stepped(config, batch, **changes):
    """Parameters before and after one step of AdamW with much decay, and what it measured."""
    optimizer = AdamW(weight_decay=0.5).build(Constant(0.1))
    state = init_state(config, optimizer, seed=0, params=make_params(config))
    step = functools.partial(train_step, config, LOSS, StepConfig(**changes), optimizer)
    after, metrics = jax.jit(step)(state, batch)
    return *(tree.named_leaves(s.params) for s in (state, after)), metrics


@pytest.mark.parametrize(("num_microbatches", "scan_layers"), [(4, True), slow(1, False)])
def test_a_step_moves_each_bias_by_its_layers_load_alone(num_microbatches, scan_layers):
    config = biased(SPARSE, num_decoder_layers=4, scan_layers=scan_layers)
    before, after, metrics = stepped(
        config, make_batch(config, 8), num_microbatches=num_microbatches
    )
    load_NE = np.asarray(metrics.routing.load_E)
    assert not np.array_equal(load_NE[0], load_NE[1])
    names = [name for name in before if name.endswith("router_bias_E")]
    assert len(names) == (1 if scan_layers else 2)
    old_NE, new_NE = (
        np.concatenate([np.atleast_2d(params[name]) for name in names])
        for params in (before, after)
    )
    want_NE = old_NE + RATE * np.sign(load_NE.mean(-1, keepdims=True) - load_NE)
    np.testing.assert_allclose(new_NE, want_NE, rtol=1e-6)
    # What decays and learns does so.
    router = names[0].replace("router_bias_E", "w_router_DE")
    assert np.abs(after[router] - before[router]).max() > 0.01


def test_a_rate_of_zero_keeps_the_bias():
    """What the optimizer would make of it is thrown away."""
    config = with_switch(SPARSE, router=RouterConfig(bias_update_rate=0.0))
    params = make_params(config)
    updated = jax.tree.map(lambda w: w + 1, params)
    stats = with_loads([np.arange(8.0)])
    router = config.switch.router
    got = tree.named_leaves(with_balanced_routers(router, params, updated, stats))
    (name,) = (name for name in got if name.endswith("router_bias_E"))
    wanted = tree.named_leaves(updated) | {name: tree.named_leaves(params)[name]}
    for each, leaf in wanted.items():
        np.testing.assert_array_equal(got[each], leaf)


@pytest.mark.parametrize("rule", ["sign", "sign_centered", "proportional"])
def test_the_bias_balances_a_router_that_does_not_learn(rule):
    """Tokens that all prefer experts 0 and 1, until their bias has gone down.

    More experts are under the mean than over it: by the sign alone the mean grows.
    """
    router, rate = ROUTER, 0.02 if rule == "proportional" else 0.002
    router = dataclasses.replace(ROUTER, bias_rule=rule, bias_update_rate=rate)
    rng = np.random.default_rng(0)
    logits_GTE = jnp.asarray(rng.normal(size=(1, 512, 8)) + np.array([2.0, 1.5] + [0.0] * 6))
    prob_GTE = jax.nn.softmax(logits_GTE, axis=-1)
    is_token_GT = jnp.ones((1, 512), bool)

    @jax.jit
    def load(bias_E):
        plan = make_plan(router, logits_GTE, prob_GTE, is_token_GT, 512, bias_E=bias_E)
        return plan.count_GE[0].astype(jnp.float32)

    bias_E = jnp.zeros(8)
    assert load(bias_E).max() > 2 * 64
    for _ in range(300):
        bias_E = balanced_bias(router, bias_E, with_loads(load(bias_E)))
    assert load(bias_E).max() < 1.1 * 64
    assert (abs(jnp.mean(bias_E)) > 0.02) == (rule == "sign")


def routed(**router) -> dict:
    """The router of a model, without noise, in which experts have a slot for every token."""
    return dict(router=RouterConfig(jitter=0.0, overflow="dropless", **router))


QUANTILES = {"num_selected": 2, "bias_update_rate": 1.0}
RULES = {
    "quantile": routed(bias_rule="quantile", **QUANTILES),
    "quantile_logits": routed(bias_rule="quantile_logits", **QUANTILES),
    "proportional": routed(bias_rule="proportional", bias_update_rate=0.1),
    "previous_step": routed(balance_scope="batch", balance_load="previous_step"),
}


@pytest.mark.parametrize("name", [slow_unless(name == "quantile", name) for name in RULES])
def test_routers_move_once_a_step_whatever_microbatches_and_remat(name):
    """Counts of microbatches add up, and what is computed again for gradients counts once."""
    config = with_switch(SPARSE, **RULES[name])
    batch = with_padded_rows(make_batch(config, 8), 1, 2)
    parameter = "router_load_E" if config.switch.router.keeps_load else "router_bias_E"
    moved = []
    for remat, num in (("none", 1), ("full", 4)):
        own = dataclasses.replace(config, remat=remat)
        before, after, metrics = stepped(own, batch, num_microbatches=num)
        (each,) = (each for each in before if each.endswith(parameter))
        assert after[each].dtype == jnp.float32
        moved.append(np.asarray(after[each]))
        assert np.abs(moved[-1] - before[each]).max() > 1e-3
        assert metrics.routing.margin_EW is metrics.routing.counted_E is None
    np.testing.assert_allclose(moved[1], moved[0], atol=1e-6)
    load_E = np.asarray(metrics.routing.load_E)[0]
    if name == "previous_step":
        np.testing.assert_allclose(moved[0].reshape(-1), load_E / load_E.sum(), rtol=1e-6)


@pytest.mark.parametrize("rule", ["quantile", "quantile_logits"])
def test_evaluation_counts_nothing_for_a_bias(rule):
    config = with_switch(SPARSE, **RULES[rule])
    batch = make_batch(config, 2)
    _, stats = jax.eval_shape(
        functools.partial(forward, config, is_training=False), make_params(config), batch
    )
    assert stats.margin_EW is stats.margin_E is None


BATCH = routed(num_selected=2, balance_scope="batch")


def gradients_in(num_microbatches, config, params=None):
    batch = with_padded_rows(make_batch(config, 8), 1, 2)
    return unpipelined(config, num_microbatches, batch, params)


@pytest.mark.parametrize("config", [SPARSE, slow(ENCODER_DECODER)], ids=["decoder", "both"])
def test_the_load_of_the_batch_is_exact_in_microbatches(config):
    """Raw gradients, loss and the logged balance loss, of 4 microbatches and of one."""
    config = dataclasses.replace(with_switch(config, **BATCH), dropout_rate=0.0)
    (want, value, _, stats), (got, got_value, _, got_stats) = (
        gradients_in(num, config) for num in (1, 4)
    )
    assert_close_to_largest(got, want, 1e-5)
    np.testing.assert_allclose(got_value, value, rtol=1e-6)
    np.testing.assert_allclose(got_stats.balance_loss, stats.balance_loss, rtol=1e-6)


@pytest.mark.slow
def test_the_load_of_the_step_before_is_exact_where_it_is_this_steps():
    """So it is approximate by that load alone, whatever the microbatches."""
    now = with_switch(SPARSE, **BATCH)
    router = dataclasses.replace(now.switch.router, balance_load="previous_step")
    before = with_switch(SPARSE, router=router)
    want, value, _, stats = gradients_in(1, now)
    shapes = tree.named_leaves(abstract_params(before))
    (name,) = (each for each in shapes if each.endswith("router_load_E"))
    counted = np.asarray(stats.counted_E[0])
    load = (counted / counted.sum()).reshape(shapes[name].shape)
    params = tree.nested(tree.named_leaves(make_params(now)) | {name: load})
    got, got_value, *_ = gradients_in(4, before, params)
    np.testing.assert_allclose(got_value, value, rtol=1e-6)
    own = tree.named_leaves(got)
    assert not np.any(own.pop(name))
    assert_close_to_largest(own, tree.named_leaves(want), 1e-5)


SEQUENCES = routed(
    num_selected=2, score="sigmoid", gate="normalized", num_expert_groups=4,
    expert_groups_per_token=2, balance_scope="sequence", bias_update_rate=0.1,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("rule", [*RULES, "sequence", "batch"])
def test_stages_and_replicas_give_the_gradients_and_counts_of_one_device(rule):
    """Raw gradients, loss and what routers move by: stages, replicas, four microbatches."""
    changes = (RULES | {"sequence": SEQUENCES, "batch": BATCH})[rule]
    config = with_switch(stacked(SPARSE, 4), **changes)
    batch = with_padded_rows(make_batch(config, 32), 1, 6, 7)
    # Rows of two sequences, as far as they are long enough.
    segments = batch["decoder_segment_ids"]
    batch["decoder_segment_ids"] = segments * (1 + (np.arange(LENGTH) >= 3))
    want = unpipelined(config, batch=batch)
    if rule != "batch":  # refused with stages
        assert_equal(pipelined(config, MeshSpec(pipe=2, data=4), batch=batch), want)
    mesh, step = MeshSpec(data=4, expert=2), StepConfig(num_microbatches=4)
    job = make_job(config, mesh=mesh, step=step, loss=WEIGHTY, batch_size=32)
    assert_equal(jax.device_get(raw_gradients(compiled_program(job), batch)), want)
