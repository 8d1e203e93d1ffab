# SPDX-License-Identifier: Apache-2.0
"""`switchx bench soak` outlives bad clients, and its checks fail where something is wrong."""

import asyncio
import concurrent.futures
import functools
import json
import pathlib

import numpy as np
import pytest

from switchx.bench import soak, soak_clients
from switchx.bench.soak_clients import Tally
from switchx.cli.main import main
from switchx.client import Client
from tests.serving import served


def sample(second, maps=1000, files=30, latency_s=0.1):
    held = {"memory_mib": 500.0, "memory_maps": maps, "open_files": files}
    return held | {"second": second, "answers": int(second), "latencies_s": [latency_s] * 3}


def checks_of(samples, tally=None, exit_status=0) -> dict[str, bool]:
    report = soak._report(samples, tally or Tally(), exit_status)
    return {check.name: check.holds for check in report.checks}


def test_what_grows_or_dies_is_seen():
    even = [sample(second) for second in range(32)]
    assert all(checks_of(even).values()) and len(checks_of(even)) == 8
    # Of the first fifth nothing is asked: there programs are compiled.
    assert all(checks_of([sample(0.0, maps=9), *even[1:]]).values())
    for name, more in (
        ("maps_growth", {"maps": 1060}),
        ("latency_growth", {"latency_s": 0.16}),
    ):
        late = even[:-4] + [sample(second, **more) for second in range(28, 32)]
        failed = [check for check, holds in checks_of(late).items() if not holds]
        assert failed == [f"soak_{name}"]
    left = checks_of([*even[:-1], sample(31.0, files=31)])
    assert [name for name, holds in left.items() if not holds] == ["soak_open_files_left"]
    faults = checks_of([sample(0.0), sample(1.0)], Tally(wrong=1, lost=2, held=1), -11)
    assert len(faults) == 4 and not any(faults.values())


def test_the_server_asks_for_no_token(tmp_path, monkeypatch):
    """Also where one is exported: the clients send none."""
    script = 'echo "listening on http://1.2.3.4:5 ${SWITCHX_TOKEN-no token}"; exec sleep 60'
    monkeypatch.setattr(soak, "python_words", lambda: ["sh", "-c", script])
    monkeypatch.setenv("SWITCHX_TOKEN", "0123456789abcdef")
    with soak._server("", tmp_path / "log", lambda text: None):
        assert (tmp_path / "log").read_text().endswith("no token\n")


@pytest.mark.slow
def test_wrong_and_lost_answers_are_counted(address):
    """Of a model that says something else, and of a request that is refused."""
    tally = Tally()

    async def run():
        loop = asyncio.get_running_loop()
        expect = functools.partial(
            loop.run_in_executor, pool, lambda request: said[: len(request["inputs"])]
        )
        is_over = asyncio.Event()
        rng = np.random.default_rng(0)
        async with Client("http://{}:{}".format(*address)) as client:
            begun = soak_clients.good_client(client, rng, 384, expect, tally, is_over)
            asking = asyncio.create_task(begun)
            while not (tally.wrong and tally.lost):
                await asyncio.sleep(0.01)
            is_over.set()
            await asking

    # The server's limits are smaller than what is asked for.
    said = list(served.said().values())
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asyncio.run(run())
    assert tally.wrong <= tally.answers and len(tally.faults) >= 2


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc/self/maps").exists(), reason="needs /proc")
@pytest.mark.timeout(3600)
def test_a_minute(monkeypatch, capsys):
    monkeypatch.setattr(soak, "SAMPLES", 20)
    main(["bench", "soak", "--seconds=60", "--json"])
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    checks = {check["name"]: check["holds"] for check in printed["checks"]}
    # Its programs are still being compiled, so growth says nothing yet.
    faults = ("wrong_answers", "lost_answers", "held_connections", "exit_status")
    assert all(checks[f"soak_{name}"] for name in faults), printed
    done = {row["bad client"] for row in printed["results"] if "bad client" in row}
    assert done and done <= soak_clients.BAD.keys()
