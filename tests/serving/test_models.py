# SPDX-License-Identifier: Apache-2.0
"""Several models in one server, and newer ones in their places: each answer is its model's."""

import concurrent.futures
import contextlib
import dataclasses
import logging
import os
import shutil
import signal
import threading
import time
import weakref

import jax
import pytest
from starlette.testclient import TestClient

import switchx
from switchx.inference.artifact import write_artifact
from switchx.inference.quantize import quantize_experts
from switchx.models.params import init_params
from switchx.serving.app import make_app
from switchx.serving.models import ModelFolder, Models, Reloader
from switchx.serving.server import Server, open_socket
from tests.cases import slow
from tests.serving import served
from tests.serving.served import wait_until
from tests.training.saved_runs import SPANS, save_run

WAIT_S = 250.0


def answers_of(model) -> list[str]:
    """What a model says to all of TEXTS."""
    return model.generate(served.TEXTS, max_length=8, pruning="none")


@pytest.fixture(scope="module")
def both(service):
    """The model of all tests, and one of other parameters with the same programs."""
    params = init_params(served.CONFIG, jax.random.key(34))
    other = dataclasses.replace(served.model(), params=params, fingerprint="other")
    metrics = service.metrics.server
    with served.started(a_model=other, name="other", metrics=metrics) as other:
        yield Models([service, other])


def texts_of(response) -> list[str]:
    return [each["text"] for each in response.json()["results"]]


def test_a_request_names_its_model_and_a_failed_one_is_the_servers_end(both, monkeypatch):
    client = TestClient(make_app(both))
    want = {name: answers_of(each.model) for name, each in both.services.items()}
    assert want["tiny"] != want["other"]
    for model, name in (("tiny", "tiny"), ("other", "other"), (None, "tiny")):
        body = {"inputs": served.TEXTS, "model": model}
        assert texts_of(client.post("/v1/generate", json=body)) == want[name]
        body = {"prompt": served.TEXTS[0], "model": model, "temperature": 0, "max_tokens": 8}
        got = client.post("/v1/completions", json=body).json()
        assert (got["model"], got["choices"][0]["text"]) == (name, want[name][0])
    assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["tiny", "other"]
    assert client.get("/v1/models/other").json()["step"] == 0
    client = TestClient(make_app(both))
    monkeypatch.setattr(both.services["other"].worker, "error", MemoryError())
    assert client.get("/healthz").status_code == 503 and not both.is_alive
    response = client.post("/v1/generate", json={"inputs": "gate", "model": "other"})
    assert response.status_code == 503 and "not running any more" in response.text
    assert client.post("/v1/generate", json={"inputs": "gate"}).status_code == 200


@pytest.mark.parametrize("name", ["another", "tiny ", "", 3, ["tiny"], {}])
def test_a_name_of_no_model_is_answered_with_those_there_are(both, name):
    client = TestClient(make_app(both))
    for path, text in (("/v1/generate", "inputs"), ("/v1/completions", "prompt")):
        response = client.post(path, json={"model": name, text: "gate"})
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (404, "model_not_found")
        assert error["param"] == "model"
        assert error["message"].endswith("this server has 'tiny', 'other'")


def test_models_answer_beside_each_other_and_count_apart(both):
    """Clients of both at a time; every answer is that of the model that was asked."""
    want = {name: answers_of(each.model) for name, each in both.services.items()}
    metrics = both.metrics
    before = {name: metrics.of(name).prompt_tokens._value.get() for name in want}
    asked = {"tiny": range(0, 12), "other": range(0, 20)}
    with served.listening(both) as address, concurrent.futures.ThreadPoolExecutor(6) as pool:
        waiting = [
            (name, number % 8, pool.submit(
                served.post, address, {"inputs": served.TEXTS[number % 8], "model": name}
            ))
            for name, numbers in asked.items() for number in numbers
        ]  # fmt: skip
        for name, number, each in waiting:
            status, body = each.result()
            assert status == 200 and body["results"][0]["text"] == want[name][number]
    for name, numbers in asked.items():
        prompts = served.model().prompts([served.TEXTS[number % 8] for number in numbers])
        count = metrics.of(name).prompt_tokens._value.get() - before[name]
        assert count == sum(map(len, prompts))
    text = metrics.text().decode()
    for name in want:
        assert f'switchx:num_requests_running{{model_name="{name}"}} 0.0' in text
        assert "switchx:build_info{" in text and f'model_name="{name}"' in text


# Reloads.


@dataclasses.dataclass
class Run:
    """A server of a run folder, from step 5, to which step 9 can be added.

    Attributes:
        want: by step, what its model says to all of TEXTS.
    """

    folder: object
    models: Models
    reloader: Reloader
    address: tuple
    want: dict[int, list[str]]

    def add(self, damage=lambda path: None) -> None:
        """A new checkpoint comes, whole at once."""
        path = self.folder.parent / "kept" / "9"
        partial = self.folder.parent / "partial"
        shutil.copytree(path, partial)
        damage(partial)
        partial.rename(self.folder / "checkpoints/9")

    def reload(self) -> str:
        """Asks for it, and says what became of it."""
        counters = self.models.metrics.of("run").reloads
        before = {name: each._value.get() for name, each in counters.items()}
        self.reloader.ask()

        def changed():
            return [n for n, each in counters.items() if each._value.get() > before[n]]

        wait_until(changed, WAIT_S)
        (outcome,) = changed()
        return outcome

    def step(self) -> int:
        return self.models.first.model.step

    def ask(self, *texts: str) -> list[str]:
        status, body = served.post(self.address, {"inputs": list(texts)}, timeout_s=WAIT_S)
        assert status == 200, body
        return [each["text"] for each in body["results"]]


@pytest.fixture(scope="module")
def saved(service, tmp_path_factory):
    """A run folder with step 5 alone; step 9 beside it. What each of them says."""
    root = tmp_path_factory.mktemp("reload")
    folder = save_run(root / "run", served.CONFIG, source=SPANS)
    want = {step: answers_of(switchx.load(folder, step)) for step in (5, 9)}
    assert all(a != b for a, b in zip(want[5], want[9], strict=True))
    (root / "kept").mkdir()
    (folder / "checkpoints/9").rename(root / "kept/9")
    return folder, want


@pytest.fixture
def run(saved):
    folder, want = saved
    source = ModelFolder(folder)
    # A request is held up for as long as a reload takes.
    limits = dataclasses.replace(served.LIMITS, request_timeout_s=WAIT_S)
    service = served.start(limits, source.load(), name="run")
    models = Models([service])
    reloader = Reloader(models, {"run": source})
    del service
    reloader.start()
    with served.listening(models) as address:
        yield Run(folder, models, reloader, address, want)
    reloader.close()
    reloader.join(30)
    for each in models.all:
        served.stop(each)
    shutil.rmtree(folder / "checkpoints/9", ignore_errors=True)


@contextlib.contextmanager
def ending(is_over: threading.Event):
    """Sets it on leaving: clients that ask until then do not hold up a test that failed."""
    try:
        yield
    finally:
        is_over.set()


def test_every_answer_is_of_the_model_that_admitted_it(run):
    """Clients ask all the while; one request is in the old model's queue at the change."""
    old = weakref.ref(run.models.first)
    arrays = weakref.ref(run.models.first.model)
    number_old, is_over = 0, threading.Event()
    want_of_7 = run.models.first.model.generate(served.TEXTS, max_length=7, pruning="none")

    def keep_asking(first: int):
        found = []
        while not is_over.is_set():
            index = (first + len(found)) % 8
            begun, (text,) = run.step(), run.ask(served.TEXTS[index])
            found.append((index, text, begun, run.step()))
        return found

    with concurrent.futures.ThreadPoolExecutor(5) as pool, ending(is_over):
        asking = [pool.submit(keep_asking, first) for first in range(3)]
        wait_until(lambda: run.models.metrics.of("run").success["length"]._value.get() >= 3)
        # Answers of 7 tokens are held up in the queue.
        queue, are_held = old()._queue, True
        waiting = queue.waiting
        queue.waiting = lambda: [
            each for each in waiting() if not are_held or each.settings.max_new_tokens != 7
        ]
        held = pool.submit(
            served.post,
            run.address,
            {"inputs": served.TEXTS, "max_new_tokens": 7},
            timeout_s=WAIT_S,
        )
        wait_until(lambda: len(queue) >= 8)
        run.add()
        assert run.reload() == "loaded" and run.step() == 9
        assert run.ask(*served.TEXTS) == run.want[9]
        assert not held.done() and old() is not None
        are_held = False
        queue.notify()
        status, body = held.result()
        assert status == 200 and [each["text"] for each in body["results"]] == want_of_7
        is_over.set()
        for each in asking:
            for index, text, begun, ended in each.result():
                # A request that began and ended beside one model is that one's.
                may_be = {run.want[step][index] for step in {begun, ended}}
                assert text in may_be
                number_old += text == run.want[5][index]
    assert number_old >= 3
    wait_until(lambda: old() is None and arrays() is None)  # its memory is free
    text = run.models.metrics.text().decode()
    assert 'switchx:num_requests_running{model_name="run"} 0.0' in text and 'step="9"' in text
    assert run.reload() == "unchanged" and run.step() == 9


def test_a_quantized_model_that_was_made_again(tmp_path):
    about = {"step": 3, "text_format": dataclasses.asdict(served.model().text_format)}

    def write(seed: int) -> None:
        params = init_params(served.CONFIG, jax.random.key(seed))
        config, params, *_ = quantize_experts(served.CONFIG, params, bits=8)
        write_artifact(tmp_path / "int8", config, params, about)

    write(1)
    folder = ModelFolder(tmp_path / "int8")
    first = folder.load()
    assert folder.load_other(first.fingerprint) is None
    shutil.rmtree(tmp_path / "int8")
    write(2)
    second = folder.load_other(first.fingerprint)
    assert second.fingerprint != first.fingerprint
    assert folder.load_other(second.fingerprint) is None


def flip_a_byte(path) -> None:
    """In the largest file, which holds arrays."""
    file = max((each for each in path.rglob("*") if each.is_file()), key=os.path.getsize)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut_a_file(path) -> None:
    file = max((each for each in path.rglob("*") if each.is_file()), key=os.path.getsize)
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_a_byte, "not loaded again, step 5 goes on"),
        slow(cut_a_file, "9, is not whole: its file"),
        slow(lambda path: (path / "manifest.json").unlink(), "it has no manifest.json"),
    ],
)
def test_a_damaged_checkpoint_changes_nothing(run, caplog, damage, message):
    run.add(damage)
    assert run.reload() == "failed" and run.step() == 5
    (error,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert "step 5 goes on" in error.getMessage() and message in caplog.text
    assert run.ask(*served.TEXTS) == run.want[5]
    assert not run.models._retired


@pytest.mark.slow
def test_a_folder_that_has_gone_or_is_another_model_s(run, caplog, monkeypatch):
    away = run.folder.with_name("away")
    run.folder.rename(away)
    try:
        assert run.reload() == "failed" and run.ask("gate") == run.want[5][:1]
    finally:
        away.rename(run.folder)
    assert f"{run.folder} is not a run folder" in caplog.text
    caplog.clear()
    run.add()

    def fail(worker):
        raise MemoryError("there is no memory for two, say")

    with monkeypatch.context() as patch:
        patch.setattr("switchx.serving.scheduler.Worker._warm_up", fail)
        assert run.reload() == "failed" and run.ask("gate") == run.want[5][:1]
    assert "step 5 goes on" in caplog.text and "no memory for two, say" in caplog.text
    caplog.clear()  # its tracebacks have the model that the reloader waits for to go
    assert run.reload() == "loaded" and run.ask("gate") == run.want[9][:1]


def test_a_server_that_stops_does_not_wait_for_a_reload(run, monkeypatch):
    run.add()
    begun, threads = threading.Event(), set(threading.enumerate())

    def compile_for_long(worker):
        begun.set()
        while not worker.queue.is_closed:
            time.sleep(0.01)

    monkeypatch.setattr("switchx.serving.scheduler.Worker._warm_up", compile_for_long)
    run.reloader.ask()
    assert begun.wait(60)
    run.reloader.close()
    run.reloader.join(30)
    assert run.step() == 5 and run.ask("gate") == run.want[5][:1]
    left = {each.name for each in set(threading.enumerate()) - threads}
    assert not run.reloader.is_alive() and not left & {"switchx-worker", "switchx-compiler"}


def test_sighup_asks_and_nothing_else_does(run):
    """Of a server in the main thread, where Python runs handlers."""
    asked, answers = [], []
    reloader = Reloader(run.models, {})
    reloader.ask = lambda: asked.append(run.step())
    before = signal.getsignal(signal.SIGHUP)
    with open_socket("127.0.0.1", 0) as listener:
        server = Server(run.models, reloader=reloader)

        def ask_and_stop():
            address = listener.getsockname()[:2]
            answers.append(served.post(address, {"inputs": "gate"})[0])
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGHUP)
                time.sleep(0.2)
            answers.append(served.post(address, {"inputs": "gate"})[0])
            server.should_exit = True

        thread = threading.Thread(target=ask_and_stop)
        thread.start()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run.models, "close", lambda: None)
            server.run_until_stopped(listener)
        thread.join()
    assert asked == [5, 5] and answers == [200, 200]
    assert signal.getsignal(signal.SIGHUP) is before
    reloader.join(10)
    assert not reloader.is_alive()
