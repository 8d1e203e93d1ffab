# SPDX-License-Identifier: Apache-2.0
"""The cause is in the log: a fault at every place that logs an exception."""

import ast
import logging
import queue
import types

import pytest
from starlette.testclient import TestClient

from switchx.progress import shown_by
from switchx.serving.app import make_app
from switchx.serving.models import Models, Reloader
from switchx.serving.request_queue import Failure, ProgramShape
from switchx.serving.service import Service
from tests.processes import ROOT
from tests.serving import served

SECRET = "out of\nmemory, say"
SAID = ": RuntimeError: out of memory, say"


def fail(*arguments, **keywords):
    raise RuntimeError(SECRET)


def batch_fails(service, monkeypatch):
    monkeypatch.setattr("switchx.serving.scheduler.RunningBatch", fail)
    return completed(service)


def compiler_fails(service, monkeypatch):
    monkeypatch.setattr(type(service.worker), "compile_more", fail)
    monkeypatch.setattr(service.worker, "_compiled", {})
    monkeypatch.setattr(service.worker, "_most", {})
    return completed(service)


def request_fails(service, monkeypatch):
    monkeypatch.setattr("switchx.serving.answers.read_request", fail)
    return completed(service)


def completed(service) -> str:
    """The id of a request that failed."""
    client = TestClient(make_app(Models([service])), raise_server_exceptions=False)
    headers = {"x-request-id": "id-of-it"}
    response = client.post("/v1/generate", json={"inputs": "gate"}, headers=headers)
    assert response.status_code == 500 and "log says how" in response.text
    assert "memory" not in response.text and service.num_open == 0
    return headers["x-request-id"]


def worker_ends(service, monkeypatch):
    monkeypatch.setattr("switchx.serving.scheduler.Worker._warm_up", fail)
    other = Service(served.model(), served.LIMITS)
    other.worker.join(60)
    other.close()
    assert str(other.worker.error) == SECRET
    return ""


def first_of_the_history_fails(service, monkeypatch):
    """The server starts with the next shape."""
    compile_more = type(service.worker).compile_more

    def fail_of_searches(worker, shape):
        return fail() if shape.beam_size > 1 else compile_more(worker, shape)

    monkeypatch.setattr(type(service.worker), "compile_more", fail_of_searches)
    with served.started(asked_before=[ProgramShape(16, 8, 2, False)]) as other:
        assert [shape.beam_size for shape in other.worker.compiled] == [1]
    return ""


def reload_fails(service, monkeypatch):
    folder = types.SimpleNamespace(model_dir="runs/a", load_other=fail)
    reloader = Reloader(Models([service]), {service.name: folder})
    reloader._reload(service.name, folder)
    return service.name


# What begins the line, by the place that logs it: file and function.
FAULTS = {
    ("scheduler.py", "_failing"): (batch_fails, "error: a batch of 1 inputs failed (request "),
    ("scheduler.py", "run"): (worker_ends, "error: the worker ended"),
    ("scheduler.py", "_begins_with"): (
        first_of_the_history_fails,
        "error: no program could be compiled for prompts up to 16 tokens, answers up to 8, 2",
    ),
    ("scheduler.py", "Compiler.run"): (
        compiler_fails,
        "error: no program could be compiled for prompts up to 16 tokens, answers up to",
    ),
    ("app.py", "_failed"): (request_fails, "error: request id-of-it failed"),
    ("models.py", "_reload"): (
        reload_fails,
        "error: tiny: not loaded again, step 0 goes",
    ),
}


@pytest.mark.parametrize("with_traceback", [False, True])
@pytest.mark.parametrize("place", FAULTS, ids=" ".join)
def test_a_fault_is_a_line_with_its_cause(service, monkeypatch, place, with_traceback):
    cause_it, begin = FAULTS[place]
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    with shown_by(lines.put, has_traceback=with_traceback), shown_by(lines.put):
        of = cause_it(service, monkeypatch)
    said = [lines.get() for _ in range(lines.qsize())]
    (line,) = [each for each in said if each.startswith(begin)]
    first, *rest = line.split("\n")
    assert first.endswith(SAID) and of in first, line
    assert bool(rest) == with_traceback
    if with_traceback:
        assert rest[0] == "Traceback (most recent call last):" and ", in fail" in line
    assert "ProgramShape(" not in line


def test_all_places_that_log_an_exception_are_above():
    """And none of the package is without."""
    found = []
    for file in sorted((ROOT / "switchx").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            of_log = getattr(node.func.value, "id", "") in ("LOG", "_log", "logging")
            has_error = any(each.arg == "exc_info" for each in node.keywords)
            is_said = has_error and node.func.attr != "debug"
            if of_log and (node.func.attr == "exception" or is_said):
                found.append(file.name)
    assert sorted(found) == sorted(name for name, _ in FAULTS)


def test_groups_and_exceptions_without_a_text_are_told_in_words():
    assert str(ProgramShape(16, 64, 1, False)) == (
        "prompts up to 16 tokens, answers up to 64, the likeliest token"
    )
    assert str(ProgramShape(16, 64, 4, False, True, 5, True)) == (
        "prompts up to 16 tokens, answers up to 64, 4 beams, with penalties or forced tokens, "
        "with log-probabilities of 5 others, with experts"
    )
    assert str(ProgramShape(16, 64, 1, True)).endswith(", sampled")
    lines = []
    with shown_by(lines.append):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            logging.getLogger("switchx").exception("it ended")
    assert lines == ["error: it ended: KeyboardInterrupt"]
    assert Failure(0).message == "the model failed; the server's log says how"
