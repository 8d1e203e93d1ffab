# SPDX-License-Identifier: Apache-2.0
"""Evaluation: all tokens count the same, whatever batch they are in; nothing is random."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.models.config import RouterConfig
from switchx.training.evaluate import eval_step, evaluate
from switchx.training.losses import TokenSums
from tests.data.refusals import refused
from tests.training.jobs import SPARSE, make_batch, make_params
from tests.training.routing_stats import two_layers


def sums_of(params, batch):
    """What a model would report, had the batch these numbers."""
    return TokenSums(**{name: jnp.float32(value) for name, value in batch.items()}), None, {}


def test_batches_weigh_by_their_tokens():
    batches = [
        dict(loss=10.0, nll=9.0, correct=1, tokens=2),
        dict(loss=90.0, nll=81.0, correct=9, tokens=98),
    ]
    metrics = evaluate(sums_of, None, batches)
    assert metrics == {
        "neg_log_perplexity": pytest.approx(-0.9),
        "cross_entropy": pytest.approx(1.0),
        "accuracy": pytest.approx(0.1),
        "target_tokens": 100.0,
    }


def test_routing_adds_up_over_batches():
    def step(params, batch):
        balance = np.array([2 * batch, 8 * batch])
        stats = dataclasses.replace(two_layers(), balance=balance)
        return sums_of(None, dict(loss=1, nll=1, correct=1, tokens=1))[0], stats, {}

    metrics = evaluate(step, None, [np.float32(1.0), np.float32(2.0)])
    assert metrics["routing"]["balance_loss"] == [1.5, 3.0]
    assert metrics["routing"]["router_z_loss"] == [0.5, 0.25]
    assert metrics["routing"]["load"] == [[0.75, 0.25], [0.25, 0.75]]
    assert metrics["dropped_fraction"] == 0.25


def test_no_batch_is_an_error():
    with refused(
        "evaluation got no batch; expected at least one: the validation split is smaller than "
        "one batch, so use a smaller BATCH_SIZE or more validation text"
    ):
        evaluate(sums_of, None, [])


@pytest.fixture(scope="module")
def model():
    """A sparse model with much noise in training, and its jitted evaluation step."""
    switch = dataclasses.replace(
        SPARSE.switch,
        router=RouterConfig(jitter=0.9),
        capacity_factor=0.1,
        eval_capacity_factor=8.0,
    )
    config = dataclasses.replace(SPARSE, switch=switch, dropout_rate=0.9)
    return config, make_params(config), jax.jit(functools.partial(eval_step, config))


def test_the_whole_split_gives_the_same_in_any_batches(model):
    config, params, step = model
    batch = make_batch(config, 8)
    parts = [{n: rows[i : i + 2] for n, rows in batch.items()} for i in (0, 2, 4, 6)]
    whole, split = evaluate(step, params, [batch]), evaluate(step, params, parts)
    for name in ("neg_log_perplexity", "cross_entropy", "accuracy", "target_tokens"):
        assert split[name] == pytest.approx(whole[name], rel=1e-6)
    assert split["routing"]["load"] == whole["routing"]["load"]
    assert whole["target_tokens"] == np.count_nonzero(batch["decoder_target_tokens"])


def test_there_is_no_noise_and_the_evaluation_capacity_holds_every_token(model):
    config, params, step = model
    batch = make_batch(config, 8)
    first, again = evaluate(step, params, [batch]), evaluate(step, params, [batch])
    assert first == again
    assert first["dropped_fraction"] == 0  # capacity 0.1 would drop nearly all
    assert first["neg_log_perplexity"] == -first["cross_entropy"]  # no z-loss, no smoothing
    assert math.isfinite(first["cross_entropy"])
