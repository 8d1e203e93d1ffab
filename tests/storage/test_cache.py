# SPDX-License-Identifier: Apache-2.0
"""The cache and its policies, against libraries, exhaustive search and hand-worked numbers.

Algorithm 1 of SE-MoE (arXiv:2205.10034) stands here as it is printed, to show why it is mended.
"""

import collections
import concurrent.futures
import functools

import cachetools
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from switchx.storage.cache import LRU, Cache, DecayedLFU, Moment, NextUse, belady, make_policy
from switchx.storage.cached_store import CachedStore
from switchx.storage.record import Record
from switchx.storage.simulation import decoding_trace

HERE = Moment(0, 0, 0)
NUM_KEYS = 8
SEQUENCES = st.lists(st.integers(0, NUM_KEYS - 1), min_size=1, max_size=60)
CAPACITIES = st.integers(1, NUM_KEYS)


def hits_of(policy, capacity, keys) -> list[bool]:
    """Of requests of one key each."""
    cache = Cache(capacity, policy)
    return [not len(cache.request([key], HERE).missed) for key in keys]


# Policies.


def hits_of_library(cache, keys) -> list[bool]:
    hits = []
    for key in keys:
        hits.append(cache.get(key) is not None)
        if not hits[-1]:
            cache[key] = True
    return hits


@given(SEQUENCES, CAPACITIES)
@settings(max_examples=100)
def test_lru_is_that_of_cachetools(keys, capacity):
    expected = hits_of_library(cachetools.LRUCache(capacity), keys)
    assert hits_of(LRU(1, NUM_KEYS), capacity, keys) == expected


@given(SEQUENCES, CAPACITIES)
@settings(max_examples=100)
def test_lfu_is_that_of_cachetools_until_an_evicted_key_returns(keys, capacity):
    """From there on they differ: cachetools forgets the count of what it evicts."""
    library = cachetools.LFUCache(capacity)
    end, seen = len(keys), set()
    expected = []
    for t, key in enumerate(keys):
        if key in seen and key not in library:
            end = t
            break
        expected += hits_of_library(library, [key])
        seen.add(key)
    assert hits_of(DecayedLFU(1, NUM_KEYS, beta=1.0), capacity, keys[:end]) == expected


def test_counts_survive_eviction_and_decay():
    # Counts of 0 and 1 are 3 and 2: 2 evicts 1, and 1, now with 3, evicts 2. Then 0 and 1 have
    # 3 each and 0 is the older one; had 1's count begun anew, 1 would be evicted.
    cache = Cache(2, DecayedLFU(1, 3, beta=1.0))
    keys = (0, 0, 0, 1, 1, 2, 1, 2)
    evicted = [cache.request([key], HERE).evicted.tolist() for key in keys]
    assert evicted == [[], [], [], [], [], [1], [2], [0]]
    # Halved after the 4th key (0: 2) and the 8th (0: 1.5, 1: 1.5), counts end as 1.5 and 2.5;
    # not halved, as 5 and 4.
    keys = [0, 0, 0, 0, 0, 1, 1, 1, 1]
    for beta, victim in ((0.5, 0), (1.0, 1)):
        cache = Cache(2, DecayedLFU(1, 3, beta=beta, period=4))
        for key in keys:
            cache.request([key], HERE)
        assert cache.request([2], HERE).evicted.tolist() == [victim]


def test_next_use_by_hand():
    """3 layers of 2 experts in training: 9 turns a step; backward has 2 at turn 3."""
    policy = NextUse(3, 2, sweeps=3, beta=0.5)
    for step, of_layer_0 in enumerate([[0, 1], [0]]):
        for layer, experts in enumerate([of_layer_0, [0], [1]]):
            keys = np.array([2 * layer + e for e in experts])
            policy.request(keys, Moment(step, 0, layer))
    # Used in this step and at turn 3 itself, not served yet: layer 2's turn is now; layer 1's
    # is turn 4, layer 0's turn 5.
    now = Moment(1, 1, 2)
    policy.request(np.array([], int), now)
    assert policy.distances(np.array([5, 2, 0]), now).tolist() == [0, 1, 2]
    # Passed by in this step: layer 0's next forward is 9 - 3 turns away. Key 1 was used in the
    # first of two steps: p = 0.5 / 1.5, so 2 steps of 9 turns more.
    assert policy.distances(np.array([1]), now).tolist() == [6 + 2 * 9]
    # Never used.
    assert policy.distances(np.array([3, 4]), now).tolist() == [np.inf, np.inf]
    # Served in this turn: the update of layer 2 is turn 8.
    policy.request(np.array([5]), now)
    assert policy.distances(np.array([5]), now).tolist() == [8 - 3]


def test_next_use_has_room_in_a_trace_that_begins_within_a_step():
    """No layer was passed forward yet: what will be used is unknown, and yet one goes."""
    cache = Cache(2, NextUse(2, 4, sweeps=3))
    for expert in range(4):
        cache.request([expert], Moment(0, 2, 0))
    assert len(cache.resident) == 2


def test_next_use_expects_what_is_used_often_first():
    """Decoding: two experts of the next layer, of which one is used in every step."""
    policy = NextUse(2, 2, sweeps=1)
    for step in range(4):
        policy.request(np.array([0]), Moment(step, 0, 0))
        policy.request(np.array([2, 3] if step == 0 else [2]), Moment(step, 0, 1))
    policy.request(np.array([0]), Moment(4, 0, 0))
    assert policy.victims(np.array([2, 3]), 1, Moment(4, 0, 0)).tolist() == [3]


@pytest.mark.parametrize("name", ["lru", "decayed_lfu", "next_use"])
def test_many_victims_are_those_of_one_at_a_time(name):
    rng = np.random.default_rng(0)
    policies = [make_policy(name, 4, 8, sweeps=1) for _ in range(2)]
    for step in range(20):
        for layer in range(4):
            keys = 8 * layer + rng.choice(8, 3, replace=False)
            for policy in policies:
                policy.request(keys, Moment(step, 0, layer))
    many, (here, left) = policies[0], (Moment(19, 0, 3), list(range(32)))
    for _ in range(10):
        left.remove(int(policies[1].victims(np.array(left), 1, here)[0]))
    assert sorted(many.victims(np.arange(32), 10, here)) == sorted(set(range(32)) - set(left))


# The bound.


def most_hits(keys, capacity) -> int:
    """By trying every eviction."""

    @functools.cache
    def rest(t, resident):
        if t == len(keys):
            return 0
        if keys[t] in resident:
            return 1 + rest(t + 1, resident)
        if len(resident) < capacity:
            return rest(t + 1, resident | {keys[t]})
        return max(rest(t + 1, resident - {each} | {keys[t]}) for each in resident)

    return rest(0, frozenset())


@given(st.lists(st.integers(0, 4), min_size=1, max_size=14), st.integers(1, 4))
@settings(max_examples=60)
def test_belady_is_the_best_of_all_evictions(keys, capacity):
    assert belady(keys, capacity).sum() == most_hits(tuple(keys), capacity)


@given(SEQUENCES, CAPACITIES, st.sampled_from(["lru", "decayed_lfu", "next_use"]))
@settings(max_examples=60)
def test_no_policy_passes_the_bound(keys, capacity, name):
    hits = hits_of(make_policy(name, 1, NUM_KEYS, 1), capacity, keys)
    assert sum(hits) <= belady(keys, capacity).sum()


# The cache.


def test_a_request_is_admitted_whole_or_refused():
    cache = Cache(3, LRU(1, 6))
    cache.request([0, 1, 2], HERE)
    admission = cache.request([0, 3, 4], HERE)
    assert sorted(admission.evicted) == [1, 2] and sorted(cache.resident) == [0, 3, 4]
    assert (cache.num_requested, cache.num_hits) == (6, 1)
    cache = Cache(3, LRU(1, 6))
    cache.request([0, 1], HERE)
    with pytest.raises(ValueError, match="holds 3 records, but layer 0 needs 4 .* at least 4"):
        cache.request([0, 1, 2, 3], Moment(0, 0, 0))
    assert sorted(cache.resident) == [0, 1] and cache.num_requested == 2


def test_wrong_calls_are_named():
    cache = Cache(3, LRU(1, 6))
    with pytest.raises(ValueError, match="repeat"):
        cache.request([1, 1], HERE)
    with pytest.raises(ValueError, match=r"\[5\] are not resident and cannot be dirty"):
        cache.mark_dirty([5])
    with pytest.raises(ValueError, match="capacity=0"):
        Cache(0, LRU(1, 6))
    with pytest.raises(ValueError, match="lru, decayed_lfu, next_use"):
        make_policy("mru", 1, 1, 1)


class DelayedStore:
    """A store whose reads and writes are done when the test says so."""

    def __init__(self):
        self.disk = {key: Record({}, 0) for key in range(NUM_KEYS)}
        self.pending = collections.deque()

    def read(self, key):
        return self._later(lambda: self.disk[key])

    def write(self, key, value):
        return self._later(lambda: self.disk.update({key: value}))

    def _later(self, work):
        store, future = self, concurrent.futures.Future()
        self.pending.append((future, work))
        result = future.result

        def wait():
            while not future.done():
                store.do_one()
            return result()

        future.result = wait
        return future

    def do_one(self):
        future, work = self.pending.popleft()
        try:
            future.set_result(work())
        except KeyError as error:
            future.set_exception(error)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("request"), st.sets(st.integers(0, NUM_KEYS - 1), max_size=3)),
        st.tuples(st.just("put"), st.integers(0, NUM_KEYS - 1)),
        st.tuples(st.sampled_from(["flush", "disk"]), st.just(0)),
    ),
    min_size=20,
    max_size=60,
)


@given(OPERATIONS, CAPACITIES, st.sampled_from(["lru", "decayed_lfu", "next_use"]))
@settings(max_examples=120)
def test_room_and_changes_are_kept_whatever_is_requested(operations, capacity, name):
    store = DelayedStore()
    cached = CachedStore(store, Cache(capacity, make_policy(name, 2, NUM_KEYS // 2, 1)))
    latest = dict(store.disk)
    for t, (operation, what) in enumerate(operations):
        resident = cached.cache.resident.tolist()
        if operation == "request" and len(what) <= capacity:
            cached.request(sorted(what), Moment(t, 0, 0))
            assert what <= set(cached.cache.resident.tolist())
        elif operation == "put" and resident:
            what = resident[what % len(resident)]
            latest[what] = Record({}, t + 1)
            cached.put(what, latest[what])
        elif operation == "flush":
            cached.flush()
            assert not len(cached.cache.dirty)
            assert all(store.disk[key] is latest[key] for key in latest)
        elif operation == "disk" and store.pending:
            store.do_one()
        assert len(cached.cache.resident) <= capacity
    assert all(cached.get(key) is latest[key] for key in cached.cache.resident.tolist())
    cached.flush()
    assert all(store.disk[key] is latest[key] for key in latest)


def test_a_record_whose_read_failed_is_read_again_when_it_is_requested_again():
    store = DelayedStore()
    cached = CachedStore(store, Cache(2, LRU(1, NUM_KEYS)))
    record = store.disk.pop(3)
    cached.request([3], HERE)
    assert not cached.is_here(3)
    with pytest.raises(KeyError):
        cached.get(3)
    # It failed: nothing is here, and a second `get` says the same.
    assert not cached.is_here(3)
    with pytest.raises(KeyError):
        cached.get(3)
    store.disk[3] = record
    cached.request([3, 4], HERE)
    assert cached.get(3) is record and cached.is_here(3)
    assert len(store.pending) == 1  # of key 4
    cached.request([3], HERE)
    assert len(store.pending) == 1


# Algorithm 1 as it is printed.


def algorithm_1(keys, cpu_size, threshold, beta, num_steps):
    """Lines 4 to 25; True where the record is in the cache at line 24, which sends it."""
    caches, hits, num_caches, steps, is_there = set(), {}, 0, 0, []
    for p_s in keys:
        if p_s in caches:
            hits[p_s] = hits.get(p_s, 0) + 1  # line 18 gives no count: KeyError as printed
        elif num_caches + 1 < cpu_size:
            hits[p_s] = 1
            num_caches += 1
            caches.add(p_s)
        else:
            for p_a in list(hits):  # as printed it deletes from what it goes through
                if p_a in hits and hits[p_a] >= threshold and min(hits.values()) == hits[p_a]:
                    caches.discard(p_a)
                    del hits[p_a]
                    caches.add(p_s)
                    if not hits:
                        break
        steps += 1
        if steps == num_steps:
            hits = {each: count * beta for each, count in hits.items()}
            steps = 0
        is_there.append(p_s in caches)
    return is_there, caches


def test_algorithm_1_sends_records_that_it_has_not_and_ours_never_does():
    """A record below the threshold is never evicted, and as the least one blocks the others."""
    trace = decoding_trace(4, 32, 1, 200, 1.0)
    keys, capacity = trace.key_T.tolist(), 32
    is_there, caches = algorithm_1(keys, capacity, threshold=2, beta=0.5, num_steps=100)
    assert np.mean(is_there) < 0.8
    assert len(caches) < capacity  # one slot is never used
    cache = Cache(capacity, DecayedLFU(4, 32, beta=0.5, period=100))
    for key in keys:
        cache.request([key], HERE)
        assert key in cache.resident
    assert len(cache.resident) == capacity


def test_algorithm_1_is_wedged_by_one_record():
    # 0 and 1 fill the cache of 3; neither reaches the threshold, so nothing is ever evicted.
    is_there, caches = algorithm_1([0, 1, 2, 3, 2, 3, 2, 3], 3, 2, 0.5, 1000)
    assert is_there == [True, True] + [False] * 6 and caches == {0, 1}
