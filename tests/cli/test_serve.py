# SPDX-License-Identifier: Apache-2.0
"""`switchx serve`: a process of its own from its start to a SIGTERM, and wrong options."""

import concurrent.futures
import http.client
import json
import logging
import operator
import re
import signal
import threading
import time

import pytest

import switchx
from switchx.cli import serve
from switchx.cli.main import main
from switchx.serving.models import READER
from tests.data.refusals import refused
from tests.serving import served
from tests.training.saved_runs import SPANS, save_run

TOKEN = "0123456789abcdef"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("run"), served.CONFIG, source=SPANS)


def line_of(process, pattern: str, seconds: float = 120) -> re.Match:
    """Waits for a line that a process writes."""
    end_s = time.monotonic() + seconds
    while not (found := re.search(pattern, process.log.read_text())):
        assert process.poll() is None and time.monotonic() < end_s, process.log.read_text()
        time.sleep(0.05)
    return found


def get(address, path: str):
    connection = http.client.HTTPConnection(*address, timeout=30)
    connection.request("GET", path)
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def test_a_process_serves_drains_and_ends_well(folder, start_cli, tmp_path):
    """The answer that is being computed at SIGTERM is given; a new request is refused."""
    log = tmp_path / "access.jsonl"
    process = start_cli(
        "serve", f"--model_dir={folder}", "--port=0", "--warm_up_tokens=0", "--max_beam_size=2",
        "--drain_timeout_s=200", "--request_timeout_s=200", f"--access_log={log}",
        env={serve.TOKEN_VARIABLE: TOKEN},
    )  # fmt: skip
    address = ("127.0.0.1", int(line_of(process, r"listening on http://127.0.0.1:(\d+)")[1]))
    line_of(process, r"  ready")
    status, state = get(address, "/healthz")
    assert status == 200
    assert state == {
        "alive": True, "ready": True, "draining": False,
        "models": {folder.name: {"compiled": {}, "planned": 0}},
    }  # fmt: skip
    assert served.post(address, {"inputs": "gate"})[0] == 401
    headers = {"Authorization": f"Bearer {TOKEN}"}
    process.send_signal(signal.SIGHUP)
    line_of(process, f"{folder.name}: step 9 is the newest; it goes on")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        # They wait for their program, which takes a while to compile.
        request = {"inputs": ["gate", "of"], "beam_size": 2, "max_new_tokens": 4}
        asking = pool.submit(served.post, address, request, headers=headers)
        waiting = f'num_requests_waiting{{model_name="{folder.name}"}} 2.0'.encode()
        while waiting not in metrics_of(address, headers):
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        line_of(process, r"stopping: 1 requests are still answered")
        status, body = served.post(address, request, headers=headers)
        assert status == 503 and "is stopping" in body["error"]["message"]
        state = get(address, "/healthz")[1]
        assert state["alive"] and state["draining"] and not state["ready"]
        status, body = asking.result()
    assert process.wait(30) == 0
    want = switchx.load(folder).generate(["gate", "of"], beam_size=2, max_length=4)
    assert status == 200 and [each["text"] for each in body["results"]] == want
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    asked = [line["status"] for line in lines if line["path"] == "/v1/generate"]
    assert asked == [401, 503, 200]


@pytest.mark.slow
def test_it_can_be_stopped_while_it_compiles(folder, start_cli):
    process = start_cli("serve", f"--model_dir={folder}", "--port=0", "--warm_up_tokens=512")
    address = ("127.0.0.1", int(line_of(process, r"listening on http://127.0.0.1:(\d+)")[1]))
    assert not get(address, "/healthz")[1]["ready"]
    status, body = served.post(address, {"inputs": "gate"})
    assert status == 503 and "still compiling" in body["error"]["message"]
    started_s = time.monotonic()
    process.send_signal(signal.SIGTERM)  # no request is open: its drain ends at once
    assert process.wait(60) == 0, process.log.read_text()
    assert time.monotonic() - started_s < 3


def test_a_compiler_that_takes_long_is_not_waited_for(monkeypatch):
    """A thread, or a pool in which prompts are scored: the interpreter would wait for both."""
    assert 1.0 + serve.STOPPING_S < 3.0  # with uvicorn's own second
    monkeypatch.setattr(serve, "STOPPING_S", 0.01)
    exits, is_over = [], threading.Event()
    monkeypatch.setattr(serve.os, "_exit", exits.append)
    worker = threading.Thread(target=is_over.wait)
    worker.start()
    serve._leave([worker], 0)
    assert exits == [0]
    is_over.set()
    worker.join()
    assert serve._leave([worker], 1) == 1 and exits == [0]
    is_over.clear()
    pool = concurrent.futures.ThreadPoolExecutor(1, READER)
    pool.submit(is_over.wait)
    assert serve._leave([], 1) == 1 and exits == [0, 1]
    is_over.set()
    pool.shutdown()


def metrics_of(address, headers) -> bytes:
    connection = http.client.HTTPConnection(*address, timeout=30)
    connection.request("GET", "/metrics", headers=headers)
    return connection.getresponse().read()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port=70000"], "--port=70000; use 0 to 65535"),
        (["--batch_size=0"], "Limits.batch_size=0; use 1 to 1024"),
        (["--token_file=nothing.txt"], "--token_file=nothing.txt cannot be read: "),
        (["--access_log=no/folder/log"], "--access_log=no/folder/log cannot be written: "),
        (["--model_dir=nothing"], "nothing is not a run folder"),
        (["--served_model_name=a/b"], "'a/b' is no name of a model; use letters, digits and"),
        (["--model=a=x"], "--model: not allowed with argument --model_dir"),
        (["--host="], "argument --host: it is empty; is a shell variable not set?"),
        (["--allowed_hosts=::1,a.b:80"], "'a.b:80' is no name of a host; leave out scheme and"),
        (["--allowed_hosts=http://a.b"], "'http://a.b' is no name of a host; leave out scheme"),
        (["--mesh=expert=3"], "mesh data=2 x expert=3 needs 6 devices, but there are 8 (cpu)"),
        (["--mesh=pipe=2"], "'pipe=2' is no axis of a mesh"),
        (["--mesh=model=2", "--expert_slots=1"], "expert_slots or ring_slots with a mesh"),
    ],
)
def test_wrong_options_are_refused(folder, in_a_folder, cli, options, message):
    assert message in cli.refused("serve", f"--model_dir={folder}", *options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "one of the arguments --model_dir --model is required"),
        (["--model=runs"], "'runs' is no model; write NAME=DIR, as small=runs/small"),
        (["--model=a="], "'a=' is no model; write NAME=DIR"),
        (["--model=a b=x"], "'a b' is no name of a model"),
        (["--model=a/b=x"], "'a/b' is no name of a model"),
        (["--model==x"], "'' is no name of a model"),
        (
            ["--model=a=x", "--model=b=x", "--model=a=y"],
            "which several are called a; give each",
        ),
        (["--model=a=x", "--served_model_name=b"], "--served_model_name=b is for --model_dir"),
        (["--model=a=nothing"], "nothing is not a run folder"),
    ],
)
def test_wrong_models_are_refused(in_a_folder, cli, options, message):
    assert message in cli.refused("serve", *options)


def test_without_the_extra_it_says_what_to_install(folder, capsys, monkeypatch):
    monkeypatch.setattr(serve, "EXTRA", ("starlette", "not_there"))
    assert main(["serve", f"--model_dir={folder}"]) == 2
    error = "switchx serve: error: needs not_there: pip install 'switchx[serve]'\n"
    assert capsys.readouterr().err.endswith(error)


def test_tokens_come_from_a_file_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv(serve.TOKEN_VARIABLE, raising=False)
    assert serve.read_token(None) is None
    monkeypatch.setenv(serve.TOKEN_VARIABLE, TOKEN)
    assert serve.read_token(None) == TOKEN
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}{TOKEN}\nmore\n")
    assert serve.read_token(str(file)) == TOKEN * 2
    file.write_text("short\n")
    with refused(f"--token_file={file} holds a token of 5 characters"):
        serve.read_token(str(file))
    monkeypatch.setenv(serve.TOKEN_VARIABLE, "")
    with refused("SWITCHX_TOKEN holds a token of 0 characters"):
        serve.read_token(None)


def test_requests_are_written_down_where_it_is_asked_for(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="switchx")  # as of a command
    log, file = logging.getLogger("switchx.access"), tmp_path / "log"
    with serve.access_log(None):
        assert not log.isEnabledFor(logging.INFO)
    with serve.access_log(str(file)):
        log.info("a line")
    assert file.read_text() == "a line\n" and not caplog.records
    assert log.isEnabledFor(logging.INFO) and log.propagate


def test_other_machines_without_a_token_are_warned_of(folder, cli, monkeypatch):
    from switchx.serving import server

    hosts = []  # of each server, or None for any
    app = operator.attrgetter("config.app._hosts")
    monkeypatch.setattr(server.Server, "run", lambda self, sockets: hosts.append(app(self)))
    monkeypatch.delenv(serve.TOKEN_VARIABLE, raising=False)
    options = [f"--model_dir={folder}", "--port=0", "--warm_up_tokens=0"]
    warning = "can be reached from other machines, and no token is asked for"
    assert warning in " ".join(cli("serve", *options, "--host=0.0.0.0").err.split())
    assert warning not in " ".join(cli("serve", *options).err.split())
    cli("serve", *options, "--host=0.0.0.0", "--allowed_hosts=Gpu.example, ,fd00::1")
    assert hosts == [None, [], ["gpu.example", "fd00::1"]]
