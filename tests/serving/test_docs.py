# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/serving.md run, in their order; servers in threads beside them."""

import logging
import re
import shutil
import subprocess
import sys
import threading
import time

import pytest

from switchx.cli.main import main
from switchx.serving import completions, server
from switchx.serving.metrics import Metrics
from switchx.serving.requests import FIELDS
from tests.processes import ROOT
from tests.serving import served
from tests.training.saved_runs import SPANS, save_run

PAGE = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines()]
EIGHT_DEVICES = "XLA_FLAGS=--xla_force_host_platform_device_count=8 "
# A free port for each of the page's; small programs.
BRIEF = ("--port=0", "--max_new_tokens=16", "--warm_up_tokens=0")


@pytest.fixture
def serve(monkeypatch, in_a_folder, capsys):
    """`serve("switchx serve ...")` in a thread, until the test ends: its port."""
    servers, threads = [], []
    root = logging.getLogger()
    levels = {name: logging.getLogger(name).level for name in ("switchx", "switchx.access")}
    handlers = root.handlers[:]

    class Recorded(server.Server):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            servers.append(self)

    def serve(command: str) -> str:
        words = [*command.split()[1:], *BRIEF]
        threads.append(threading.Thread(target=main, args=(words,)))
        threads[-1].start()
        said, end_s = "", time.monotonic() + 120
        while not (found := re.search(r"listening on http://[\d.]+:(\d+)(?s:.*)  ready", said)):
            assert threads[-1].is_alive() and time.monotonic() < end_s, said
            said += capsys.readouterr().err
            time.sleep(0.05)
        return found[1]

    monkeypatch.setattr(server, "Server", Recorded)
    yield serve
    for each in servers:
        each.drain()
    for thread in threads:
        thread.join(30)
    # Commands in threads end in any order, and each brings back what was shown before it.
    root.handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.mark.skipif(not shutil.which("curl"), reason="needs curl")
def test_commands_run(serve, tmp_path):
    save_run(tmp_path / "runs/tiny", served.CONFIG, source=SPANS)
    port = ""
    for command in COMMANDS:
        command = command.removeprefix(EIGHT_DEVICES)  # tests have them
        # test_soak.py runs the other command.
        if command.startswith(("pip", "switchx bench soak")):
            continue
        if command.startswith("switchx"):
            port = serve(command)
            continue
        command = re.sub(r"127.0.0.1:\d+", f"127.0.0.1:{port}", command)
        command = command.replace("curl", "curl --silent --show-error --fail-with-body", 1)
        result = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert result.returncode == 0, (command, result.stdout, result.stderr)
        assert result.stdout or ">" in command


def test_fields_metrics_and_options_are_those_of_the_code():
    fields = (*FIELDS, *completions.FIELDS)
    assert [name for name in fields if f"`{name}`" not in PAGE] == []
    metrics = set(re.findall(r"^# TYPE switchx:(\S+)", Metrics().text().decode(), re.M))
    metrics = {name for name in metrics if not name.endswith("_created")}
    assert [name for name in metrics if f"`{name}`" not in PAGE] == []
    help_text = subprocess.run(
        [sys.executable, "-m", "switchx", "serve", "--help"], capture_output=True, text=True
    ).stdout
    # Of others: curl, XLA, docker, bench soak.
    others = {"--json", "--no", "--oauth2", "--build", "--seconds"}
    others.add("--xla_force_host_platform_device_count")
    options = set(re.findall(r"--\w+", PAGE)) - others
    assert [option for option in options if option not in help_text] == []
