# SPDX-License-Identifier: Apache-2.0
"""Which experts stay in host memory: a cache, its policies, and a bound that none can exceed.

`Cache` decides alike for running training and decoding and for the simulator; it holds keys
but no bytes. SE-MoE (Shen et al. 2022, arXiv:2205.10034), section 2.2 and Algorithm 1, caches
the states of experts by use. `DecayedLFU` is that algorithm, corrected: as printed, a record
below its threshold is never evicted and keeps all others from being evicted, the record that
was fetched instead of another has no count, one slot is never used, and several are evicted
where counts tie. `belady` is the optimum of L. A. Belady (IBM Systems Journal 5, 1966), which
knows the future.

A key is the layer's number times the number of experts, plus the expert's number.
Dims: N Switch layers, E experts; arrays `_NE` are flat, one element per key; T requested keys
"""

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from switchx.fields import (
    require,
    require_choice,
)
from switchx.storage import PolicyName

# The sweeps of a training step over the layers, in order; decoding has only the first.
# Backward goes from the last layer to the first, the others from the first to the last.
SWEEPS = ("forward", "backward", "update")
FORWARD, BACKWARD, UPDATE = range(3)


class Moment(NamedTuple):
    """The point that a run is at when it requests experts."""

    step: int
    sweep: int
    layer: int


class Policy(Protocol):
    """Chooses what is evicted.

    Attributes:
        num_keys: N * E.
    """

    num_keys: int

    def request(self, keys: np.ndarray, moment: Moment) -> None:
        """Takes note of a request, before its victims are chosen."""

    def victims(self, candidates: np.ndarray, number: int, moment: Moment) -> np.ndarray:
        """The `number` candidates to evict; the policy is not notified of their eviction."""


class Admission(NamedTuple):
    """The changes that a request made to the cache.

    Attributes:
        missed: keys of the request that were not resident and are now.
        evicted: keys that are no longer resident.
        written_back: the dirty keys of `evicted`, whose records are written before they are
            dropped.
    """

    missed: np.ndarray
    evicted: np.ndarray
    written_back: np.ndarray


class Cache:
    """Which keys are resident, and which of them differ from what is stored.

    Attributes:
        capacity: number of keys that may be resident at once.
        num_requested, num_hits: numbers of keys, over all requests.
        num_written_back: number of keys evicted while dirty.
    """

    def __init__(self, capacity: int, policy: Policy):
        require(capacity >= 1, f"capacity={capacity} records; use at least 1")
        self.capacity = capacity
        self.num_requested = self.num_hits = self.num_written_back = 0
        self._policy = policy
        self._is_resident_NE = np.zeros(policy.num_keys, bool)
        self._is_dirty_NE = np.zeros(policy.num_keys, bool)
        self._num_resident = 0

    @property
    def resident(self) -> np.ndarray:
        return np.flatnonzero(self._is_resident_NE)

    @property
    def dirty(self) -> np.ndarray:
        return np.flatnonzero(self._is_dirty_NE)

    def request(self, keys: Sequence[int] | np.ndarray, moment: Moment) -> Admission:
        """Makes all of `keys` resident at once; none of them evicts another.

        Raises:
            ValueError: a key is given twice, or there are more keys than the cache holds.
                Nothing has changed then.
        """
        keys = np.asarray(keys, np.int64)
        is_asked_NE = np.zeros(len(self._is_resident_NE), bool)
        is_asked_NE[keys] = True
        require(
            np.count_nonzero(is_asked_NE) == len(keys),
            f"keys {keys.tolist()} of one request repeat; request each once",
        )
        require(
            len(keys) <= self.capacity,
            f"the cache holds {self.capacity} records, but layer {moment.layer} needs "
            f"{len(keys)} at once: give the cache room for at least {len(keys)}",
        )
        missed = keys[~self._is_resident_NE[keys]]
        num_evicted = max(0, self._num_resident + len(missed) - self.capacity)
        evicted = missed[:0]
        self._policy.request(keys, moment)
        if num_evicted:
            candidates = np.flatnonzero(self._is_resident_NE & ~is_asked_NE)
            evicted = self._policy.victims(candidates, num_evicted, moment)
            require(len(evicted) == num_evicted, f"{len(evicted)} victims of {num_evicted}")
        written_back = evicted[self._is_dirty_NE[evicted]]
        self._is_resident_NE[evicted] = self._is_dirty_NE[evicted] = False
        self._is_resident_NE[missed] = True
        self._num_resident += len(missed) - len(evicted)
        self.num_requested += len(keys)
        self.num_hits += len(keys) - len(missed)
        self.num_written_back += len(written_back)
        return Admission(missed, evicted, written_back)

    def mark_dirty(self, keys: Sequence[int] | np.ndarray) -> None:
        """Marks resident keys as changed since they were read."""
        absent = [int(key) for key in keys if not self._is_resident_NE[key]]
        require(not absent, f"keys {absent} are not resident and cannot be dirty")
        self._is_dirty_NE[keys] = True

    def mark_clean(self, keys: Sequence[int] | np.ndarray) -> None:
        """Marks keys as written; they stay resident."""
        self._is_dirty_NE[keys] = False


class LRU:
    """Evicts the least recently requested keys."""

    def __init__(self, num_layers: int, num_experts: int):
        self.num_keys = num_layers * num_experts
        self._clock = _Clock(self.num_keys)

    def request(self, keys: np.ndarray, moment: Moment) -> None:
        self._clock.tick(keys)

    def victims(self, candidates: np.ndarray, number: int, moment: Moment) -> np.ndarray:
        age = self._clock.age(candidates)
        return _largest(candidates, number, age, age)


class DecayedLFU:
    """Evicts the keys requested least often of late: Algorithm 1 of SE-MoE, corrected.

    All keys are counted, and counts survive eviction; among equal counts, the least recently
    requested key is evicted.

    Args:
        beta: the paper's attenuation coefficient.
        period: the paper's K: number of requested keys after which counts are multiplied by
            beta; None takes ten times the number of all keys.
    """

    def __init__(
        self, num_layers: int, num_experts: int, beta: float = 0.5, period: int | None = None
    ):
        self.num_keys = num_layers * num_experts
        self._beta = beta
        self._period = period or 10 * self.num_keys
        self._since_decay = 0
        self._count_NE = np.zeros(self.num_keys)
        self._clock = _Clock(self.num_keys)

    def request(self, keys: np.ndarray, moment: Moment) -> None:
        self._clock.tick(keys)
        self._count_NE[keys] += 1
        self._since_decay += len(keys)
        if self._since_decay >= self._period:
            self._count_NE *= self._beta
            self._since_decay -= self._period

    def victims(self, candidates: np.ndarray, number: int, moment: Moment) -> np.ndarray:
        return _largest(
            candidates, number, -self._count_NE[candidates], self._clock.age(candidates)
        )


class NextUse:
    """Evicts the record whose next use is expected last: Belady's rule, as far as a run knows.

    Layers come in a known order, sweep by sweep. Where a record is certain to be used, its
    distance is the number of layers until its own layer's next turn: a record that the
    forward sweep of this step has used will be used by the sweeps that follow it. Where only
    its share p of recent steps is known, the distance is that to the layer's turn in the
    next forward sweep plus (1/p - 1) steps, the mean number of steps that pass it by.

    Args:
        sweeps: number of sweeps of a step: 3 in training (forward, backward, update), 1 in
            decoding.
        beta: weight of a step in p, relative to the step after it.
    """

    def __init__(self, num_layers: int, num_experts: int, sweeps: int, beta: float = 0.98):
        require_choice("sweeps", sweeps, (1, len(SWEEPS)))
        self.num_keys = num_layers * num_experts
        self._beta = beta
        self._num_experts = num_experts
        self._num_turns = sweeps * num_layers
        # [sweeps, N]: number of each layer's turn within a step.
        self._turn_SN = np.stack(
            [
                sweep * num_layers + np.arange(num_layers)[:: -1 if sweep == BACKWARD else 1]
                for sweep in range(sweeps)
            ]
        )
        self._step = None
        self._turn = -1
        self._is_used_NE = np.zeros(self.num_keys, bool)  # in this step
        self._is_served_NE = np.zeros(self.num_keys, bool)  # in this turn
        self._is_routed_N = np.zeros(num_layers, bool)  # forward has passed in this step
        self._num_uses_NE = np.zeros(self.num_keys)  # steps, weighted by beta
        self._num_steps_N = np.zeros(num_layers)
        self._clock = _Clock(self.num_keys)

    def request(self, keys: np.ndarray, moment: Moment) -> None:
        if moment.step != self._step:
            self._step = moment.step
            self._is_used_NE[:] = self._is_routed_N[:] = False
        if (turn := self._turn_SN[moment.sweep, moment.layer]) != self._turn:
            self._turn = turn
            self._is_served_NE[:] = False
        if moment.sweep == FORWARD:
            self._count(keys, moment.layer)
        self._is_served_NE[keys] = True
        self._clock.tick(keys)

    def victims(self, candidates: np.ndarray, number: int, moment: Moment) -> np.ndarray:
        return _largest(
            candidates, number, self.distances(candidates, moment), self._clock.age(candidates)
        )

    def distances(self, keys: np.ndarray, moment: Moment) -> np.ndarray:
        """Number of turns from `moment` until each key is expected to be used."""
        now = self._turn_SN[moment.sweep, moment.layer]
        layer = keys // self._num_experts
        first = self._turn_SN[FORWARD, layer] - now
        steps_passed = np.where(self._is_routed_N[layer] | (first <= 0), 1.0, 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):  # 0 of 0 steps is unknown: far
            steps = self._num_steps_N[layer] / self._num_uses_NE[keys]
        steps_passed += np.nan_to_num(steps, nan=math.inf, posinf=math.inf) - 1
        by_chance = first + steps_passed * self._num_turns
        ahead_SK = self._turn_SN[:, layer] - now
        # A turn that has begun is still ahead for keys that it has not served.
        is_ahead_SK = (ahead_SK > 0) | (ahead_SK == 0) & ~self._is_served_NE[keys]
        certain = np.where(is_ahead_SK & self._is_used_NE[keys], ahead_SK, math.inf).min(axis=0)
        return np.minimum(certain, by_chance)

    def _count(self, keys: np.ndarray, layer: int) -> None:
        """Counts the uses in a step; further requests of a layer in the same step are added."""
        own = slice(layer * self._num_experts, (layer + 1) * self._num_experts)
        if not self._is_routed_N[layer]:
            self._is_routed_N[layer] = True
            self._num_steps_N[layer] = self._beta * self._num_steps_N[layer] + 1
            self._num_uses_NE[own] *= self._beta
        self._num_uses_NE[keys[~self._is_used_NE[keys]]] += 1
        self._is_used_NE[keys] = True


def make_policy(name: PolicyName, num_layers: int, num_experts: int, sweeps: int) -> Policy:
    """Makes the policy of a `StorageSpec`, with the policy's own defaults.

    Args:
        sweeps: number of sweeps of a step, see `NextUse`.
    """
    if name == "next_use":
        return NextUse(num_layers, num_experts, sweeps)
    require_choice("policy", name, ("lru", "decayed_lfu", "next_use"))
    return {"lru": LRU, "decayed_lfu": DecayedLFU}[name](num_layers, num_experts)


def belady(keys: Sequence[int] | np.ndarray, capacity: int) -> np.ndarray:
    """Which requested keys hit when the key whose next use is last is evicted; bool `[T]`.

    No policy that admits every requested key has more hits; `Cache`, where keys of one request
    do not evict each other, may have fewer.
    """
    keys = np.asarray(keys).tolist()
    next_use_T = [math.inf] * len(keys)
    seen: dict[int, int] = {}
    for t in reversed(range(len(keys))):
        next_use_T[t] = seen.get(keys[t], math.inf)
        seen[keys[t]] = t
    resident: dict[int, float] = {}
    latest: list[tuple[float, int]] = []
    hit_T = np.zeros(len(keys), bool)
    for t, key in enumerate(keys):
        hit_T[t] = key in resident
        if not hit_T[t] and len(resident) == capacity:
            while True:
                next_use, victim = heapq.heappop(latest)
                if resident.get(victim) == -next_use:  # not used again since
                    break
            del resident[victim]
        resident[key] = next_use_T[t]
        heapq.heappush(latest, (-next_use_T[t], key))
    return hit_T


class _Clock:
    """Records when keys were last requested."""

    def __init__(self, num_keys: int):
        self._now = 0
        self._last_NE = np.zeros(num_keys, np.int64)

    def tick(self, keys: np.ndarray) -> None:
        self._last_NE[keys] = self._now + 1 + np.arange(len(keys))
        self._now += len(keys)

    def age(self, keys: np.ndarray) -> np.ndarray:
        """Number of keys requested since the last request of each of these."""
        return self._now - self._last_NE[keys]


def _largest(
    candidates: np.ndarray, number: int, value: np.ndarray, age: np.ndarray
) -> np.ndarray:
    """The candidates with the largest values; among equal values, with the largest ages."""
    least = np.partition(value, -number)[-number]
    chosen = np.flatnonzero(value >= least)
    order = np.lexsort((age[chosen], value[chosen]))[::-1]
    return candidates[chosen[order[:number]]]
