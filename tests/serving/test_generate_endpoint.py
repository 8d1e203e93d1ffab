# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/generate`: answers are `model.generate`'s, whole or streamed, or an error."""

import dataclasses

import pytest
from starlette.testclient import TestClient

from switchx.serving.app import make_app
from tests.serving import served

HEADERS = {"Content-Type": "application/json"}


@pytest.fixture
def client(service):
    return TestClient(make_app(service))


def test_answers_are_the_models_own(client):
    response = client.post("/v1/generate", json={"inputs": served.TEXTS})
    assert response.status_code == 200
    body = response.json()
    assert all(map(served.is_said, body["results"], served.TEXTS))
    want = list(served.said().values())
    for got, text in zip(body["results"], served.TEXTS, strict=True):
        assert served.model().vocabulary.decode(got["tokens"]) == served.said()[text].output
    assert len({each.output for each in want}) > 3  # they can be told apart
    prompts = served.model().prompts(served.TEXTS)
    assert body["usage"] == {
        "prompt_tokens": sum(map(len, prompts)),
        "generation_tokens": sum(len(each["tokens"]) for each in body["results"]),
    }


def test_so_they_are_with_beams(client):
    """Samples are in the worker's tests."""
    texts, settings = served.TEXTS[:3], {"beam_size": 2, "length_penalty": 0.5}
    body = client.post("/v1/generate", json={"inputs": texts} | settings).json()
    want = served.model().generate(texts, max_length=8, with_scores=True, **settings)
    for got, each in zip(body["results"], want, strict=True):
        assert (got["text"], got["is_finished"]) == (each.output, each.is_finished)
        assert got["score"] == pytest.approx(each.score, rel=1e-4)


def test_token_ids_are_read_as_they_are(client):
    tokens = served.model().prompts(["gate"])[0]
    body = client.post("/v1/generate", json={"inputs": [tokens, "gate"]}).json()
    assert body["results"][0] == body["results"][1]


def test_a_stream_is_its_answer_in_pieces(client):
    response = client.post("/v1/generate", json={"inputs": served.TEXTS[:4], "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = served.events(response.text)
    assert [name for name, _ in events].count("answer") == 4 and events[-1][0] == "done"
    for number, text in enumerate(served.TEXTS[:4]):
        own = [(name, data) for name, data in events if data.get("input") == number]
        *pieces, (last, answer) = own
        assert last == "answer" and {name for name, _ in pieces} == {"tokens"}
        assert served.is_said(answer, text)
        assert sum((data["tokens"] for _, data in pieces), []) == answer["tokens"]
        assert "".join(data["text"] for _, data in pieces) == answer["text"]


def test_a_search_streams_answers_alone(client):
    request = {"inputs": served.TEXTS[:2], "stream": True, "beam_size": 2}
    events = served.events(client.post("/v1/generate", json=request).text)
    assert [name for name, _ in events] == ["answer", "answer", "done"]


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b'{"inputs": ', HEADERS, 400),
        (b'{"inputs": "a", "beam_size": 99}', HEADERS, 400),
        (b"x" * 5000, HEADERS, 413),
        (b'{"inputs": "a"}', {"Content-Type": "text/plain"}, 415),
        (b'{"inputs": "a"}', HEADERS | {"Content-Encoding": "gzip"}, 415),
    ],
)
def test_refusals_have_their_status(client, content, headers, status):
    response = client.post("/v1/generate", content=content, headers=headers)
    assert response.status_code == status == response.json()["error"]["status"]


@pytest.mark.parametrize("is_streaming", [False, True])
def test_who_waits_too_long_is_told(service, monkeypatch, is_streaming):
    limits = dataclasses.replace(service.limits, request_timeout_s=0.05)
    monkeypatch.setattr(service, "limits", limits)
    monkeypatch.setattr(service._room, "_batch_wait_s", 0.5)
    client = TestClient(make_app(service))
    request = {"inputs": "gate", "stream": is_streaming}
    response = client.post("/v1/generate", json=request)
    message = "there was no answer within 0.05 s; ask for less, or later"
    if is_streaming:
        ((name, data),) = served.events(response.text)
        assert name == "error" and data["error"]["message"] == message
    else:
        assert response.status_code == 504
        assert response.json()["error"]["message"] == message
    assert len(service._room) == 0 and service.num_open == 0


def test_a_full_queue_says_when_to_come_again(client, service, monkeypatch):
    monkeypatch.setattr(service._room, "size", 0)
    for is_streaming in (False, True):
        request = {"inputs": "gate", "stream": is_streaming}
        response = client.post("/v1/generate", json=request)
        assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1


@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_model_that_fails_is_an_error(client, service, monkeypatch, is_streaming):
    def fail(*arguments, **keywords):
        raise RuntimeError("a secret")

    monkeypatch.setattr("switchx.serving.scheduler.RunningBatch", fail)
    request = {"inputs": "gate", "stream": is_streaming}
    response = client.post("/v1/generate", json=request)
    assert "the model failed; the server's log says how" in response.text
    assert "secret" not in response.text
    assert response.status_code == (200 if is_streaming else 500)
