# SPDX-License-Identifier: Apache-2.0
"""Given choices in a layer against a loop and finite differences; what a batch may give."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from switchx.models.config import ModelConfig, Precision, RouterConfig, SwitchConfig
from switchx.moe import replay
from switchx.moe.layer import SwitchFFN
from switchx.moe.replay import UNSET
from tests.compare import slopes
from tests.data.refusals import refused
from tests.layers.weights import numbers_for, with_params
from tests.moe.oracle import softmax
from tests.training.jobs import with_switch

B, L, D, F, E, S = 2, 10, 6, 8, 4, 2
# Five slots of each expert for ten tokens: some choices are dropped.
ROUTER = RouterConfig(
    num_selected=S,
    gate="normalized",
    jitter=0.0,
    bias_update_rate=0.001,
    replay=True,
    replay_drops=True,
)
SWITCH = SwitchConfig(
    E, every=1, capacity_factor=1.0, min_capacity=1, group_size=L, router=ROUTER
)
DOUBLE = Precision("float64", "float64", "float64", "float64")
MODEL = ModelConfig(
    "decoder_only", 9, D, F, 2, 4, 3, activation="relu", switch=SWITCH, precision=DOUBLE
)


def numbers():
    """Input, real tokens, given choices (none for the first tokens), a factor of outputs."""
    rng = np.random.default_rng(1)
    x_BLD, target_BLD = rng.normal(size=(2, B, L, D))
    is_token_BL = np.ones((B, L), bool)
    is_token_BL[1, 7:] = False
    replay_BLS = np.argsort(rng.random((B, L, E)))[..., :S].astype(np.int16)
    replay_BLS[:, :3] = UNSET
    replay_BLS[~is_token_BL] = UNSET
    return x_BLD, is_token_BL, replay_BLS, target_BLD


@pytest.fixture(scope="module")
def double():
    with jax.enable_x64(True):
        yield


@functools.cache
def layer():
    abstract = nnx.eval_shape(lambda: SwitchFFN(MODEL, key=jax.random.key(0)))
    return abstract, jax.tree.map(np.float64, numbers_for(abstract))


@functools.cache
def compiled():
    def value(params, replay_BLS):
        x_BLD, is_token_BL, _, target_BLD = map(jnp.asarray, numbers())
        y_BLD, stats = with_params(layer()[0], params)(
            x_BLD, is_token_BL, replay_BLS=replay_BLS, is_training=True
        )
        return jnp.sum(y_BLD * target_BLD), (y_BLD, stats)

    return jax.jit(jax.value_and_grad(value, has_aux=True))


def run(params, replay_BLS):
    """Loss, output, statistics and gradients."""
    (loss, (y_BLD, stats)), grads = jax.device_get(compiled()(params, replay_BLS))
    return loss, y_BLD, stats, grads


def test_a_layer_with_given_choices_equals_a_loop(double):
    params = layer()[1]
    x_BLD, is_token_BL, replay_BLS, _ = numbers()
    _, y_BLD, stats, _ = run(params, replay_BLS)
    prob_BLE = softmax(x_BLD @ params["w_router_DE"])
    own_BLS = np.argsort(-(prob_BLE + params["router_bias_E"]))[..., :S]
    given_BLS = np.where(replay_BLS >= 0, replay_BLS, own_BLS)
    want_BLD, load_E, dropped, losses = np.zeros((B, L, D)), np.zeros(E), 0, []
    for b in range(B):
        queue, own_E, tokens = [0] * E, np.zeros(E), np.flatnonzero(is_token_BL[b])
        for s in range(S):
            for t in tokens:
                e, prob_E = given_BLS[b, t, s], prob_BLE[b, t]
                own_E[own_BLS[b, t, s]] += 1
                queue[e] += 1
                if queue[e] > 5:
                    dropped += 1
                    continue
                hidden_F = np.maximum(x_BLD[b, t] @ params["experts"]["w_in_EDF"][e], 0)
                gate = prob_E[e] / np.sum(prob_E[given_BLS[b, t]])
                want_BLD[b, t] += gate * (hidden_F @ params["experts"]["w_out_EFD"][e])
        load_E += queue
        # The balance loss counts what the routers would have chosen.
        losses.append(E * np.sum(own_E / own_E.sum() * prob_BLE[b, tokens].mean(0)))
    np.testing.assert_allclose(y_BLD, want_BLD, rtol=1e-9, atol=1e-12)
    assert stats.load_E.tolist() == load_E.tolist() and stats.dropped == dropped > 0
    np.testing.assert_allclose(stats.balance_loss, np.mean(losses), rtol=1e-6)
    assert np.any(np.sort(given_BLS) != np.sort(own_BLS))


def test_gates_of_given_experts_have_the_gradient_of_finite_differences(double):
    """Also where no given expert is one that the router would choose."""
    params = layer()[1]
    x_BLD, is_token_BL, replay_BLS, _ = numbers()
    score_BLE = softmax(x_BLD @ params["w_router_DE"]) + params["router_bias_E"]
    worst_BLS = np.argsort(score_BLE)[..., :S].astype(np.int16)
    worst_BLS[~is_token_BL] = UNSET
    for given_BLS in (replay_BLS, worst_BLS):
        *_, grads = run(params, given_BLS)

        def loss(w_router_DE, given_BLS=given_BLS):
            return run(params | {"w_router_DE": w_router_DE}, given_BLS)[0]

        want_DE = slopes(loss, params["w_router_DE"], step=1e-6)
        np.testing.assert_allclose(grads["w_router_DE"], want_DE, rtol=1e-4, atol=1e-6)
        assert np.min(np.abs(want_DE)) > 1e-3


SPARSE = with_switch(dataclasses.replace(MODEL, num_decoder_layers=4), every=2)


def batch_of(**changes) -> dict:
    """A batch of one stack with two Switch layers; the last tokens of a row are padding."""
    segment_BL = np.ones((B, L), np.int32)
    segment_BL[1, 7:] = 0
    rng = np.random.default_rng(2)
    given = np.argsort(rng.random((B, L, 2, E)))[..., :S].astype(np.int16)
    given[segment_BL == 0] = UNSET
    given[0, :2] = UNSET
    for name, value in changes.items():
        row, place = map(int, name.split("_")[1:])
        given[row, place, 1] = value
    return {"decoder_segment_ids": segment_BL, "decoder_replay": given}


def test_a_sound_batch_passes():
    replay.check_replay(SPARSE, batch_of())
    unset = replay.unset_choices(SPARSE, batch_of())
    assert unset.keys() == {"decoder_replay"} and np.all(unset["decoder_replay"] == UNSET)
    replay.check_replay(SPARSE, batch_of() | unset)
    assert replay.without_choices(batch_of()).keys() == {"decoder_segment_ids"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"at_1_2": (3, 4)}, "row 1, place 2, layer 1 (decoder 3): [3, 4]; expected experts 0"),
        ({"at_0_9": (-2, 0)}, "row 0, place 9, layer 1 (decoder 3): [-2, 0]; expected experts"),
        ({"at_1_2": (3, 3)}, "row 1, place 2, layer 1 (decoder 3): [3, 3]; an expert is there"),
        ({"at_0_4": (-1, 2)}, "row 0, place 4, layer 1 (decoder 3): [-1, 2]; the router might"),
        ({"at_1_8": (0, 1)}, "row 1, place 8, layer 1 (decoder 3): [0, 1]; this is padding"),
    ],
)
def test_choices_that_no_router_makes_are_refused_by_place(changes, message):
    with pytest.raises(ValueError) as error:
        replay.check_replay(SPARSE, batch_of(**changes))
    assert str(error.value).startswith(f"decoder_replay, {message}")


def test_other_shapes_and_types_are_refused():
    batch = batch_of()
    given = batch["decoder_replay"]
    for other in (given[:, :, :1], given[..., :1], given[:, 1:], np.moveaxis(given, 2, 0)):
        with refused(f"decoder_replay of shape {other.shape}<any>expected (2, 10, 2, 2)"):
            replay.check_replay(SPARSE, batch | {"decoder_replay": other})
    with refused("decoder_replay has the type float32"):
        replay.check_replay(SPARSE, batch | {"decoder_replay": given.astype(np.float32)})
    plain = with_switch(SPARSE, router=RouterConfig(num_selected=S))
    with refused("a batch with decoder_replay, and RouterConfig.replay=False"):
        replay.check_replay(plain, batch)
    counted = dataclasses.replace(ROUTER, padding="counted")
    replay.check_replay(with_switch(SPARSE, router=counted), batch_of(at_1_8=(0, 1)))


def test_rows_of_a_record_by_id():
    rng = np.random.default_rng(3)
    expert_NRLK = np.argsort(rng.random((2, 3, L, E)))[..., :3].astype(np.int16)
    expert_NRLK[:, 1, 6:] = E  # padding
    find = functools.partial(
        replay.choices_of_rows, expert_NRLK, [7, 3, 5], num_experts=E, num_selected=S
    )
    found_BLNS = find([5, UNSET, 3, 5])
    assert found_BLNS.shape == (4, L, 2, S) and found_BLNS.dtype == np.int16
    for b, r in ((0, 2), (2, 1), (3, 2)):
        for n in range(2):
            want_LS = np.where(expert_NRLK[n, r] == E, UNSET, expert_NRLK[n, r])[:, :S]
            np.testing.assert_array_equal(found_BLNS[b, :, n], want_LS)
    assert np.all(found_BLNS[1] == UNSET) and np.all(found_BLNS[2, 6:] == UNSET)
    expert_NRLK[:, 1] = E  # a row that filled up a batch
    filled = functools.partial(replay.choices_of_rows, num_experts=E, num_selected=S)
    found_BLNS = filled(expert_NRLK, [7, UNSET, UNSET], [7, UNSET])
    np.testing.assert_array_equal(found_BLNS[0, :, 1], expert_NRLK[1, 0, :, :S])
    assert np.all(found_BLNS[1] == UNSET)
    with refused("1 of 2 rows are not in the record, the first with id [4]"):
        find([4, 3])
    with refused("3 choices of a token were recorded, and RouterConfig.num_selected=4"):
        find([3], num_selected=4)
    with refused("3 rows were recorded with 3 ids, 1 of them there before"):
        replay.choices_of_rows(expert_NRLK, [7, 3, 7], [3], num_experts=E, num_selected=S)
