# SPDX-License-Identifier: Apache-2.0
"""The routes: answers are `model.generate`'s, whole or streamed, or an error."""

import dataclasses
import json
import logging
import re
import time
from unittest import mock

import jax
import pytest
from starlette.testclient import TestClient

from switchx.data.tokenizers import PAD_ID, ByteVocabulary
from switchx.inference.config import DecodingConfig
from switchx.inference.offload.chosen_experts import ChosenExperts, on_host
from switchx.inference.running_batch import Hypothesis
from switchx.serving.answers import GrowingAnswer, JSONResponse, encoded
from switchx.serving.app import make_app
from switchx.serving.models import Models
from switchx.serving.request_queue import Answer, NewTokens
from switchx.serving.requests import GenerateRequest
from switchx.serving.scheduler import Worker
from tests.serving import served


@pytest.fixture
def models(service):
    return Models([service])


@pytest.fixture
def client(models):
    return TestClient(make_app(models))


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


@pytest.mark.parametrize("is_streaming", [False, True])
def test_answers_say_which_experts_their_tokens_chose(client, is_streaming):
    """Those of one pass over prompt and answer; a last token that was not read has none."""
    text, model, parts = served.TEXTS[0], served.model(), {}
    asked = {"inputs": text, "experts": True, "stream": is_streaming}
    response = client.post("/v1/generate", json=asked)
    if is_streaming:
        (line,) = re.findall("^event: answer\ndata: (.*)", response.text, re.MULTILINE)
        result = json.loads(line)
    else:
        (result,) = response.json()["results"]
    tokens, experts = result["tokens"], result["experts"]
    record = mock.Mock(add=lambda number, of_stacks, *rest: parts.update(of_stacks))
    pair = model.prompts([text])[0], [*tokens, PAD_ID]
    list(model.scorer(record=record)([pair]))
    num_read = len(tokens) - (not result["is_finished"])
    expert_NTS = parts["decoder"].expert_NBLS[:, 0, 1 : 1 + num_read]
    (layer,) = experts["layers"].values()
    assert list(experts["layers"]) == model.config.sparse_layers_by_stack["decoder"]
    assert layer == expert_NTS[0].tolist() + [[]] * (len(tokens) - num_read)
    assert experts["num_experts"] == model.config.switch.num_experts
    assert experts["pieces"] == [model.vocabulary.piece(token).text for token in tokens]


def test_the_n_best_of_a_search(client):
    texts, settings = served.TEXTS[:2], {"beam_size": 2, "num_return_sequences": 2}
    body = client.post("/v1/generate", json={"inputs": texts} | settings).json()
    want = served.model().generate(
        texts, max_length=8, pruning="none", with_scores=True, **settings
    )
    for got, each in zip(body["results"], want, strict=True):
        said = got["hypotheses"]
        assert [one["text"] for one in said] == [one.output for one in each]
        scores = [one.score for one in each]
        assert [one["score"] for one in said] == pytest.approx(scores, rel=1e-4)
    said = sum((got["hypotheses"] for got in body["results"]), [])
    assert body["usage"]["generation_tokens"] == sum(len(one["tokens"]) for one in said)


@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_stop_and_log_probabilities(client, is_streaming):
    """The score of what is stopped is of its own tokens."""
    text = served.said()["gate"].output
    settings = {"stop": ["zz", text[2:4]], "logprobs": 2, "length_penalty": 0.5}
    (want,) = served.model().generate(["gate"], max_length=8, with_scores=True, **settings)
    assert want.output == text[: text.index(text[2:4])] and want.is_finished
    request = {"inputs": "gate", "stream": is_streaming} | settings
    response = client.post("/v1/generate", json=request)
    if is_streaming:
        events = served.events(response.text)
        (got,) = [data for name, data in events if name == "answer"]
        pieces = [data for name, data in events if name == "tokens"]
        for name in ("tokens", "token_logprobs", "top_logprobs"):
            assert sum((piece[name] for piece in pieces), []) == got[name]
        assert "".join(piece["text"] for piece in pieces) == want.output
    else:
        (got,) = response.json()["results"]
    assert (got["text"], got["is_finished"]) == (want.output, True)
    assert got["score"] == pytest.approx(want.score, rel=1e-4)
    assert got["token_logprobs"] == pytest.approx(want.token_logprobs, rel=1e-3, abs=1e-4)
    for top, own in zip(got["top_logprobs"], want.top_logprobs, strict=True):
        assert [int(token) for token in top] == list(own)


@pytest.mark.slow
def test_a_model_with_slots_for_experts_answers_the_same():
    resident = served.model()
    config, params = on_host(resident.config, resident.params)
    experts = ChosenExperts(config, params, slots=1)
    model = dataclasses.replace(resident, config=config, params=params, experts=experts)
    with served.started(a_model=model) as service:
        client = TestClient(make_app(Models([service])))
        body = client.post("/v1/generate", json={"inputs": served.TEXTS}).json()
        assert all(map(served.is_said, body["results"], served.TEXTS))


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


@pytest.mark.parametrize("is_streaming", [False, True])
def test_an_answer_that_takes_too_long_is_an_error(service, limited, is_streaming):
    limited(batch_wait_ms=500, request_timeout_s=0.05)
    client = TestClient(make_app(Models([service])))
    request = {"inputs": "gate", "stream": is_streaming}
    response = client.post("/v1/generate", json=request)
    message = (
        "there was no answer within 0.05 s; ask for less, or later, when its program is "
        "compiled (/healthz)"
    )
    if is_streaming:
        ((name, data),) = served.events(response.text)
        assert name == "error" and data["error"]["message"] == message
    else:
        assert response.status_code == 504
        assert response.json()["error"]["message"] == message
    assert len(service._queue) == 0 and service.num_open == 0


def test_a_full_queue_says_when_to_come_again(client, limited):
    limited(max_waiting=0)
    for is_streaming in (False, True):
        request = {"inputs": "gate", "stream": is_streaming}
        response = client.post("/v1/generate", json=request)
        assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1
        assert "of 0 inputs, and 1 more do not fit" in response.text


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


TOKEN = "0123456789abcdef"


def test_health_says_what_it_does(client, models, service, monkeypatch):
    state = client.get("/healthz").json()
    (programs,) = state.pop("models").values()
    assert state == {"alive": True, "ready": True, "draining": False}
    short = "prompts up to 16 tokens, answers up to 8, the likeliest token"
    assert programs["compiled"][short] == 4 and programs["planned"] == 0
    assert client.get("/healthz/ready").status_code == 200
    monkeypatch.setattr(models, "is_draining", True)
    response = client.get("/healthz")
    assert response.status_code == 200
    assert response.json()["draining"] and not response.json()["ready"]
    assert client.get("/healthz/ready").status_code == 503
    with monkeypatch.context() as patch:
        patch.setattr(service.worker, "error", MemoryError())
        assert client.get("/healthz").status_code == 503
    assert client.get("/health").json() == client.get("/healthz").json()
    assert client.get("/healthz").json()["alive"]


def test_health_says_that_a_step_does_not_end(client, service, limited, monkeypatch):
    limited(worker_timeout_s=5.0)
    worker = Worker(service.model, service.limits, service.metrics)  # whose thread never runs
    monkeypatch.setattr(service, "worker", worker)
    worker.heartbeat_s = time.monotonic() - 6.0
    assert client.get("/healthz").json()["alive"]  # it has nothing to do
    worker._batches["some"] = None
    response = client.get("/healthz")
    assert response.status_code == 503 and not response.json()["alive"]
    worker.heartbeat_s = time.monotonic() - 4.0
    assert client.get("/healthz").status_code == 200


def test_metrics_versions_and_other_routes(client):
    def value(name):
        text = client.get("/metrics").text
        return float(re.search(rf"^switchx:{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)[1])

    before = value("prompt_tokens_total")
    assert client.post("/v1/generate", json={"inputs": "gate"}).status_code == 200
    assert value("prompt_tokens_total") == before + 5
    assert value("num_requests_running") == value("num_requests_waiting") == 0
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    assert re.search(r'http_responses_total\{status="200"\} \d', response.text)
    got = client.get("/version").json()
    assert got["jax"] == jax.__version__ and set(got) == {"version", "commit", "jax", "device"}
    assert f'jax="{jax.__version__}"' in client.get("/metrics").text.partition("build_info{")[2]
    for method, path, status in (("GET", "/x", 404), ("GET", "/v1/generate", 405)):
        response = client.request(method, path)
        assert response.status_code == status
        assert response.json()["error"]["message"].endswith(
            "; use POST /v1/generate or /v1/completions"
        )
    assert client.get("/v1/generate").headers["allow"] == "POST"


def test_a_token_is_asked_for(service):
    client = TestClient(make_app(Models([service]), TOKEN))
    for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": TOKEN},
                    {"Authorization": f"Basic {TOKEN}"}, {"Authorization": "Bearer "},
                    {"Authorization": "Bearer é".encode()}):  # fmt: skip
        for response in (
            client.post("/v1/generate", json={"inputs": "gate"}, headers=headers),
            client.get("/metrics", headers=headers),
        ):
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
    right = {"Authorization": f"Bearer {TOKEN}"}
    assert client.post("/v1/generate", json={"inputs": "gate"}, headers=right).is_success
    for scheme in ("Bearer", "bearer", "BEARER "):
        headers = {"Authorization": f"{scheme} {TOKEN}"}
        assert client.get("/metrics", headers=headers).is_success
    for path in ("/", "/healthz", "/healthz/ready"):
        assert client.get(path).is_success


def test_each_request_is_a_line_of_json(client, caplog):
    with caplog.at_level(logging.INFO, "switchx.access"):
        client.post(
            "/v1/generate", json={"inputs": ["gate", "of"]}, headers={"X-Request-Id": "a-1"}
        )
        client.post("/v1/generate", json={}, headers={"X-Request-Id": 'b"\\'})
        client.get("/healthz")
    first, second = (json.loads(record.getMessage()) for record in caplog.records)
    assert (first["request_id"], first["status"], first["inputs"]) == ("a-1", 200, 2)
    assert first["prompt_tokens"] == 5 + 3 and first["generation_tokens"] > 0
    assert first["is_complete"] and first["seconds"] > 0 and first["bytes"] > 0
    assert (first["method"], first["path"]) == ("POST", "/v1/generate")
    assert second["status"] == 400 and re.fullmatch("[0-9a-f]{32}", second["request_id"])


class TextStream:
    """A row's answer in pieces: which tokens and which characters are new."""

    def __init__(self, vocabulary):
        self._row = GrowingAnswer(vocabulary, GenerateRequest([], DecodingConfig(), True))

    def piece(self, tokens, *, is_last=False):
        event = NewTokens(0, tokens)
        if is_last:
            event = Answer(0, Hypothesis(tokens, -1.0, True))
        new, text = self._row.grow(event, mock.Mock())
        return {"tokens": new.tokens, "text": text} if new.tokens or text else None


def test_pieces_of_texts_wait_for_whole_characters():
    vocabulary, stream = ByteVocabulary(), TextStream(ByteVocabulary())
    tokens = vocabulary.encode("aé")
    assert stream.piece(tokens[:2]) == {"tokens": tokens[:2], "text": "a"}
    assert stream.piece(tokens[:2]) is None
    assert stream.piece(tokens) == {"tokens": tokens[2:], "text": "é"}
    stream = TextStream(None)
    assert stream.piece([5, 6]) == {"tokens": [5, 6], "text": None}
    assert stream.piece([5, 6], is_last=True) is None
    stream = TextStream(Fickle())
    pieces = [stream.piece([1] * n) for n in (1, 2, 3)]
    assert [piece["text"] for piece in pieces] == ["ab", "", ""]


class Fickle:
    """A vocabulary in which the third token changes the first one's text."""

    def decode(self, tokens):
        return "ab" if len(tokens) < 3 else "XYZ"


def test_every_text_can_be_sent_and_no_infinity():
    for text in ("é🙂", "\ud800", '"\\\n\x00', "\ud83d\ude42 \udfff"):
        assert json.loads(encoded({"text": text}).decode("utf-8", "strict"))["text"] in (
            text,
            text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"),
            "🙂 \udfff",
        )
    assert encoded("é") == '"é"'.encode()
    with pytest.raises(ValueError, match="Out of range"):
        encoded({"score": float("inf")})
    response = JSONResponse({"a": 1}, 418, {"x": "y"})
    assert response.body == b'{"a": 1}\n' and response.status_code == 418
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x"] == "y"
