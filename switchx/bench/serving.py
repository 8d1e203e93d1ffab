# SPDX-License-Identifier: Apache-2.0
"""The serving part of `switchx bench decode`: a server's requests per second and latencies.

Clients and server share the process and its cores. Each client sends its next request, over a
connection that it keeps, when it has a whole answer, whose latency is measured. Every answer is
compared with the model's own. The baseline is `model.generate` for the same inputs, in batches
as large as there are clients, up to `BATCH_SIZE`. All is compiled before the first round.
"""

import concurrent.futures
import dataclasses
import http.client
import importlib.util
import json
import statistics
import threading
import time
from typing import Any

import numpy as np

from switchx.bench.continuous_batching import settled
from switchx.inference.program_cache import COMPILATIONS
from switchx.results import Check

CONCURRENCY = (1, 8, 32)
REQUESTS = 96  # at each concurrency, per round
NEW_TOKENS = 32
BATCH_SIZE = 16
EXTRA = ("starlette", "uvicorn", "prometheus_client")


def is_available() -> bool:
    """Whether the extra `serve` is installed."""
    return all(importlib.util.find_spec(name) for name in EXTRA)


@dataclasses.dataclass
class Tally:
    """The measurements at one concurrency.

    Attributes:
        latencies_s: latencies of the answers in seconds, right or wrong.
        wrong, lost: number of answers that are not the model's, and of requests without an
            answer.
        walls_s, baselines_s: seconds of each round with the server, and without.
    """

    latencies_s: list[float] = dataclasses.field(default_factory=list)
    wrong: int = 0
    lost: int = 0
    walls_s: list[float] = dataclasses.field(default_factory=list)
    baselines_s: list[float] = dataclasses.field(default_factory=list)


def serving(
    config, params, inputs: list[list[int]], rounds: int
) -> tuple[list[dict[str, Any]], list[Check]]:
    """Measures rows by concurrency, and counts wrong and lost answers.

    Args:
        config, params: the model as it was trained.
        inputs: token ids; each request has one of these inputs.
    """
    # Imported here: the rest of `bench decode` does without the extra.
    from switchx.api import Model
    from switchx.data.tasks import TextFormat
    from switchx.serving.limits import Limits
    from switchx.serving.models import Models
    from switchx.serving.server import Server, open_socket
    from switchx.serving.service import Service

    model = Model(config, params, None, 0, TextFormat(True, False, True), "")
    length = max(map(len, inputs))
    limits = Limits(
        batch_size=BATCH_SIZE,
        max_input_tokens=max(length, 16),
        max_new_tokens=NEW_TOKENS,
        warm_up_tokens=max(length, 16),
    )
    wanted = model.generate(inputs, max_length=NEW_TOKENS, batch_size=BATCH_SIZE)
    for number in CONCURRENCY:  # compiles
        _generate(model, inputs, number)
    service = Service(model, limits)
    with open_socket("127.0.0.1", 0) as listener:
        server = Server(Models([service]))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        while not service.worker.is_warm:
            if service.worker.error is not None:
                raise RuntimeError("the server's worker ended") from service.worker.error
            time.sleep(0.1)
        tallies = {number: Tally() for number in CONCURRENCY}
        untimed = Tally()
        address = listener.getsockname()[:2]
        for number in CONCURRENCY:
            settled(lambda number=number: _ask(address, inputs, wanted, number, untimed))
        compiled = COMPILATIONS.number
        for _ in range(rounds):
            for number, tally in tallies.items():
                _ask(address, inputs, wanted, number, tally)
                tally.baselines_s.append(_generate(model, inputs, number))
        compiled = COMPILATIONS.number - compiled
        server.should_exit = True
        thread.join()
    service.close()
    faults = sum(tally.wrong + tally.lost for tally in (untimed, *tallies.values()))
    rows = [_row(number, tally) for number, tally in tallies.items()]
    rows[0]["compilations"] = compiled
    return rows, [Check("serve_wrong_answers", float(faults), "==0")]


def _generate(model, inputs, concurrency: int) -> float:
    """Seconds that `REQUESTS` inputs take without a server."""
    start_s = time.perf_counter()
    every = [inputs[number % len(inputs)] for number in range(REQUESTS)]
    batch_size = min(concurrency, BATCH_SIZE)
    model.generate(every, max_length=NEW_TOKENS, batch_size=batch_size)
    return time.perf_counter() - start_s


def _ask(address, inputs, wanted, concurrency: int, tally: Tally) -> None:
    """Sends `REQUESTS` requests, `concurrency` of them at a time."""
    numbers, lock = iter(range(REQUESTS)), threading.Lock()

    def client() -> None:
        connection = http.client.HTTPConnection(*address, timeout=120)
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                connection.close()
                return
            body = {"inputs": [inputs[number % len(inputs)]], "max_new_tokens": NEW_TOKENS}
            start_s = time.perf_counter()
            try:
                headers = {"Content-Type": "application/json"}
                connection.request("POST", "/v1/generate", json.dumps(body), headers)
                response = connection.getresponse()
                tokens = json.loads(response.read())["results"][0]["tokens"]
            except (OSError, http.client.HTTPException, ValueError, KeyError):
                connection.close()
                with lock:
                    tally.lost += 1
                continue
            with lock:
                tally.latencies_s.append(time.perf_counter() - start_s)
                tally.wrong += tokens != wanted[number % len(inputs)]

    start_s = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(concurrency) as pool:
        for each in [pool.submit(client) for _ in range(concurrency)]:
            each.result()
    tally.walls_s.append(time.perf_counter() - start_s)


def _row(concurrency: int, tally: Tally) -> dict[str, Any]:
    latencies_s = tally.latencies_s or [float("nan")]
    p50_s, p99_s = np.percentile(latencies_s, (50, 99))
    answers = len(tally.latencies_s) / len(tally.walls_s)  # of a round
    ratios = [b / a for a, b in zip(tally.walls_s, tally.baselines_s, strict=True)]
    return {
        "decoding": f"serving, concurrency {concurrency}",
        "requests": len(tally.latencies_s) + tally.lost,
        "requests_per_s": answers / statistics.median(tally.walls_s),
        "vs_baseline": statistics.median(ratios),
        "p50_ms": 1e3 * float(p50_s),
        "p99_ms": 1e3 * float(p99_s),
        "wrong_answers": tally.wrong,
        "lost_answers": tally.lost,
    }
