# SPDX-License-Identifier: Apache-2.0
"""What `--compile-seconds` counts, and what `tests/programs.py` takes for the same program."""

import jax
import jax.monitoring
import jax.numpy as jnp

from tests.compile_seconds import CompileSeconds, covered_s
from tests.programs import nameless


def test_compilations_are_counted_and_overlaps_once():
    counter = CompileSeconds()
    try:
        jax.jit(lambda x: x * 3 + 4).lower(jnp.float32(1)).compile()
    finally:
        jax.monitoring.unregister_event_time_span_listener(counter.listen)
    assert counter.programs >= 1
    assert 0 < covered_s(counter.spans) < 60
    assert covered_s([(4, 5), (0, 3), (1, 2), (2, 3.5)]) == 4.5


def test_programs_differ_by_what_they_compute_and_not_by_names():
    def text(function):
        return nameless(jax.jit(function).lower(jnp.ones((2, 3))).compile().as_text())

    def step(x):
        return jnp.tanh(x).sum()

    def moved(y):
        with jax.named_scope("elsewhere"):
            total = jnp.tanh(y).sum()
        return total

    assert "tanh" in text(step) and "step" not in text(step)
    assert text(moved) == text(step)
    assert text(lambda x: jnp.tanh(x).max()) != text(step)
    assert text(lambda x: jnp.tanh(x).sum() + 1) != text(step)
