# SPDX-License-Identifier: Apache-2.0
"""Gradients period by period against the whole step's: raw, dropout on, some experts absent."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx import tree
from switchx.models.config import RouterConfig
from switchx.models.params import init_params
from switchx.models.stages import (
    init_period_experts,
    is_of_experts,
    model_periods,
    without_experts,
)
from switchx.training.offload.disk_periods import joined
from switchx.training.offload.disk_step import LayeredGradients
from tests.compare import assert_close
from tests.training.jobs import (
    ENCODER_DECODER,
    SPARSE,
    WEIGHTY,
    make_batch,
    make_params,
    stacked,
)
from tests.training.pipelines import unpipelined
from tests.training.train_states import assert_same, assert_same_gradients

pytestmark = pytest.mark.usefixtures("programs_compiled_once")

ROWS = 8


class Banks:
    """Experts of whole parameters; those that are not asked for are filled with one number.

    Attributes:
        fetched: `(period, sweep, used_JE)` of each fetch.
        grads: by path, as of the whole step.
    """

    def __init__(self, params, guess: str, filled_with: float = 0.0):
        leaves = tree.named_leaves(params)
        self.leaves = {n: np.array(x) for n, x in leaves.items() if is_of_experts(n, x)}
        self.grads = {name: np.zeros_like(leaf) for name, leaf in self.leaves.items()}
        self.fetched, self._guess, self._filled_with = [], guess, filled_with
        self._rng = np.random.default_rng(0)

    def expected(self, period):
        E = next(iter(self.leaves.values())).shape[1]
        chance = {"all": 1.0, "none": 0.0, "some": 0.5}[self._guess]
        return self._rng.random((len(period.layers), E)) < chance

    def prefetch(self, period, sweep, used_JE):
        pass

    def fetch(self, period, sweep, used_JE):
        self.fetched.append((period, sweep, used_JE))
        bank = {}
        for names, used_E in zip(period.names, used_JE, strict=True):
            for name in names:
                whole = self.leaves[name][period.number]
                used = used_E.reshape(-1, *[1] * (whole.ndim - 1))
                bank[name] = jnp.asarray(np.where(used, whole, self._filled_with))
        return bank

    def keep_gradients(self, period, used_JE, bank):
        for name, gradient in bank.items():
            self.grads[name][period.number] += np.asarray(gradient)


@functools.cache
def layered_of(config, num_microbatches, slots=2):
    return LayeredGradients(config, WEIGHTY, num_microbatches, slots)


def layered(config, num_microbatches, guess="some", slots=2, filled_with=0.0):
    """What `unpipelined` gives, and the banks."""
    params = make_params(config)
    banks = Banks(params, guess, filled_with)
    step = layered_of(config, num_microbatches, slots)
    grads, results = step.gradients(
        without_experts(params), make_batch(config, ROWS), banks, key=jax.random.key(1)
    )
    grads = tree.nested(tree.named_leaves(grads) | banks.grads)
    return jax.device_get((grads, *joined(results))), banks


REROUTED = RouterConfig(jitter=0.0, overflow="reroute", max_rounds=3)
BIASED = RouterConfig(jitter=0.0, bias_update_rate=0.01)
HASHED = RouterConfig("hash", exploration="none")
EXPERT_CHOICE = RouterConfig("expert_choice", exploration="none")


def in_precision(compute: str, **switch):
    """A decoder whose activations have this dtype."""
    config = stacked(SPARSE, **switch)
    return dataclasses.replace(
        config, precision=dataclasses.replace(config.precision, compute=compute)
    )


# Of a decoder, whole steps: test_disk_program.py.
CASES = {
    "encoder_decoder": (stacked(ENCODER_DECODER), 2),
    # Tokens reach experts that they did not ask for first.
    "both_rerouted": (
        stacked(
            SPARSE,
            sublayers="both",
            dispatcher="einsum",
            expert_bias=True,
            router=REROUTED,
            capacity_factor=0.5,
        ),
        1,
    ),
    # Float16's loss is not scaled here; what it rounds away, both round away.
    "float16": (in_precision("float16"), 2),
    "bfloat16_biased": (in_precision("bfloat16", router=BIASED), 2),
    "hash": (stacked(SPARSE, router=HASHED), 2),
    # Experts choose tokens, in the encoder alone: the decoder's periods have no experts.
    "expert_choice": (stacked(ENCODER_DECODER, stacks="encoder", router=EXPERT_CHOICE), 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_whole_step(name):
    config, num_microbatches = CASES[name]
    want = unpipelined(config, num_microbatches, make_batch(config, ROWS))
    (grads, value, sums, stats, squares), banks = layered(config, num_microbatches)
    mine, right = tree.named_leaves(grads), tree.named_leaves(want[0])
    assert_same_gradients(mine, right)
    assert_close((value, sums, stats), want[1:], rtol=1e-6)
    of_experts = [np.sum(np.square(right[name], dtype=np.float64)) for name in banks.grads]
    np.testing.assert_allclose(squares, sum(of_experts), rtol=1e-5)


@pytest.mark.slow  # cache and policy: test_disk_program.py
def test_what_is_guessed_and_how_many_slots_there_are_change_no_bit():
    config = stacked(SPARSE, layers=6)
    (first, banks), *others = [
        layered(config, 2, guess="all"),
        layered(config, 2, guess="none"),
        layered(config, 2, guess="some", slots=3),
        # Experts that no token chose are finite, whatever they are.
        layered(config, 2, guess="some", filled_with=1e30),
    ]
    assert len(banks.fetched) == 2 * len(model_periods(config))  # nothing was computed twice
    for other, _ in others:
        assert_same(other, first)
    _, banks_of_none = others[0]
    assert len(banks_of_none.fetched) > len(banks.fetched)
    backward = [(period.number, used.tolist()) for period, s, used in banks.fetched if s == 1]
    assert backward == [(p.number, u.tolist()) for p, s, u in banks_of_none.fetched if s == 1]


@pytest.mark.slow
def test_backward_takes_the_choices_of_forward(monkeypatch):
    """Computed again they might be others, of experts that are not in the bank."""
    config, num_microbatches = CASES["bfloat16_biased"]
    step, E, moved = layered_of(config, num_microbatches, 2), config.switch.num_experts, []
    forward = step._forward

    def another(*arguments):
        message, used_JE, stats, ahead, chosen = forward(*arguments)
        moved.append(np.where(chosen == E, E, (np.asarray(chosen) + 1) % E))
        return message, np.ones_like(used_JE), stats, ahead, moved[-1]

    monkeypatch.setattr(step, "_forward", another)
    (_, _, _, stats, _), _ = layered(config, num_microbatches, guess="all")
    counts = [np.bincount(each.ravel(), minlength=E + 1)[:E] for each in moved]
    np.testing.assert_array_equal(stats.load_E, counts)


def test_experts_of_a_run_are_drawn_as_those_of_the_whole_model():
    config, key = stacked(ENCODER_DECODER, 2, every=1), jax.random.key(3)
    leaves = tree.named_leaves(jax.jit(functools.partial(init_params, config))(key))
    for period in model_periods(config):
        drawn = init_period_experts(config, period, period.number, key)
        assert drawn.keys() == {name for names in period.names for name in names}
        for name, leaf in drawn.items():
            np.testing.assert_allclose(leaf, leaves[name][period.number], rtol=1e-6)
