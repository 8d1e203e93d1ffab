# SPDX-License-Identifier: Apache-2.0
"""The worker: answers are the model's own, whatever they are batched with."""

import dataclasses
import queue

import jax
import pytest

from switchx.api import Model
from switchx.data.text_format import TextFormat
from switchx.data.tokenizers import ByteVocabulary
from switchx.models.config import ModelConfig, SwitchConfig
from switchx.models.params import init_params
from switchx.serving.requests import AnswerSettings, Refusal, read_request
from switchx.serving.scheduler import Answer, Failure, Group, NewTokens, WaitingInput
from tests.serving import served

WAIT_S = 60


def ask(service, prompts, settings=None, *, is_streaming=False):
    """Inputs that are put into the queue at once, and the queue of their events."""
    events, settings = queue.Queue(), settings or [AnswerSettings(8)] * len(prompts)
    inputs = [
        WaitingInput(
            prompt, own, number, Group.of(prompt, own, service.limits), events.put, is_streaming
        )
        for number, (prompt, own) in enumerate(zip(prompts, settings, strict=True))
    ]
    assert service._room.put(inputs)
    return inputs, events


def answers(events, count):
    found = {}
    while len(found) < count:
        event = events.get(timeout=WAIT_S)
        assert not isinstance(event, Failure)
        if isinstance(event, Answer):
            assert event.number not in found
            found[event.number] = event.hypothesis
    return [found[number] for number in sorted(found)]


def same(got, want):
    assert (got.tokens, got.is_finished) == (want.tokens, want.is_finished)
    assert got.score == pytest.approx(want.score, rel=1e-4)


def test_different_settings_in_one_batch_are_each_ones_own(service):
    """Samples of other seeds and temperatures in one program, as if each were alone."""
    prompt = service.model.prompts(["gate"])[0]
    settings = [
        AnswerSettings(8, temperature=0.7, seed=3, top_k=9, length_penalty=0.0),
        AnswerSettings(5, temperature=1.3, seed=3, top_p=0.8),
    ]
    _, events = ask(service, [prompt] * 2, settings)
    for number, got in enumerate(answers(events, 2)):
        generator = service.model.generator(**dataclasses.asdict(settings[number]))
        ((_, (want, *_)),) = generator([prompt], first_number=number)
        same(got, want)


def test_streams_grow_to_their_answers(service):
    prompts = service.model.prompts(served.TEXTS[:2])
    _, events = ask(service, prompts, is_streaming=True)
    so_far = {0: [], 1: []}
    left = {0, 1}
    while left:
        event = events.get(timeout=WAIT_S)
        tokens = event.tokens if isinstance(event, NewTokens) else event.hypothesis.tokens
        assert tokens[: len(so_far[event.number])] == so_far[event.number]
        so_far[event.number] = tokens
        left -= {event.number} if isinstance(event, Answer) else set()
    assert all(so_far.values())


def test_nobody_is_answered_who_left(service):
    prompts = service.model.prompts(served.TEXTS[:3])
    inputs, events = ask(service, prompts)
    service._room.abandon(inputs[1:])
    inputs_of_others, others = ask(service, prompts)
    answers(others, 3)
    assert not inputs_of_others[0].is_abandoned
    # It may have been decoded already; the first is there in any case.
    assert 0 in {events.get(timeout=1).number for _ in range(events.qsize())}


def test_a_batch_that_fails_fails_alone(service, monkeypatch, caplog):
    def fail(*arguments, **keywords):
        raise RuntimeError("out of memory, say")

    prompts = service.model.prompts(served.TEXTS[:2])
    with monkeypatch.context() as patch:
        patch.setattr("switchx.serving.scheduler.RunningBatch", fail)
        _, events = ask(service, prompts)
        failures = [events.get(timeout=WAIT_S) for _ in prompts]
    assert failures == [Failure(0), Failure(1)]
    assert "out of memory, say" in caplog.text
    _, events = ask(service, prompts)
    assert len(answers(events, 2)) == 2
    assert service.worker.is_ready and service.worker.error is None


def test_a_decoder_only_model_with_few_positions():
    """The program has room for more than there are positions; a request may not ask so much."""
    switch = SwitchConfig(2, every=1)
    config = ModelConfig(
        "decoder_only", 384, 8, 8, 1, 8, 1, switch=switch, positions="learned", max_length=12
    )
    params = init_params(config, jax.random.key(1))
    format_ = TextFormat(False, True, False)
    model = Model(config, params, ByteVocabulary(), 0, format_, "")
    limits = dataclasses.replace(served.LIMITS, max_new_tokens=16, warm_up_tokens=0)
    service = served.start(limits, model)
    prompts = model.prompts(["ab", "c"])
    assert prompts[1] == [0, *model.vocabulary.encode("c")]
    _, events = ask(service, prompts, [AnswerSettings(9)] * 2)
    want = model.generate(["ab", "c"], max_length=9)
    got = [model.vocabulary.decode(each.tokens) for each in answers(events, 2)]
    service.close()
    assert got == want
    with pytest.raises(Refusal, match="needs 13 positions, the model has 12"):
        read_request(b'{"inputs": "ab", "max_new_tokens": 10}', model, limits)
