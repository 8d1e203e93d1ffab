# SPDX-License-Identifier: Apache-2.0
"""What `switchx bench decode` measures of a server: requests, wrong answers, two policies."""

import dataclasses
import threading

import jax
import pytest

from switchx.bench import continuous_batching, serving
from switchx.inference.config import DecodingConfig
from switchx.inference.program_cache import COMPILATIONS
from switchx.models.params import init_params
from switchx.serving.limits import Limits
from switchx.serving.request_queue import ProgramShape, QueuedInput
from switchx.serving.scheduler import Worker
from tests.serving import served

SERVED = (("CONCURRENCY", (2,)), ("REQUESTS", 7), ("NEW_TOKENS", 4), ("BATCH_SIZE", 2))
INPUTS = [[5, 6, 7, 1], [30, 31, 32, 1]]  # of one length: few programs


@pytest.fixture
def served_model(monkeypatch):
    for name, value in SERVED:
        monkeypatch.setattr(serving, name, value)
    params = init_params(served.CONFIG, jax.random.key(33))
    return served.CONFIG, params


@pytest.mark.slow
def test_each_request_is_timed_and_compared(served_model):
    assert serving.is_available()
    (row,), (check,) = serving.serving(*served_model, INPUTS, rounds=2)
    assert row["decoding"] == "serving, concurrency 2"
    assert row["requests"] == 14 and row["wrong_answers"] == row["lost_answers"] == 0
    assert row["vs_baseline"] > 0
    assert 0 < row["p50_ms"] <= row["p99_ms"] and row["requests_per_s"] > 0
    assert (check.name, check.holds) == ("serve_wrong_answers", True)


def test_what_compiles_is_not_timed(served_model, monkeypatch):
    """Rounds are repeated, untimed, until one compiles nothing; the median of others counts."""
    walls_s, were_warm = iter([50.0, 50.0, 50.0, 2.0, 1.0, 9.0]), []

    def ask(address, inputs, wanted, concurrency, tally):
        workers = (each for each in threading.enumerate() if isinstance(each, Worker))
        were_warm.append(all(worker.is_warm for worker in workers))
        tally.walls_s.append(next(walls_s))
        tally.latencies_s.append(1.0)
        COMPILATIONS.number += len(were_warm) < 3

    monkeypatch.setattr(serving, "_ask", ask)
    (row,), _ = serving.serving(*served_model, INPUTS, rounds=3)
    assert len(were_warm) == 6 and all(were_warm) and row["compilations"] == 0
    assert (row["requests"], row["requests_per_s"]) == (3, 0.5)


def test_wrong_and_lost_answers_are_counted(served_model):
    """Of requests by turns answered, refused, and answered otherwise than it was wanted."""
    tally = serving.Tally()
    limits = dataclasses.replace(served.LIMITS, warm_up_tokens=0)
    with served.started(limits) as service, served.listening(service) as address:
        serving._ask(address, [[5, 1], [400]], [[7], []], 2, tally)
    assert (tally.lost, tally.wrong, len(tally.latencies_s)) == (3, 4, 4)


def test_the_baseline_takes_one_group_and_nothing_beside_what_runs():
    limits = Limits()

    def queued(new_tokens):
        settings = DecodingConfig(new_tokens)
        shape = ProgramShape.of([5], settings, limits)
        return QueuedInput([5], settings, 0, shape, lambda event: None)

    short, long, other = queued(9), queued(60), queued(10)
    assert continuous_batching.batch_by_batch([], [short, long, other]) == [short, other]
    assert continuous_batching.batch_by_batch([], [long, short]) == [long]
    assert (
        continuous_batching.batch_by_batch([other], [short, long])
        == continuous_batching.batch_by_batch([], [])
        == []
    )


@pytest.mark.slow
def test_both_policies_give_the_same_answers(monkeypatch):
    mixes = [dataclasses.replace(mix, longest=16) for mix in continuous_batching.MIXES]
    for name, value in (("REQUESTS", 12), ("SLOTS", 2), ("MIXES", mixes), ("LOAD", 5.0)):
        monkeypatch.setattr(continuous_batching, name, value)
    params = init_params(served.CONFIG, jax.random.key(33))
    rows, checks = continuous_batching.inflight(served.CONFIG, params, rounds=1)
    assert [row["scheduling"].split(", ")[1] for row in rows] == [
        "in flight", "batch by batch"
    ] * 2  # fmt: skip
    assert all(row["tokens_per_s"] > 0 and row["first_token_s"] > 0 for row in rows)
    assert {check.name: check.bound for check in checks} == {
        "inflight_throughput": ">=1.25", "inflight_first_token": "<=0.2",
        "inflight_short_throughput": ">=1.0", "inflight_tokens_identical": "==1",
    }  # fmt: skip
    assert checks[-1].holds
