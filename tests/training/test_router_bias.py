# SPDX-License-Identifier: Apache-2.0
"""Loss-free balancing: the rule, whose load is whose bias, and that nothing else moves it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx import tree
from switchx.models.config import RouterConfig
from switchx.models.params import abstract_params
from switchx.moe.plan import make_plan
from switchx.optim.adamw import AdamW
from switchx.optim.schedules import Constant
from switchx.training.step import StepConfig, init_state, train_step
from switchx.training.switch_layers import balanced_bias, layers_of, with_balanced_biases
from tests.cases import slow
from tests.training.jobs import (
    ENCODER_DECODER,
    LOSS,
    SPARSE,
    make_batch,
    make_params,
    with_switch,
)

RATE = 0.25
ROUTER = RouterConfig(jitter=0.0, bias_update_rate=RATE)


def biased(config, **changes):
    return dataclasses.replace(with_switch(config, router=ROUTER), **changes)


def test_the_rule_by_hand():
    # Mean 4: the busy expert goes down, the idle ones up, the one at the mean stays.
    got = balanced_bias(jnp.array([0.0, 1.0, -1.0, 0.5]), jnp.array([9.0, 2.0, 4.0, 1.0]), 0.25)
    assert got.tolist() == [-0.25, 1.25, -1.0, 0.75]
    # Two stacked layers have a mean each.
    load_NE = jnp.array([[3.0, 1.0], [10.0, 30.0]])
    assert balanced_bias(jnp.zeros((2, 2)), load_NE, 1.0).tolist() == [[-1, 1], [1, -1]]


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
    load_NE = np.arange(8.0)[None]
    got = tree.named_leaves(with_balanced_biases(config, params, updated, load_NE))
    (name,) = (name for name in got if name.endswith("router_bias_E"))
    wanted = tree.named_leaves(updated) | {name: tree.named_leaves(params)[name]}
    for each, leaf in wanted.items():
        np.testing.assert_array_equal(got[each], leaf)


def test_the_bias_balances_a_router_that_does_not_learn():
    """Tokens that all prefer experts 0 and 1, until their bias has gone down."""
    rng = np.random.default_rng(0)
    logits_GTE = jnp.asarray(rng.normal(size=(1, 512, 8)) + np.array([2.0, 1.5] + [0.0] * 6))
    prob_GTE = jax.nn.softmax(logits_GTE, axis=-1)
    is_token_GT = jnp.ones((1, 512), bool)

    @jax.jit
    def load(bias_E):
        plan = make_plan(ROUTER, logits_GTE, prob_GTE, is_token_GT, 512, bias_E=bias_E)
        return plan.count_GE[0].astype(jnp.float32)

    bias_E = jnp.zeros(8)
    assert load(bias_E).max() > 2 * 64
    for _ in range(300):
        bias_E = balanced_bias(bias_E, load(bias_E), 0.002)
    assert load(bias_E).max() < 1.1 * 64
