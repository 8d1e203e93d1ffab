# SPDX-License-Identifier: Apache-2.0
"""With a few slots for experts, what is written and scored is what the whole model writes."""

import dataclasses
import itertools
import re
import types

import jax
import numpy as np
import pytest

from switchx.inference.config import DecodingConfig
from switchx.inference.generate import Generator, for_decoding, with_capacity, without_capacity
from switchx.inference.offload import expert_slots
from switchx.inference.offload.chosen_experts import ChosenExperts, on_host
from switchx.inference.score import Scorer
from switchx.models.config import SwitchConfig
from switchx.moe.config import RouterConfig
from tests.inference.slot_models import (
    GPT,
    INPUTS,
    MODELS,
    E,
    T,
    decoding,
    generator,
    model,
    resident,
    with_slots,
    written,
)
from tests.inference.tiny import assert_same_texts, tokens
from tests.training.jobs import with_switch

pytestmark = pytest.mark.usefixtures("programs_compiled_once")

SLOW = pytest.mark.slow
# By default tokens of quantized experts are compared in test_expert_source.py.
CASES = [
    pytest.param(*case, (1, 3, E), marks=SLOW)
    for case in itertools.product(MODELS, (None, 8, 4), (1, 2))
]


@pytest.mark.parametrize("name, bits, beam_size, some", [("gpt", None, 1, (2, E)), *CASES])
def test_tokens_are_those_of_the_resident_model(name, bits, beam_size, some):
    want = resident(name, bits, beam_size)
    moved = []
    for slots in some:
        config, experts = with_slots(name, bits, slots)
        got = written(generator(config, experts, beam_size))
        assert_same_texts(got, want)
        traffic = experts.traffic
        assert traffic.device_bytes * E == traffic.expert_bytes * slots
        missed = traffic.requested - traffic.hits
        assert traffic.moved_bytes * E * traffic.num_layers == missed * traffic.expert_bytes
        moved.append(traffic.moved_bytes)
    # LRU has the inclusion property, but rounds are of other keys: more slots, fewer bytes.
    assert moved[-1] == min(moved) <= experts.traffic.expert_bytes
    assert moved[0] > moved[-1]


@SLOW
@pytest.mark.parametrize("beam_size", [1, 2])
def test_so_they_are_with_processors_and_log_probabilities(beam_size):
    settings = dataclasses.replace(
        decoding(beam_size), no_repeat_ngram_size=2, repetition_penalty=1.3, logprobs=2
    )
    config, params = model("gpt", None)
    want = written(Generator(for_decoding(config), params, settings, 4))
    config, experts = with_slots("gpt", None, 1)
    moved = Generator(for_decoding(config), experts.params, settings, 4, experts=experts)
    got = written(moved)
    assert tokens(got) == tokens(want) != tokens(resident("gpt", None, beam_size))
    for one, other in zip(sum(got, []), sum(want, []), strict=True):
        np.testing.assert_allclose(one.token_logprobs, other.token_logprobs, atol=1e-5)


@pytest.mark.parametrize("policy", ["decayed_lfu", pytest.param("next_use", marks=SLOW)])
def test_no_policy_changes_a_token(policy):
    config, experts = with_slots("gpt", None, 2, policy)
    got = written(generator(config, experts, 1))
    assert tokens(got) == tokens(resident("gpt", None, 1))


def test_a_second_call_finds_experts_in_their_slots():
    config, experts = with_slots("gpt", None, E)
    run = generator(config, experts, 1)
    first = written(run)
    before = experts.traffic
    assert tokens(written(run)) == tokens(first)
    after = experts.traffic
    assert after.moved_bytes == before.moved_bytes and after.hits > before.hits
    assert after.rounds - before.rounds == before.rounds  # one a layer and call


def test_the_device_has_slots_and_no_more(monkeypatch):
    """Whenever rows are computed, experts' matrices that are alive have K slots' bytes."""
    config, params = on_host(*model("gpt", None))
    matrices = (config.d_model, config.d_ff), (config.d_ff, config.d_model)

    def alive():
        return {id(x): x.nbytes for x in jax.live_arrays() if x.shape[-2:] in matrices}

    others, run_round, found = alive().keys(), expert_slots._run_round, []

    def watched(*arguments):
        found.append(sum(size for key, size in alive().items() if key not in others))
        return run_round(*arguments)

    monkeypatch.setattr(expert_slots, "_run_round", watched)
    slots = 2
    experts = ChosenExperts(config, params, slots)
    written(generator(config, experts, 1))
    slot_bytes = 2 * 4 * config.d_model * config.d_ff
    assert set(found) == {config.num_sparse_layers * slots * slot_bytes}


@SLOW
def test_capacity_of_evaluation_drops_the_same_tokens():
    config, params = model("gpt", None)
    config = with_switch(config, eval_capacity_factor=0.1)
    pairs = [([3, 4, 5], [6, 7, 1]), ([5, 5], [5, 5, 5, 1])]
    want = sorted(Scorer(with_capacity(config), params)(pairs))
    free = sorted(Scorer(without_capacity(config), params)(pairs))
    host_config, host_params = on_host(config, params)
    experts = ChosenExperts(host_config, host_params, 2)
    for make, expected in ((with_capacity, want), (without_capacity, free)):
        scorer = Scorer(make(host_config), experts.params, experts=experts)
        for (_, ours), (_, theirs) in zip(sorted(scorer(pairs)), expected, strict=True):
            assert ours.log_likelihood == pytest.approx(theirs.log_likelihood, rel=1e-5)
    dropped = [
        a.log_likelihood - b.log_likelihood for (_, a), (_, b) in zip(want, free, strict=True)
    ]
    assert max(map(abs, dropped)) > 1e-2


@pytest.mark.parametrize(
    "changes, slots, words",
    [
        ({}, 0, "expert_slots=0 of a model with 4 experts a layer; use 1 to 4"),
        ({}, 5, "expert_slots=5 of a model with 4 experts a layer; use 1 to 4"),
        ({"switch": None}, 2, "a dense model, which has no experts to move; leave"),
        (
            {"switch": SwitchConfig(E, every=1, sublayers="both")},
            2,
            "sublayers='both': experts of self-attention are not moved; leave",
        ),
    ],
)
def test_refusals(changes, slots, words):
    config = dataclasses.replace(GPT, **changes)
    with pytest.raises(ValueError, match=re.escape(words)):
        ChosenExperts(config, {}, slots)


@pytest.mark.parametrize(
    "name, beam_size", [("gpt", 1), pytest.param("encoder-decoder", 2, marks=SLOW)]
)
def test_predictions_change_no_token(name, beam_size):
    """GPT's two Switch layers are in one stack; the other model's are in two, and nothing
    is predicted there."""
    config, params = on_host(*model(name, None))
    experts = ChosenExperts(config, params, 2, prefetch=True)
    got = written(generator(config, experts, beam_size))
    assert tokens(got) == tokens(resident(name, None, beam_size))
    traffic = experts.traffic
    has_next = name == "gpt"
    assert (traffic.predicted > 0) == has_next == ("predicted were chosen" in str(traffic))
    assert traffic.correct <= traffic.predicted and (traffic.correct > 0) == has_next
    # Moved for a request or for a prediction; what was requested is all that is traced.
    size = experts.source.expert_bytes
    missed = (traffic.requested - traffic.hits) * size
    assert missed <= traffic.moved_bytes <= missed + traffic.predicted * size
    assert len(experts.trace().key_T) == traffic.requested


def test_a_router_that_repeats_is_predicted():
    """Where the next router is this one, and reads the same rows, all is predicted."""
    logits_RE = np.random.default_rng(1).normal(size=(5, E)).astype(np.float32)
    x_RD = np.linalg.qr(np.random.default_rng(0).normal(size=(8, 8)))[0][:5].astype(np.float32)
    config = with_switch(GPT, router=RouterConfig(num_selected=2))
    # Of rows that are orthogonal, a router with the wanted logits; the last two are unused.
    w_router_DE, count_E = x_RD.T @ logits_RE, np.array([2, 0, 1, 0], np.int32)
    found_E = expert_slots.predicted(config, w_router_DE, None, x_RD, count_E)
    want_E = np.zeros(E, int)
    for row in logits_RE[:3]:
        want_E[np.argsort(-row)[:2]] += 1
    np.testing.assert_array_equal(found_E, want_E)


@pytest.mark.parametrize("name", ["encoder-decoder", pytest.param("gpt", marks=SLOW)])
def test_routing_of_a_text_is_what_its_steps_asked_for(name, monkeypatch):
    """One row at a time."""
    config, experts = with_slots(name, None, E)
    asked, run_rows = [], experts.run_rows

    def recorded(layer, x_RD, count_E):
        asked.append((layer, np.flatnonzero(np.asarray(count_E)).tolist()))
        return run_rows(layer, x_RD, count_E)

    monkeypatch.setattr(experts, "run_rows", recorded)
    # Nothing ends it, so that each token but the last is read.
    settings = DecodingConfig(T, pruning="none", eos_id=-1)
    inputs = INPUTS[2] if config.is_encoder_decoder else [0, *INPUTS[2]]
    how = {"experts": experts, "record": types.SimpleNamespace(add=lambda *parts: None)}
    generate = Generator(for_decoding(config), experts.params, settings, 1, **how)
    ((_, (best,)),) = generate([inputs])

    layers = [n for n, each in enumerate(config.sparse_layer_names) if "decoder" in each]
    steps = np.array(
        [sorted(chosen) for layer, chosen in asked if layer in layers][-T * len(layers) :]
    )
    want_TNS = steps.reshape(T, len(layers), -1)  # the first reads the prompt's last token
    expert_NTS = best.routing["decoder"][:, -T:, : config.switch.router.num_selected]
    np.testing.assert_array_equal(np.sort(expert_NTS, axis=-1), np.moveaxis(want_TNS, 0, 1))
    assert len(np.unique(expert_NTS)) > 1
