# SPDX-License-Identifier: Apache-2.0
"""Hit rates of policies and capacities on a trace, and which of them to choose.

No policy is best on all traces, and published hit rates contradict each other, so the policy
is chosen on the first half of a trace of the run that will use it. The second half shows what
the choice is worth.
Dims: T requested keys
"""

import dataclasses
import typing

import numpy as np

from switchx.fields import require
from switchx.storage import PolicyName
from switchx.storage.cache import UPDATE, Cache, belady, make_policy
from switchx.storage.trace import Trace, trace_of_steps

POLICIES = typing.get_args(PolicyName)
# Capacities to try, as fractions of all records.
FRACTIONS = (0.1, 0.25, 0.5, 0.75, 1.0)


@dataclasses.dataclass(frozen=True)
class Simulation:
    """The simulation of a cache of one capacity on a trace.

    Attributes:
        capacity: number of records.
        hit_T: whether each key was resident when it was requested, by policy and for `belady`.
        num_written_back: number of records written because they had changed when evicted, by
            policy.
    """

    capacity: int
    hit_T: dict[str, np.ndarray]
    num_written_back: dict[str, int]

    def hits(self, policy: str, half: int | None = None) -> float:
        """The hit rate of a policy, or of "belady", in one half of the trace or all of it."""
        hit_T = self.hit_T[policy]
        middle = len(hit_T) // 2
        part = {None: hit_T, 0: hit_T[:middle], 1: hit_T[middle:]}[half]
        return float(part.mean())

    @property
    def chosen(self) -> str:
        """The policy with the most hits in the first half."""
        return max(POLICIES, key=lambda policy: self.hits(policy, half=0))

    @property
    def chosen_vs_best(self) -> float:
        """Hit rate of the chosen policy in the second half minus that of the best one there."""
        best = max(self.hits(policy, half=1) for policy in POLICIES)
        return self.hits(self.chosen, half=1) - best


def simulate(trace: Trace, capacity: int) -> Simulation:
    """Runs a trace through `Cache` with each policy, and through Belady's rule.

    Raises:
        ValueError: a request of the trace has more keys than the cache holds.
    """
    hit_T, num_written_back = {}, {}
    for name in POLICIES:
        hit_T[name], num_written_back[name] = run_policy(trace, capacity, name)
    hit_T["belady"] = belady(trace.key_T, capacity)
    return Simulation(capacity, hit_T, num_written_back)


def run_policy(trace: Trace, capacity: int, name: PolicyName) -> tuple[np.ndarray, int]:
    """Which keys of a trace hit, `[T]`, and how many changed records were written back."""
    policy = make_policy(name, len(trace.layers), trace.num_experts, trace.sweeps)
    cache = Cache(capacity, policy)
    hits = []
    for keys, moment in trace.requests():
        hits.append(~np.isin(keys, cache.request(keys, moment).missed))
        if moment.sweep == UPDATE:
            cache.mark_dirty(keys)
    return np.concatenate(hits), cache.num_written_back


def least_capacity(trace: Trace) -> int:
    """Number of records in the largest request; in training, which visits a layer in several
    sweeps and may need all of its experts, at least a layer's."""
    largest = int(np.unique(trace.request_T, return_counts=True)[1].max())
    return largest if trace.sweeps == 1 else max(largest, trace.num_experts)


def simulate_capacities(trace: Trace) -> list[Simulation]:
    """One simulation for each capacity of FRACTIONS that holds the largest request."""
    least = least_capacity(trace)
    capacities = [int(round(fraction * trace.num_keys)) for fraction in FRACTIONS]
    return [simulate(trace, capacity) for capacity in capacities if capacity >= least]


def choose(simulations: list[Simulation], min_hits: float) -> Simulation:
    """The simulation of the smallest capacity whose chosen policy reaches `min_hits` in the
    first half; if none does, that of the largest capacity.

    """
    for each in simulations:
        if each.hits(each.chosen, half=0) >= min_hits:
            return each
    return simulations[-1]


# Synthetic traces.


def training_trace(used_fraction: float, steps: int = 12, seed: int = 0) -> Trace:
    """A trace of training 12 layers of 32 experts, of which each step uses a part.

    A step's experts are drawn by Zipf's law with exponent 1, ordered differently in each layer.
    """
    num_layers, num_experts = 12, 32
    number = int(used_fraction * num_experts)
    require(0 < number <= num_experts, f"used_fraction={used_fraction}; use more than 0 to 1")
    rng = np.random.default_rng(seed)
    share_NE = _zipf_NE(rng, num_layers, num_experts, 1.0)
    used = [
        [rng.choice(num_experts, number, replace=False, p=share_E) for share_E in share_NE]
        for _ in range(steps)
    ]
    return trace_of_steps(used, _names(num_layers), num_experts, 1, sweeps=3)


def decoding_trace(
    num_layers: int,
    num_experts: int,
    selected: int,
    tokens: int,
    exponent: float,
    repeated: float = 0.0,
    drift: int | None = None,
    seed: int = 0,
) -> Trace:
    """A trace of decoding one token in each step.

    Args:
        selected: number of experts that a token chooses in each layer.
        exponent: exponent of Zipf's law.
        repeated: probability that a token chooses an expert of the previous token.
        drift: number of tokens after which other experts become popular; None keeps them.
    """
    rng = np.random.default_rng(seed)
    used: list[list[np.ndarray]] = []
    for token in range(tokens):
        if token % (drift or tokens) == 0:
            share_NE = _zipf_NE(rng, num_layers, num_experts, exponent)
        layers = []
        for n, share_E in enumerate(share_NE):
            kept = used[-1][n][rng.random(selected) < repeated] if used else np.empty(0, int)
            drawn = rng.choice(num_experts, selected, replace=False, p=share_E)
            new = drawn[~np.isin(drawn, kept)][: selected - len(kept)]
            layers.append(np.concatenate([kept, new]))
        used.append(layers)
    return trace_of_steps(used, _names(num_layers), num_experts, 1, sweeps=1)


def synthetic_traces() -> dict[str, Trace]:
    """Traces of four kinds of decoding (layers x experts); no policy is best on all."""
    return {
        "6x128, 1 a token": decoding_trace(6, 128, 1, 600, 1.0),
        "32x8, 2, repeated": decoding_trace(32, 8, 2, 150, 0.2, repeated=0.3),
        "8x256, 8": decoding_trace(8, 256, 8, 250, 0.5, repeated=0.15),
        "8x128, 8, drifting": decoding_trace(8, 128, 8, 250, 0.8, repeated=0.3, drift=60),
    }


def _zipf_NE(
    rng: np.random.Generator, num_layers: int, num_experts: int, exponent: float
) -> np.ndarray:
    """Shares of the experts in each layer, in random order."""
    share_E = 1 / np.arange(1, num_experts + 1) ** exponent
    return np.stack([rng.permutation(share_E) for _ in range(num_layers)]) / share_E.sum()


def _names(num_layers: int) -> list[str]:
    return [f"decoder {n}" for n in range(num_layers)]
