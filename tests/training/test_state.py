# SPDX-License-Identifier: Apache-2.0
"""The training state at step 0, and the random key of each step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.models.config import Precision
from switchx.optim.adafactor import Adafactor
from switchx.optim.schedules import Constant
from switchx.training.step import init_state
from tests.training.jobs import DENSE, make_params
from tests.training.train_states import assert_same

OPTIMIZER = Adafactor().build(Constant(1.0))
TINY = dataclasses.replace(DENSE, num_decoder_layers=1)


@pytest.fixture(scope="module")
def drawn():
    """A state whose parameters are drawn from seed 7."""
    return init_state(TINY, OPTIMIZER, seed=7)


def given(seed=0, config=TINY):
    return init_state(config, OPTIMIZER, seed=seed, params=make_params(config))


def test_a_fresh_state_has_taken_no_step():
    state = given()
    for name in ("step", "skipped", "skipped_in_a_row", "good_steps"):
        counter = getattr(state, name)
        assert counter.dtype == jnp.int32 and counter.shape == () and int(counter) == 0
    assert int(state.opt_state.count) == 0
    assert float(state.loss_scale) == 1


def test_float16_begins_with_a_loss_scale_of_two_to_the_fifteenth():
    half = dataclasses.replace(TINY, precision=Precision(compute="float16"))
    state = given(config=half)
    assert float(state.loss_scale) == 32768 and state.loss_scale.dtype == jnp.float32


def test_parameters_come_from_the_seed_or_are_those_given(drawn):
    assert_same(given().params, make_params(TINY))
    table_VD = np.asarray(drawn.params["embedding"]["embedding_VD"])
    other = init_state(TINY, OPTIMIZER, seed=8)
    assert not np.array_equal(table_VD, other.params["embedding"]["embedding_VD"])


def test_each_step_has_its_own_key_and_a_resumed_one_the_same():
    state = given()
    later = dataclasses.replace(state, step=jnp.asarray(3, jnp.int32))

    def number(state):
        return float(jax.random.uniform(state.key))

    assert number(state) != number(later)
    saved = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), later)
    assert number(saved) == number(later)
    assert number(given(seed=0)) == number(state) != number(given(seed=1))


def test_no_two_leaves_share_a_buffer():
    """A donated buffer that two leaves share is donated twice."""
    leaves = jax.tree.leaves(given())
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)
