# SPDX-License-Identifier: Apache-2.0
"""The in-flight part of `switchx bench decode` compares two policies over the same answers."""

import dataclasses

import jax
import pytest

from switchx.bench import inflight as bench
from switchx.inference.config import DecodingConfig
from switchx.models.params import init_params
from switchx.serving.limits import Limits
from switchx.serving.request_queue import Group, QueuedInput
from tests.serving import served


def test_the_baseline_takes_one_group_and_nothing_beside_what_runs():
    limits = Limits()

    def queued(new_tokens):
        settings = DecodingConfig(new_tokens)
        group = Group.of([5], settings, limits)
        return QueuedInput([5], settings, 0, group, lambda event: None)

    short, long, other = queued(9), queued(60), queued(10)
    assert bench.batch_by_batch([], [short, long, other]) == [short, other]
    assert bench.batch_by_batch([], [long, short]) == [long]
    assert bench.batch_by_batch([other], [short, long]) == bench.batch_by_batch([], []) == []


@pytest.mark.slow
def test_both_policies_give_the_same_answers(monkeypatch):
    mixes = [dataclasses.replace(mix, longest=16) for mix in bench.MIXES]
    for name, value in (("REQUESTS", 12), ("SLOTS", 2), ("MIXES", mixes), ("LOAD", 5.0)):
        monkeypatch.setattr(bench, name, value)
    params = init_params(served.CONFIG, jax.random.key(33))
    rows, checks = bench.inflight(served.CONFIG, params, rounds=1)
    assert [row["scheduling"].split(", ")[1] for row in rows] == [
        "in flight", "batch by batch"
    ] * 2  # fmt: skip
    assert all(row["tokens_per_s"] > 0 and row["first_token_s"] > 0 for row in rows)
    assert {check.name: check.bound for check in checks} == {
        "inflight_throughput": ">=1.25", "inflight_first_token": "<=0.2",
        "inflight_short_throughput": ">=1.0", "inflight_tokens_identical": "==1",
    }  # fmt: skip
    assert checks[-1].holds
