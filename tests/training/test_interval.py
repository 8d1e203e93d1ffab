# SPDX-License-Identifier: Apache-2.0
"""Rates over training time, means over good steps, on a clock that is set by hand."""

import math

import numpy as np
import pytest

from switchx.training.losses import TokenSums
from switchx.training.metrics import Interval, Stopwatch
from switchx.training.step import StepMetrics
from tests.training.routing_stats import two_layers


@pytest.fixture
def clock(monkeypatch):
    """`clock.now = seconds` sets the time."""

    class Clock:
        now = 100.0

    monkeypatch.setattr("switchx.training.metrics.time.perf_counter", lambda: Clock.now)
    return Clock


def test_evaluations_and_saves_do_not_count_as_training(clock):
    watch = Stopwatch()
    assert watch.read() == 0
    watch.start()
    clock.now += 2
    assert watch.read() == 2
    watch.stop()
    clock.now += 30  # an evaluation
    assert watch.read() == 2
    watch.stop()
    watch.start()
    clock.now += 1
    watch.start()  # it runs already: nothing is lost
    clock.now += 1
    assert watch.read() == 4
    watch.stop()
    assert watch.seconds == 4


def step(loss=2.0, nll=8.0, grad_norm=3.0, is_skipped=0, stats=None) -> StepMetrics:
    number = np.float32
    return StepMetrics(
        sums=TokenSums(number(2 * nll), number(nll), number(1), number(4)),
        loss=number(loss),
        routing=stats,
        grad_norm=number(grad_norm),
        is_skipped=np.int32(is_skipped),
        skipped_in_a_row=np.int32(is_skipped),
    )


def test_means_over_tokens_and_rates_over_seconds():
    interval = Interval(10.0)
    interval.add(step(loss=2.0, nll=8.0, grad_norm=3.0), input_tokens=100, examples=5)
    interval.add(step(loss=4.0, nll=12.0, grad_norm=5.0), input_tokens=140, examples=7)
    assert interval.metrics(14.0, flops_per_step=1e6) == {
        "loss": 3.0,
        "grad_norm": 4.0,
        "skipped_steps": 0,
        "steps_per_s": 0.5,
        "tokens_per_s": 60.0,
        "examples_per_s": 3.0,
        "model_flops_per_s": 5e5,
        "neg_log_perplexity": -20 / 8,
        "cross_entropy": 40 / 8,
        "accuracy": 2 / 8,
        "target_tokens": 8.0,
    }


def test_a_skipped_step_took_time_but_has_no_part_in_the_means():
    interval = Interval(0.0)
    interval.add(step(loss=2.0), input_tokens=100, examples=5)
    bad = step(loss=math.nan, nll=math.nan, grad_norm=math.inf, is_skipped=1)
    interval.add(bad, input_tokens=100, examples=5)
    metrics = interval.metrics(2.0, flops_per_step=1.0)
    assert metrics["loss"] == 2.0 and metrics["grad_norm"] == 3.0
    assert metrics["neg_log_perplexity"] == -2.0 and metrics["target_tokens"] == 4
    assert metrics["skipped_steps"] == 1
    assert metrics["steps_per_s"] == 1.0 and metrics["tokens_per_s"] == 100.0


def test_an_interval_of_skipped_steps_alone_says_so():
    interval = Interval(0.0)
    interval.add(step(loss=math.nan, is_skipped=1), input_tokens=10, examples=1)
    metrics = interval.metrics(1.0, flops_per_step=1.0)
    assert math.isnan(metrics["loss"]) and metrics["skipped_steps"] == 1
    assert "neg_log_perplexity" not in metrics and "routing" not in metrics


def test_routing_adds_up_over_steps_and_its_losses_are_averaged():
    interval = Interval(0.0)
    for _ in range(3):
        interval.add(step(stats=two_layers()), input_tokens=1, examples=1)
    metrics = interval.metrics(1.0, flops_per_step=1.0)
    assert metrics["dropped_fraction"] == 9 / 36
    assert metrics["routing"]["load"] == [[0.75, 0.25], [0.25, 0.75]]
    assert metrics["routing"]["balance_loss"] == [1.5, 1.25]
    assert metrics["routing"]["router_z_loss"] == [0.5, 0.25]
