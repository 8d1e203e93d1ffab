# SPDX-License-Identifier: Apache-2.0
"""Times of contenders that take turns, with weights that no cache holds from call to call.

All of them are in one process, so that drift of the machine's speed affects all equally.
Dims: R rows, D inputs, E experts, J sets of sizes, N elements
"""

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

# Calls of an accelerator's step, which takes as long to start as a few products.
LEAST_CALLS = 64
UNROLLED = 8


@dataclasses.dataclass
class Contender:
    """A compiled step of one or several calls.

    Attributes:
        step: runs the step, and returns when the result is there.
        calls: number of calls of the operation in a step.
        weight_bytes: bytes of the weights that a call has to read.
        peak_bytes: bytes of arguments and temporaries of the compiled step.
        error: relative error of the checked part of the result against float64.
        of: the pass: `forward`, `dx`, `dw` or `schedule`.
        times_s: measured seconds of a call, one for each round.
    """

    name: str
    step: Callable[[], Any]
    calls: int = 1
    weight_bytes: int = 0
    peak_bytes: int = 0
    error: float | None = None
    of: str = "forward"
    times_s: list[float] = dataclasses.field(default_factory=list)

    @classmethod
    def stepping(cls, name: str, step: Callable, state, **fields) -> "Contender":
        """A contender whose step begins with the state that the previous one returned.

        Args:
            step: function of a state that returns the next state and measurements.
        """
        held = [state]

        def run():
            held[0], measured = step(held[0])
            return jax.block_until_ready((held[0], measured))[1]

        return cls(name, run, **fields)

    def measure(self, num_steps: int) -> None:
        """Adds the mean time of a call in `num_steps` steps to the measured times."""
        start = time.perf_counter()
        for _ in range(num_steps):
            self.step()
        self.times_s.append((time.perf_counter() - start) / (num_steps * self.calls))

    @property
    def median_s(self) -> float:
        return statistics.median(self.times_s)

    def percentile_s(self, percent: int) -> float:
        ordered = sorted(self.times_s)
        return ordered[round(percent / 100 * (len(ordered) - 1))]


def take_turns(contenders: Sequence[Contender], rounds: int, num_steps: int = 1) -> None:
    """Measures all in every round, reversing the order each time."""
    for each in contenders:
        each.step()  # warm: compiles, allocates
    for i in range(rounds):
        for each in contenders if i % 2 == 0 else contenders[::-1]:
            each.measure(num_steps)


def speedup(fast: Contender, slow: Contender) -> float:
    """Median over rounds of `slow`'s time over `fast`'s in the same round."""
    pairs = zip(fast.times_s, slow.times_s, strict=True)
    return statistics.median(slow_s / fast_s for fast_s, slow_s in pairs)


def geometric_mean(values: Iterable[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def one_by_one(function, x_RD, weight_sets: Sequence, sizes: Sequence) -> Callable[[], Any]:
    """A step of one call, each with the next weights and the next sizes.

    For CPUs, where a call takes milliseconds.
    """
    compiled = jax.jit(function).lower(x_RD, weight_sets[0], sizes[0]).compile()
    turns = itertools.cycle(itertools.product(weight_sets, sizes))
    return lambda: jax.block_until_ready(compiled(x_RD, *next(turns)))


def all_in_one_program(
    function, x_RD, weight_sets: Sequence, sizes: Sequence
) -> tuple[Callable[[], Any], int]:
    """A step of `LEAST_CALLS` calls or more, with all sets of weights and sizes; their number.

    For accelerators: starting a program takes them longer than many a product.
    """
    table_JE, weight_sets = jnp.stack(sizes), tuple(weight_sets)
    run, calls = repeated(function, len(weight_sets), len(sizes))
    compiled = jax.jit(run).lower(x_RD, weight_sets, table_JE).compile()
    return lambda: jax.block_until_ready(compiled(x_RD, weight_sets, table_JE)), calls


def repeated(function, num_sets: int, num_sizes: int) -> tuple[Callable, int]:
    """(`run(x_RD, weight_sets, table_JE)`, the number of its calls).

    XLA leaves out what no result needs, and computes once what is the same in two calls. So a
    number of every result is added up, and all operands of a call wait for the previous
    result.
    """
    turns = math.ceil(LEAST_CALLS / (num_sets * num_sizes)) * num_sizes

    def run(x_RD, weight_sets, table_JE):
        def calls(j, carry):
            x_RD, total = carry
            for weights in weight_sets:
                given = jax.lax.optimization_barrier((x_RD, weights, table_JE[j % num_sizes]))
                result = function(*given)
                x_RD, result = jax.lax.optimization_barrier((x_RD, result))
                total += jax.tree.leaves(result)[0].ravel()[0].astype(jnp.float32)
            return x_RD, total

        carry = x_RD, jnp.float32(0)
        # An iteration of a loop takes a GPU as long as many a product.
        unroll = max(1, UNROLLED // num_sets)
        return jax.lax.fori_loop(0, turns, calls, carry, unroll=unroll)[1]

    return run, turns * num_sets
