# SPDX-License-Identifier: Apache-2.0
"""The routes, in one process: statuses, types, the token, the page."""

import re

import pytest
from starlette.testclient import TestClient

from switchx.serving.app import PAGE, make_app

TOKEN = "0123456789abcdef"


@pytest.fixture
def client(service):
    return TestClient(make_app(service))


def test_health_says_what_it_does(client, service, monkeypatch):
    assert client.get("/healthz").json() == {"alive": True, "ready": True, "draining": False}
    assert client.get("/healthz/ready").status_code == 200
    monkeypatch.setattr(service, "is_draining", True)
    response = client.get("/healthz")
    assert response.status_code == 200
    assert response.json() == {"alive": True, "ready": False, "draining": True}
    assert client.get("/healthz/ready").status_code == 503
    monkeypatch.setattr(service.worker, "error", MemoryError())
    assert client.get("/healthz").status_code == 500


def test_metrics_count(client):
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


def test_a_token_is_asked_for(service):
    client = TestClient(make_app(service, TOKEN))
    for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": TOKEN},
                    {"Authorization": "Bearer é".encode()}):  # fmt: skip
        for response in (
            client.post("/v1/generate", json={"inputs": "gate"}, headers=headers),
            client.get("/metrics", headers=headers),
        ):
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
    right = {"Authorization": f"Bearer {TOKEN}"}
    assert client.post("/v1/generate", json={"inputs": "gate"}, headers=right).is_success
    assert client.get("/metrics", headers=right).is_success
    for path in ("/", "/healthz", "/healthz/ready"):
        assert client.get(path).is_success


def test_the_page_loads_nothing_from_elsewhere(client):
    response = client.get("/")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "connect-src 'self'" in response.headers["content-security-policy"]
    assert response.text == PAGE
    assert not re.findall(r"https?:|src=|@import|url\(", PAGE)
    for field in ("beam_size", "temperature", "top_k", "top_p", "seed", "length_penalty"):
        assert f'id="{field}"' in PAGE


def test_other_routes_and_methods(client):
    for method, path, status in (("GET", "/x", 404), ("GET", "/v1/generate", 405)):
        response = client.request(method, path)
        assert response.status_code == status
        assert response.json()["error"]["message"].endswith("; use POST /v1/generate")
    assert client.get("/v1/generate").headers["allow"] == "POST"


def test_failures_of_ours_say_nothing_of_themselves(service, monkeypatch, caplog):
    def fail(*arguments):
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr("switchx.serving.app.read_request", fail)
    client = TestClient(make_app(service), raise_server_exceptions=False)
    response = client.post("/v1/generate", json={"inputs": "gate"})
    assert response.status_code == 500 and "secret" not in response.text
    assert response.json()["error"]["message"] == "the server failed; its log says how"
    assert "a secret" in caplog.text and service.num_open == 0
