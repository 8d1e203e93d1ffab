# SPDX-License-Identifier: Apache-2.0
"""The serving part of `switchx bench decode` counts requests, and answers that are wrong."""

import dataclasses

import jax
import pytest

from switchx.bench import serving as bench
from switchx.models.params import init_params
from tests.serving import served

SMALL = (("CONCURRENCY", (2,)), ("REQUESTS", 7), ("NEW_TOKENS", 4), ("BATCH_SIZE", 2))
INPUTS = [[5, 6, 7, 1], [30, 31, 32, 1]]  # of one length: few programs


@pytest.fixture
def small(monkeypatch):
    for name, value in SMALL:
        monkeypatch.setattr(bench, name, value)
    params = init_params(served.CONFIG, jax.random.key(33))
    return served.CONFIG, params


@pytest.mark.slow
def test_each_request_is_timed_and_compared(small):
    assert bench.is_available()
    (row,), (check,) = bench.serving(*small, INPUTS, rounds=2)
    assert row["decoding"] == "serving, concurrency 2"
    assert row["requests"] == 14 and row["wrong_answers"] == row["lost_answers"] == 0
    assert row["vs_baseline"] > 0
    assert 0 < row["p50_ms"] <= row["p99_ms"] and row["requests_per_s"] > 0
    assert (check.name, check.holds) == ("serve_wrong_answers", True)


def test_wrong_and_lost_answers_are_counted(small):
    """Of requests by turns answered, refused, and answered otherwise than it was wanted."""
    tally = bench.Tally()
    limits = dataclasses.replace(served.LIMITS, warm_up_tokens=0)
    with served.started(limits) as service, served.listening(service) as address:
        bench._ask(address, [[5, 1], [400]], [[7], []], 2, tally)
    assert (tally.lost, tally.wrong, len(tally.latencies_s)) == (3, 4, 4)
