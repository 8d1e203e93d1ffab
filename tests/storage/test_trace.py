# SPDX-License-Identifier: Apache-2.0
"""Traces, and what is simulated on them."""

import numpy as np
import pytest

from switchx.storage.cache import BACKWARD, FORWARD, UPDATE, Cache, Moment, make_policy
from switchx.storage.cached_store import CachedStore
from switchx.storage.record import Record, StoreLayout
from switchx.storage.simulation import (
    POLICIES,
    choose,
    decoding_trace,
    least_capacity,
    run_policy,
    simulate,
    simulate_capacities,
    training_trace,
)
from switchx.storage.store import RecordStore
from switchx.storage.trace import Trace, read_trace, trace_of_choices, trace_of_steps
from tests.storage.stored import TYPES, record


def as_rows(trace):
    return [(keys.tolist(), moment) for keys, moment in trace.requests()]


def test_sweeps_of_a_step_by_hand():
    trace = trace_of_steps([[np.array([2, 0]), np.array([1])]], ["a", "b"], 3, 5, sweeps=3)
    assert trace.sweeps == 3
    assert as_rows(trace) == [
        ([0, 2], Moment(0, FORWARD, 0)),
        ([4], Moment(0, FORWARD, 1)),
        ([4], Moment(0, BACKWARD, 1)),
        ([0, 2], Moment(0, BACKWARD, 0)),
        ([0], Moment(0, UPDATE, 0)),
        ([2], Moment(0, UPDATE, 0)),
        ([4], Moment(0, UPDATE, 1)),
    ]


def test_choices_of_tokens_by_hand():
    """4 tokens of 2 stacks in 2 steps; 3 is no expert."""
    encoder = np.array([[[0, 1], [0, 3], [2, 3], [2, 1]]])
    decoder = np.array([[[1, 3], [1, 3], [3, 3], [0, 3]]])
    trace = trace_of_choices([(["e"], encoder), (["d"], decoder)], 3, 7, 1, 4)
    assert as_rows(trace) == [
        ([0, 1], Moment(0, 0, 0)),
        ([4], Moment(0, 0, 1)),
        ([1, 2], Moment(1, 0, 0)),
        ([3], Moment(1, 0, 1)),
    ]
    assert (trace.layers, trace.record_bytes, trace.sweeps) == (("e", "d"), 7, 1)


def test_files_are_read_again(tmp_path):
    trace = training_trace(0.25, steps=2)
    path = tmp_path / "storage" / "trace.npz"
    trace.save(path)
    again = read_trace(path)
    assert as_rows(again) == as_rows(trace)
    assert (again.layers, again.num_experts) == (trace.layers, trace.num_experts)
    assert [each.name for each in path.parent.iterdir()] == ["trace.npz"]


@pytest.mark.parametrize("content", [b"", b"PK", b"text"])
def test_damaged_files_are_named(tmp_path, content):
    (tmp_path / "trace.npz").write_bytes(content)
    with pytest.raises(ValueError, match="trace.npz is no trace"):
        read_trace(tmp_path / "trace.npz")


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ([[0, 6], [0, 0], [0, 0], [0, 1]], "keys from 0 to 6, but 2 layers of 3 experts"),
        ([[0], [0, 0], [0], [0]], "different lengths"),
        ([[0], [0], [3], [0]], r"sweeps \[3\]"),
        ([[], [], [], []], "no expert was requested"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(arrays, words):
    with pytest.raises(ValueError, match=words):
        Trace(*map(np.array, arrays), layers=("a", "b"), num_experts=3, record_bytes=1)


def test_next_use_is_near_belady():
    each = simulate(training_trace(1.0, steps=8), 96)
    assert each.hits("next_use") >= 0.999 * each.hits("belady")
    # LRU hits only where a sweep turns back: a quarter of one sweep, twice in three.
    assert each.hits("lru") == pytest.approx(2 * 0.25 / 3, abs=0.02)
    each = simulate(training_trace(0.5, steps=8), 96)
    assert each.hits("next_use") >= 0.8 * each.hits("belady")
    assert each.chosen == "next_use"


def test_changed_records_are_written_back_as_often_as_they_leave_after_an_update():
    # A cache of all never writes back; one of a single layer does so for every update.
    trace = training_trace(1.0, steps=3)
    assert run_policy(trace, trace.num_keys, "lru")[1] == 0
    assert run_policy(trace, 32, "lru")[1] == 3 * trace.num_keys - 32


def test_the_choice_its_worth_and_the_smallest_capacity():
    trace = decoding_trace(4, 32, 2, 300, 0.8, repeated=0.4, drift=50)
    each = simulate(trace, 32)
    first = {policy: each.hits(policy, half=0) for policy in POLICIES}
    second = {policy: each.hits(policy, half=1) for policy in POLICIES}
    assert first[each.chosen] == max(first.values())
    assert each.chosen_vs_best == second[each.chosen] - max(second.values())
    assert each.chosen_vs_best >= -0.02
    trace = decoding_trace(2, 40, 1, 300, 1.0)
    simulations = simulate_capacities(trace)
    assert [each.capacity for each in simulations] == [8, 20, 40, 60, 80]
    rates = [each.hits(each.chosen, half=0) for each in simulations]
    assert choose(simulations, rates[2]) is simulations[2]
    assert choose(simulations, 1.0) is simulations[-1]
    # Training may need all of a layer's experts, however few the trace has.
    assert least_capacity(training_trace(0.25)) == 32


@pytest.mark.parametrize("name", POLICIES)
def test_a_store_has_the_simulated_hits_and_keeps_its_changes(tmp_path, name):
    """Steps of training: updates go to the cache, evictions to the disk."""
    layout = StoreLayout({"a": TYPES, "b": TYPES}, num_experts=4)
    rng = np.random.default_rng(0)
    used = [[rng.choice(4, 2, replace=False) for _ in range(2)] for _ in range(5)]
    trace = trace_of_steps(used, list(layout.layers), 4, layout.record_bytes, sweeps=3)
    updates = [0] * 8
    with RecordStore(tmp_path / "store", layout) as store:
        for key in range(8):
            store.write(key, record(key, 0))
        cached = CachedStore(store, Cache(3, make_policy(name, 2, 4, 3)))
        for keys, moment in trace.requests():
            cached.request(keys, moment)
            for key in keys.tolist():
                assert cached.get(key).updates == updates[key]
                if moment.sweep == UPDATE:
                    updates[key] += 1
                    cached.put(key, Record(cached.get(key).arrays, updates[key]))
        hit_T, num_written_back = run_policy(trace, 3, name)
        assert cached.cache.num_hits == hit_T.sum()
        assert cached.cache.num_written_back == num_written_back
        cached.flush()
        assert [store.read(key).result().updates for key in range(8)] == updates
