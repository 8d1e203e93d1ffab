# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.bench.timing import (
    Contender,
    all_in_one_program,
    copy_bytes_per_s,
    geometric_mean,
    one_by_one,
    speedup,
    take_turns,
)


def test_turns_alternate_and_each_has_its_rounds():
    steps = []
    a, b = (Contender(name, lambda name=name: steps.append(name)) for name in "ab")
    take_turns([a, b], rounds=3)
    assert "".join(steps) == "ab" + "ab" + "ba" + "ab"  # the first two to warm up
    assert len(a.times_s) == len(b.times_s) == 3


def test_figures():
    fast = Contender("fast", None, times_s=[1.0, 2.0, 3.0])
    slow = Contender("slow", None, times_s=[2.0, 8.0, 9.0])
    assert speedup(fast, slow) == 3.0  # of 2, 4, 3
    assert (fast.median_s, fast.percentile_s(10), fast.percentile_s(90)) == (2.0, 1.0, 3.0)
    assert geometric_mean([1, 8]) == pytest.approx(8**0.5)


def test_a_step_counts_its_calls():
    each = Contender("ten", lambda: None, calls=10)
    each.measure()
    assert 0 <= each.times_s[0] < 1e-2


SETS, SIZES = [jnp.array([1.0]), jnp.array([2.0])], [jnp.array([3]), jnp.array([4])]


def test_one_by_one_goes_through_all_weights_and_sizes():
    results = []
    step = one_by_one(lambda x, w, s: x + w + s, jnp.zeros(1), SETS, SIZES)
    for _ in range(5):
        results.append(float(step()[0]))
    assert results == [4, 5, 5, 6, 4]


def test_one_program_makes_every_call():
    """The number of calls of the product in the compiled program's loop: none is dropped."""
    seen = []

    def product(x_RD, weights, sizes):
        jax.debug.callback(lambda w, s: seen.append((float(w[0]), int(s[0]))), weights, sizes)
        return x_RD * weights

    step = all_in_one_program(product, jnp.ones(1), SETS, SIZES)
    step()
    jax.effects_barrier()
    assert sorted(seen) == [(1.0, 3), (1.0, 4), (2.0, 3), (2.0, 4)]


def test_copying_has_a_bandwidth():
    assert 1e7 < copy_bytes_per_s(num_bytes=2**20, rounds=1) < 1e14
