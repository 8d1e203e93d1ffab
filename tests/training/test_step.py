# SPDX-License-Identifier: Apache-2.0
"""The training step and its state: gradients, skipped steps, clipping, loss scaling, keys."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from switchx import tree
from switchx.models.config import Precision, RouterConfig
from switchx.models.params import abstract_params
from switchx.moe.dispatch import MOST_GATHERED
from switchx.optim.adafactor import Adafactor
from switchx.optim.schedules import Constant
from switchx.training import step as training_step
from switchx.training.microbatches import into_microbatches
from switchx.training.step import StepConfig, gradients, init_state, train_step
from tests.cases import slow
from tests.compare import assert_close_to_largest
from tests.jaxprs import equations
from tests.training.jobs import (
    DENSE,
    ENCODER_DECODER,
    LENGTH,
    LOSS,
    SPARSE,
    make_batch,
    make_params,
    with_padded_rows,
    with_switch,
)
from tests.training.pipelines import unpipelined
from tests.training.train_states import assert_same

TINY = dataclasses.replace(DENSE, num_decoder_layers=1)
HALF = dataclasses.replace(TINY, precision=Precision(compute="float16"))
ADAFACTOR = Adafactor(min_dim_size_to_factor=8).build(Constant(5e-2))


def _raw_update(grads, state, params, *, gradient_scale):
    del params
    return jax.tree.map(lambda leaf: -leaf * gradient_scale, grads), state


# Plain gradient descent with a rate of 1: the update is the gradient.
DESCENT = optax.GradientTransformationExtraArgs(lambda params: (), _raw_update)


def make_step(config, optimizer=ADAFACTOR, loss=LOSS, **changes):
    """The jitted step of a configuration, and a state to begin with."""
    step = functools.partial(train_step, config, loss, StepConfig(**changes), optimizer)
    return jax.jit(step), init_state(config, optimizer, seed=0, params=make_params(config))


@pytest.fixture(scope="module")
def noisy():
    """The step of a sparse model with all noise and biases, its first state, and a batch.

    It logs root mean squares.
    """
    router = RouterConfig(jitter=0.1, bias_update_rate=0.001)
    config = dataclasses.replace(with_switch(SPARSE, router=router), dropout_rate=0.1)
    return *make_step(config, log_rms=True), make_batch(config, 8)


def spoilt(batch) -> dict:
    """The same batch with a loss that is not a number."""
    weights_BL = batch["decoder_loss_weights"].copy()
    weights_BL[0, 0] = np.nan
    return batch | {"decoder_loss_weights": weights_BL}


PAIRS = with_switch(SPARSE, group_size=2 * LENGTH, capacity_factor=1)
WHOLE = with_switch(SPARSE, group_size=1 << 20)


@pytest.mark.parametrize(
    ("config", "rows"),
    [
        (SPARSE, (0, 2, 4, 6)),
        (PAIRS, (0, 1, 4, 5)),
        (WHOLE, (0, 2, 4, 6)),
        (DENSE, (0, 2, 4, 6)),
    ],
    ids=["row_groups", "groups_of_two_rows", "one_group", "dense"],
)
def test_microbatches_are_every_nth_row_or_group(config, rows):
    batch = make_batch(config, 8)
    for name, split in into_microbatches(config, batch, 2).items():
        assert split.shape == (4, 2, LENGTH)
        np.testing.assert_array_equal(split[:, 0], batch[name][list(rows)])


@pytest.mark.parametrize(
    "config", [slow(DENSE), SPARSE, PAIRS], ids=["dense", "switch", "groups_of_two_rows"]
)
def test_gradients_of_microbatches_add_up_to_those_of_the_batch(config):
    """With unequal real tokens in them, and routing groups that are all padding: means of
    means would be other numbers."""
    batch = with_padded_rows(make_batch(config, 8), 1, 2)
    weights = batch["decoder_loss_weights"]
    assert len({weights[i::4].sum() for i in range(4)}) == 4
    want, got = (unpipelined(config, num, batch) for num in (1, 4))
    assert_close_to_largest(got, want, 1e-5)


def test_the_loss_is_a_mean_over_real_target_tokens_plus_the_auxiliary_loss():
    batch = make_batch(SPARSE, 8)
    _, value, sums, stats = unpipelined(SPARSE, 1, batch)
    num_tokens = np.count_nonzero(batch["decoder_target_tokens"])
    assert num_tokens < batch["decoder_target_tokens"].size
    assert float(sums.tokens) == float(stats.tokens[0]) == num_tokens
    assert stats.choices == ()  # which are of tokens, and so cannot be added up
    want = float(sums.loss) / num_tokens
    want += 0.5 * float(stats.balance_loss[0]) + 0.1 * float(stats.router_z_loss[0])
    np.testing.assert_allclose(value, want, rtol=1e-6)


def test_a_step_is_deterministic_and_its_noise_changes_with_the_step(noisy):
    step, state, batch = noisy
    first, again = step(state, batch), step(state, batch)
    assert_same(first, again)
    later = dataclasses.replace(state, step=state.step + 1)
    assert float(step(later, batch)[1].loss) != float(first[1].loss)
    assert int(first[0].step) == 1


def test_a_step_that_is_not_finite_changes_nothing_but_the_counters(noisy):
    step, state, batch = noisy
    good, _ = step(state, batch)
    bad, metrics = step(good, spoilt(batch))
    assert not np.isfinite(metrics.loss) and int(metrics.is_skipped) == 1
    assert_same(bad.params, good.params)
    assert_same(bad.opt_state, good.opt_state)
    assert (int(bad.step), int(bad.skipped), int(bad.skipped_in_a_row)) == (2, 1, 1)
    worse, metrics = step(bad, spoilt(batch))
    assert (int(worse.skipped), int(metrics.skipped_in_a_row)) == (2, 2)
    well, metrics = step(worse, batch)
    assert (int(well.skipped), int(well.skipped_in_a_row)) == (2, 0)
    assert int(metrics.is_skipped) == 0
    before, after = tree.named_leaves(good.params), tree.named_leaves(well.params)
    (bias,) = (name for name in before if name.endswith("router_bias_E"))
    for name in ("embedding/embedding_VD", bias):  # both have moved, and not in between
        assert not np.array_equal(after[name], before[name])


def test_twenty_steps_on_one_batch_learn_it(noisy):
    step, state, batch = noisy
    losses = []
    for _ in range(20):
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
    assert losses[-1] < 0.6 * losses[0]
    assert int(state.step) == 20 and int(state.skipped) == 0


def test_root_mean_squares_are_those_of_numpy_expert_by_expert(noisy):
    """Weights before the step, and what the step changed, the bias' own update included."""
    step, state, batch = noisy
    after, metrics = step(state, batch)
    names = tree.named_leaves(state.params)
    assert all(metrics.rms[kind].keys() == names.keys() for kind in metrics.rms)
    assert metrics.rms.keys() == {"weight_rms", "weight_gradient_rms", "weight_update_rms"}
    num_experts, banks = SPARSE.switch.num_experts, 0
    for name, new in tree.named_leaves(after.params).items():
        old, new = (np.asarray(each, np.float64) for each in (names[name], new))
        letters = name.rpartition("_")[2]
        axes = tuple(i for i, letter in enumerate(letters) if letter != "E")
        for kind, array in (("weight_rms", old), ("weight_update_rms", new - old)):
            got, want = metrics.rms[kind][name], np.sqrt(np.mean(array**2, axis=axes))
            assert got.shape == ((num_experts,) if "E" in letters else ())
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-7, err_msg=name)
        banks += letters in ("EDF", "EFD")
    assert banks >= 2
    # The gradients' squares add up to the global norm.
    sizes = {name: leaf.size for name, leaf in names.items()}
    squares = {
        name: float(np.mean(np.square(each))) * sizes[name]
        for name, each in metrics.rms["weight_gradient_rms"].items()
    }
    np.testing.assert_allclose(sum(squares.values()) ** 0.5, metrics.grad_norm, rtol=1e-5)


def test_nothing_is_returned_where_no_root_mean_squares_are_logged():
    step, state = make_step(TINY)
    assert jax.eval_shape(step, state, make_batch(TINY, 8))[1].rms == {}


def moved(before, after) -> np.ndarray:
    """What a step of `DESCENT` took away from all parameters, in one vector."""
    return np.concatenate(
        [
            np.ravel(np.asarray(old, np.float64) - np.asarray(new, np.float64))
            for old, new in zip(
                jax.tree.leaves(before.params), jax.tree.leaves(after.params), strict=True
            )
        ]
    )


def test_gradients_longer_than_clip_norm_are_scaled_down_to_it():
    batch, results = make_batch(TINY, 4), {}
    for clip_norm in (None, 0.05):
        step, state = make_step(TINY, DESCENT, clip_norm=clip_norm)
        after, metrics = step(state, batch)
        results[clip_norm] = moved(state, after), float(metrics.grad_norm)
    gradient, norm = results[None]
    np.testing.assert_allclose(np.linalg.norm(gradient), norm, rtol=1e-5)
    clipped, reported = results[0.05]
    assert reported == norm  # the norm before clipping
    np.testing.assert_allclose(np.linalg.norm(clipped), 0.05, rtol=1e-4)
    np.testing.assert_allclose(clipped, gradient * 0.05 / norm, atol=1e-6)


def test_float16_halves_and_doubles_its_loss_scale(monkeypatch):
    """Micikevicius et al. 2018 (arXiv:1710.03740), section 3.2."""
    monkeypatch.setattr(training_step, "LOSS_SCALE_PATIENCE", 2)
    step, state = make_step(HALF, DESCENT)
    state = dataclasses.replace(state, loss_scale=jnp.float32(1024))
    batch, scales = make_batch(HALF, 4), []

    def take(state):
        after, metrics = step(state, batch)
        scales.append((float(state.loss_scale), int(after.good_steps)))
        return after, metrics

    first, metrics = take(state)
    plain, _ = make_step(TINY, DESCENT)
    want, plain_metrics = plain(dataclasses.replace(state, loss_scale=jnp.float32(1)), batch)
    # The update has the gradient's own size, whatever the loss was multiplied by.
    np.testing.assert_allclose(metrics.grad_norm, plain_metrics.grad_norm, rtol=5e-3)
    difference = np.linalg.norm(moved(state, first) - moved(state, want))
    assert difference < 0.02 * np.linalg.norm(moved(state, want))

    second, _ = take(first)
    third, _ = take(second)
    assert scales == [(1024, 1), (1024, 0), (2048, 1)]

    # Gradients beyond 65504 are infinite in float16, while the loss itself is not.
    high = dataclasses.replace(third, loss_scale=jnp.float32(2.0**40))
    skipped, metrics = take(high)
    assert np.isfinite(metrics.loss) and not np.isfinite(metrics.grad_norm)
    assert int(metrics.is_skipped) == 1
    assert_same(skipped.params, high.params)
    assert float(skipped.loss_scale) == 2.0**39 and int(skipped.good_steps) == 0
    # The scale may still come down: nothing counts towards giving up yet.
    assert int(skipped.skipped) == 1 and int(skipped.skipped_in_a_row) == 0

    bad, _ = step(dataclasses.replace(third, loss_scale=jnp.float32(1)), spoilt(batch))
    assert float(bad.loss_scale) == 1  # and not below
    assert int(bad.skipped_in_a_row) == 1


def test_other_dtypes_have_no_loss_scale(noisy):
    step, state, batch = noisy
    for each in (batch, spoilt(batch)):
        state, _ = step(state, each)
        assert float(state.loss_scale) == 1
        assert int(state.good_steps) == 0


OPTIMIZER = Adafactor().build(Constant(1.0))


def given(seed=0, config=TINY):
    return init_state(config, OPTIMIZER, seed=seed, params=make_params(config))


def test_float16_begins_with_a_loss_scale_of_two_to_the_fifteenth():
    state = given(config=HALF)
    assert float(state.loss_scale) == 32768 and state.loss_scale.dtype == jnp.float32


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


BIASED = with_switch(SPARSE, expert_bias=True)
TWO = RouterConfig(num_selected=2, jitter=0.0)
MANY = RouterConfig(num_selected=MOST_GATHERED + 1, jitter=0.0)
AROUND = RouterConfig(overflow="identity", jitter=0.0)


@pytest.mark.parametrize(
    "model",
    [
        dataclasses.replace(BIASED, norm="layer", use_bias=True),
        with_switch(
            dataclasses.replace(ENCODER_DECODER, activation="geglu"),
            expert_bias=True,
            router=TWO,
        ),
        with_switch(BIASED, router=MANY),
        with_switch(BIASED, router=AROUND),
        with_switch(BIASED, dispatcher="dropless"),
    ],
    ids=["gpt", "t5", "many choices", "identity", "dropless"],
)
def test_gradients_are_summed_in_float32_where_layers_compute_in_bfloat16(model):
    """JAX sums the gradient of what was broadcast (a gate, a scale, a bias) in its dtype.

    CPUs and TPUs widen such sums, and a Hopper GPU does not: no number here would show it.
    """
    model = dataclasses.replace(model, precision=Precision(compute="bfloat16"))
    program = jax.make_jaxpr(functools.partial(gradients, model, LOSS, StepConfig(), key=None))(
        abstract_params(model), make_batch(model, 4)
    )
    sums = [
        each
        for each in equations(program.jaxpr)
        if each.primitive.name == "reduce_sum"
        and each.invars[0].aval.size > each.outvars[0].aval.size  # of more than one number
    ]
    assert sums
    narrow = [each for each in sums if each.outvars[0].aval.dtype.itemsize < 4]
    assert narrow == []
