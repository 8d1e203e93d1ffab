# SPDX-License-Identifier: Apache-2.0
"""`switchx bench soak`: a server process' resources and answers over a long time.

A `switchx serve` in its own process has good clients, each of whose answers is compared with
`model.generate`, and bad ones (soak_clients.py). Its memory, memory maps, open files and
latencies are sampled throughout. Growth compares the last tenth of the time with the tenth that
follows the first fifth, in which programs are compiled.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import math
import multiprocessing
import os
import pathlib
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from switchx.bench.soak_clients import (
    CLOSE_TIMEOUT_S,
    MOST_INPUT_TOKENS,
    MOST_NEW_TOKENS,
    Tally,
    bad_client,
    good_client,
)
from switchx.bench.train import MEBIBYTE
from switchx.models.config import ModelConfig, SwitchConfig
from switchx.models.params import init_params
from switchx.own_code import python_words
from switchx.results import Check, Report

GOOD_CLIENTS, BAD_CLIENTS = 4, 8
SAMPLES, ROWS = 120, 10
# The server's options: one bucket of lengths, so that all its programs are kept at the same
# time and growth is not due to them; deadlines that are often met.
OPTIONS = (
    "--port=0",
    "--batch_size=4",
    f"--max_input_tokens={MOST_INPUT_TOKENS + 1}",
    f"--max_new_tokens={MOST_NEW_TOKENS}",
    "--max_beam_size=2",
    "--warm_up_tokens=16",
    "--request_timeout_s=900",
    "--body_timeout_s=5",
    "--send_timeout_s=5",
)
# The model where none is given: random weights, with logits that are far apart.
MODEL = ModelConfig(
    "encoder_decoder", 384, 32, 64, 2, 16, 2, 2, switch=SwitchConfig(4, every=1), init_scale=4.0
)
START_S, STOP_S = 900.0, 120.0


def run(seconds: float, model_dir: str | None, note: Callable[[str], None]) -> Report:
    """Runs a soak test of a server.

    Args:
        seconds: seconds for which the clients send requests.
        model_dir: run folder of a model with a vocabulary; None makes a small model with random
            weights.

    Raises:
        ValueError: the system does not report a process' resources, or an extra is missing.
    """
    if not pathlib.Path("/proc/self/maps").exists():
        raise ValueError("bench soak reads /proc, which this system does not have; use Linux")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        if model_dir is None:
            model_dir = str(folder / "model")
            _write_model(pathlib.Path(model_dir))
        with _server(model_dir, folder / "log.txt", note) as (process, address):
            samples, tally = asyncio.run(_soak(seconds, model_dir, process, address, note))
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
        log = (folder / "log.txt").read_text()
    for fault in tally.faults:
        note(fault)
    if process.returncode:
        note(f"the server ended with {process.returncode}; its log ends so: {log[-2000:]}")
    return _report(samples, tally, process.returncode)


def _write_model(folder: pathlib.Path) -> None:
    from switchx.checkpoint.run_folder import RunFolder, write_converted
    from switchx.data.tokenizers import ByteVocabulary

    folder.mkdir()
    params = init_params(MODEL, jax.random.key(0))
    write_converted(RunFolder(folder), MODEL, params, ByteVocabulary(), "random weights")


@contextlib.contextmanager
def _server(model_dir: str, log: pathlib.Path, note) -> Iterator[tuple]:
    """A server's process, host and port; the process has ended when the context is left."""
    command = [*python_words(), "-m", "switchx", "serve", f"--model_dir={model_dir}", *OPTIONS]
    # The clients send no token.
    env = {name: value for name, value in os.environ.items() if name != "SWITCHX_TOKEN"}
    with open(log, "wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=env)
    try:
        end_s = time.monotonic() + START_S
        pattern = r"listening on http://([\d.]+):(\d+)"
        while not (found := re.search(pattern, log.read_text())):
            if process.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError(f"the server did not start: {log.read_text()[-2000:]}")
            time.sleep(0.2)
        note(f"the server is process {process.pid}, at {found[1]}:{found[2]}")
        yield process, (found[1], int(found[2]))
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


async def _soak(seconds: float, model_dir: str, process, address, note):
    """Samples of the process' resources, the last without clients, and the clients' tally."""
    from switchx.client import Client

    tally, is_over = Tally(), asyncio.Event()
    # Spawned, as a fork of a process that runs JAX may hang.
    pool = concurrent.futures.ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), _load, (model_dir,)
    )
    with pool:
        loop = asyncio.get_running_loop()
        expect = functools.partial(loop.run_in_executor, pool, _generate)
        vocab_size = await loop.run_in_executor(pool, _vocab_size)
        async with Client("http://{}:{}".format(*address)) as client:
            await client.wait_until_ready(deadline_s=START_S)
            samples = [held_by(process.pid) | {"second": 0.0, "answers": 0}]
            note("the server is ready; the clients begin")
            good = [
                good_client(client, rng, vocab_size, expect, tally, is_over)
                for rng in map(np.random.default_rng, range(GOOD_CLIENTS))
            ]
            bad = [
                bad_client(address, rng, vocab_size, tally)
                for rng in map(np.random.default_rng, range(1000, 1000 + BAD_CLIENTS))
            ]
            good, bad = (list(map(asyncio.create_task, each)) for each in (good, bad))
            start_s = time.monotonic()
            for number in range(1, SAMPLES + 1):
                await asyncio.sleep(start_s + seconds * number / SAMPLES - time.monotonic())
                if process.poll() is not None:
                    break
                now_s = time.monotonic()
                sample = held_by(process.pid) | {"second": now_s - start_s}
                samples.append(sample | {"answers": tally.answers})
                if not number % (SAMPLES // ROWS):
                    note(f"{sample['second']:.0f} s: {tally.answers} answers, {sample}")
            is_over.set()
            for each in bad:
                each.cancel()
            await asyncio.gather(*bad, return_exceptions=True)
            if process.poll() is None:
                await asyncio.gather(*good)
            for each in good:
                each.cancel()
            await asyncio.gather(*good, return_exceptions=True)
        if process.poll() is None:
            # Idle connections end within seconds.
            await asyncio.sleep(min(30.0, CLOSE_TIMEOUT_S))
            left = held_by(process.pid) | {"second": time.monotonic() - start_s}
            samples.append(left | {"answers": tally.answers})
    for sample, after in zip(samples, samples[1:], strict=False):
        span = start_s + sample["second"], start_s + after["second"]
        after["latencies_s"] = [s for at_s, s in tally.latencies_s if span[0] < at_s <= span[1]]
    return samples, tally


def held_by(pid: int) -> dict[str, Any]:
    """The current resources of a process: resident memory, memory maps, open files."""
    folder = pathlib.Path("/proc") / str(pid)
    pages = int((folder / "statm").read_text().split()[1])
    return {
        "memory_mib": pages * os.sysconf("SC_PAGE_SIZE") / MEBIBYTE,
        "memory_maps": (folder / "maps").read_bytes().count(b"\n"),
        "open_files": len(list((folder / "fd").iterdir())),
    }


# In the process that computes the model's own answers.
_model = None


def _load(model_dir: str) -> None:
    global _model
    from switchx import api

    _model = api.load(model_dir)


def _vocab_size() -> int:
    return min(_model.vocabulary.size, _model.config.vocab_size)


def _generate(request: dict[str, Any]) -> list:
    return _model.generate(**request, with_scores=True)


def _report(samples: list[dict[str, Any]], tally: Tally, exit_status: int | None) -> Report:
    first, *during = samples
    last, during = (during[-1], during[:-1]) if during else (first, [])
    tenth = max(1, len(during) // 10)
    settled, final = during[2 * tenth : 3 * tenth], during[-tenth:]
    names = ("memory_mib", "memory_maps", "open_files")
    rows = []

    def median(part: list[dict[str, Any]], name: str) -> float:
        values = np.concatenate([np.ravel(each[name]) for each in part])
        return float(np.median(values)) if values.size else math.nan

    def growth(name: str) -> float:
        return median(final, name) / median(settled, name)

    for place in range(0, len(during), tenth):
        part = during[place : place + tenth]
        row = {"until_s": part[-1]["second"], "answers": part[-1]["answers"]}
        row |= {name: median(part, name) for name in names}
        if latencies_s := sum((each["latencies_s"] for each in part), []):
            p50_s, p99_s = np.percentile(latencies_s, (50, 99))
            row |= {"p50_ms": 1e3 * float(p50_s), "p99_ms": 1e3 * float(p99_s)}
        rows.append(row)
    rows.append({"clients": "before them", **{name: first[name] for name in names}})
    rows.append({"clients": "after them", **{name: last[name] for name in names}})
    rows += [{"bad client": name, "times": number} for name, number in tally.bad.items()]

    checks = [
        Check("soak_wrong_answers", float(tally.wrong), "==0"),
        Check("soak_lost_answers", float(tally.lost), "==0"),
        Check("soak_held_connections", float(tally.held), "==0"),
        Check("soak_exit_status", float(-1 if exit_status is None else exit_status), "==0"),
    ]
    if settled:
        checks += [
            Check("soak_memory_growth", growth("memory_mib"), "<=1.05"),
            Check("soak_maps_growth", growth("memory_maps"), "<=1.05"),
            Check("soak_open_files_left", last["open_files"] - first["open_files"], "<=0"),
            Check("soak_latency_growth", growth("latencies_s"), "<=1.5"),
        ]
    return Report("bench soak", rows, checks)
