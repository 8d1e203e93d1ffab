# SPDX-License-Identifier: Apache-2.0
"""The event loop's side: who is admitted, what is refused, who left."""

import asyncio
import dataclasses

import pytest
from switchx.serving.service import Service

from switchx.serving.requests import AnswerSettings, GenerateRequest, Refusal
from switchx.serving.scheduler import Answer
from tests.serving import served


def request_of(texts, is_streaming=False):
    return GenerateRequest(served.model().prompts(texts), AnswerSettings(8), is_streaming)


def refusal(raising) -> Refusal:
    with pytest.raises(Refusal) as caught:
        raising()
    return caught.value


def admit(service):
    with service.admitted():
        pass


async def all_events(service, request):
    async with service.events(request) as events:
        return [event async for event in events]


def test_each_input_is_answered_once(service):
    found = asyncio.run(all_events(service, request_of(served.TEXTS)))
    answers = {event.number: event.hypothesis for event in found if isinstance(event, Answer)}
    assert len(answers) == sum(isinstance(event, Answer) for event in found) == 8
    for number, text in enumerate(served.TEXTS):
        assert served.model().vocabulary.decode(answers[number].tokens) == (
            served.said()[text].output
        )


def test_an_answer_stands_though_its_batch_fails_later(service, monkeypatch):
    """Of two inputs in two batches; the first one's batch fails once it is answered."""
    deliver = type(service.worker)._deliver_answer

    def deliver_and_fail(worker, each, best):
        deliver(worker, each, best)
        if each.number == 0:
            raise RuntimeError("out of memory, say")

    monkeypatch.setattr(type(service.worker), "_deliver_answer", deliver_and_fail)
    monkeypatch.setattr(service._room, "_batch_size", 1)
    found = asyncio.run(all_events(service, request_of(served.TEXTS[:2])))
    assert [event.number for event in found if isinstance(event, Answer)] == [0, 1]


def test_a_full_queue_refuses_whole_requests(service, monkeypatch):
    monkeypatch.setattr(service._room, "size", 2)
    many = refusal(lambda: asyncio.run(all_events(service, request_of(served.TEXTS[:3]))))
    assert many.status == 429 and many.retry_after_s >= 1
    assert "of 2 inputs, and 3 more do not fit" in many.message
    assert len(asyncio.run(all_events(service, request_of(served.TEXTS[:2])))) >= 2


def test_who_leaves_is_counted_and_not_waited_for(service):
    async def leave():
        async with service.events(request_of(served.TEXTS)):
            pass

    before = service.metrics.abandoned._value.get()
    asyncio.run(leave())
    assert len(service._room) == 0
    assert service.metrics.abandoned._value.get() == before + 8


def test_nobody_is_admitted_when_it_stops_or_has_not_begun(service, monkeypatch):
    admit(service)
    assert service.is_ready and service.num_open == 0
    with monkeypatch.context() as patch:
        patch.setattr(service, "is_draining", True)
        assert "is stopping" in refusal(lambda: admit(service)).message
        assert not service.is_ready
    with monkeypatch.context() as patch:
        patch.setattr(service.worker, "is_ready", False)
        early = refusal(lambda: admit(service))
        assert early.status == 503 and "compiling" in early.message and early.retry_after_s
        patch.setattr(service.worker, "error", MemoryError())
        assert "not running any more" in refusal(lambda: admit(service)).message


def test_a_model_that_cannot_generate_is_refused_at_once():
    model = served.model()
    switch = dataclasses.replace(model.config.switch, sublayers="attention")
    config = dataclasses.replace(model.config, switch=switch)
    with pytest.raises(ValueError, match="experts in self-attention have no cache"):
        Service(dataclasses.replace(model, config=config), served.LIMITS)
