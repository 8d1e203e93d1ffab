# SPDX-License-Identifier: Apache-2.0
"""The in-flight part of `switchx bench decode`: inputs that join a running batch one by one,
against batches that run to their end before the next begins.

Both schedule the same inputs, in turns, in one process, over the same programs: the baseline is
the server's own worker, with `candidates` that are empty as long as anything is decoded, and
otherwise of the oldest input's shape (lengths rounded up to the same buckets).
Inputs arrive as a Poisson process ("iteration-level scheduling", Yu et al., Orca, OSDI 2022,
section 6). No HTTP is involved.
"""

import dataclasses
import queue
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from switchx.inference.config import DecodingConfig
from switchx.inference.program_cache import COMPILATIONS
from switchx.results import Check

REQUESTS, SLOTS = 96, 16
INPUTS = 4, 30  # tokens of an input
# Arrivals per second, over the in-flight worker's answers where all inputs wait at once.
LOAD = 0.9
# Most rounds before the measured ones: what they compile differs a little each time.
WARM_UPS = 20
WAIT_S = 300.0  # for one answer, including compilation of its programs


@dataclasses.dataclass(frozen=True)
class Mix:
    """A mix of answers' lengths in a round.

    Attributes:
        name: name of the mix, in its rows.
        lengths: function that draws the lengths of a number of answers, in tokens.
        longest: largest of these lengths.
        checks: name and bound of each ratio to the baseline, by measured quantity.
    """

    name: str
    lengths: Callable[[np.random.Generator, int], np.ndarray]
    longest: int
    checks: dict[str, tuple[str, str]]


MIXES = (
    Mix(
        "answers of 8 to 256 tokens",
        lambda rng, n: np.exp(rng.uniform(np.log(8), np.log(256), n)),
        256,
        {
            "tokens_per_s": ("inflight_throughput", ">=1.25"),
            "first_token_s": ("inflight_first_token", "<=0.2"),
        },
    ),
    Mix(
        "answers of 13 tokens",
        lambda rng, n: rng.lognormal(np.log(12), 0.4, n),  # like those of captions
        32,
        {"tokens_per_s": ("inflight_short_throughput", ">=1.0")},
    ),
)


# Measurements of a worker with all inputs of a mix: tokens per second, medians counted from an
# input's arrival, and the token lists, in the order of the inputs.
Round = dict[str, Any]


def inflight(config, params, rounds: int) -> tuple[list[dict[str, Any]], list[Check]]:
    """Measures both policies on each mix of lengths; needs the extra `serve`.

    Args:
        config, params: the model as it was trained.
    """
    # Imported here: the rest of `bench decode` does without the extra.
    from switchx.api import Model
    from switchx.data.tasks import TextFormat

    model = Model(config, params, None, 0, TextFormat(True, False, True), "")
    rows = []
    checks = []
    are_same = True
    for mix in MIXES:
        found, measured, is_same = _compare(model, mix, rounds)
        rows = rows + found
        checks = checks + measured
        are_same = are_same and is_same
    return rows, [*checks, Check("inflight_tokens_identical", float(are_same), "==1")]


def _compare(model, mix: Mix, rounds: int):
    """Rows and checks of a mix, and whether each answer was the same every time."""
    from switchx.serving.limits import Limits

    limits = Limits(
        batch_size=SLOTS,
        max_input_tokens=32,
        max_new_tokens=mix.longest,
        warm_up_tokens=32,
        max_waiting=max(REQUESTS, 64),
    )
    rng = np.random.default_rng(0)
    sizes = np.clip(np.rint(mix.lengths(rng, REQUESTS)), 1, mix.longest).astype(int).tolist()
    prompts = [
        rng.integers(3, model.config.vocab_size, rng.integers(*INPUTS)).tolist()
        for _ in range(REQUESTS)
    ]
    # Arrivals at a rate of one per second; a round divides them by its rate.
    arrivals = np.cumsum(rng.exponential(1.0, REQUESTS))
    workers = _workers(model, limits)
    try:
        crowd = settled(
            lambda: _round(workers["in flight"], limits, prompts, sizes, 0 * arrivals)
        )
        per_s = LOAD * REQUESTS * crowd["tokens_per_s"] / sum(map(len, crowd["answers"]))
        for worker in workers.values():
            settled(lambda each=worker: _round(each, limits, prompts, sizes, arrivals / per_s))
        done = {name: [] for name in workers}
        compiled = COMPILATIONS.number
        for number in range(rounds):
            for name in list(workers)[:: 1 if number % 2 else -1]:
                measured = _round(workers[name], limits, prompts, sizes, arrivals / per_s)
                done[name].append(measured)
        compiled = COMPILATIONS.number - compiled
    finally:
        for worker in workers.values():
            worker.queue.close()
            worker.compiler.close()
            worker.join()
    return _found(mix, done, per_s, compiled)


def _workers(model, limits) -> dict[str, Any]:
    """Both policies' workers, ready to use."""
    from switchx.serving.metrics import Metrics
    from switchx.serving.scheduler import Worker

    class BatchByBatch(Worker):
        def candidates(self):
            return batch_by_batch(self.running, super().candidates())

    workers = {"in flight": Worker, "batch by batch": BatchByBatch}
    workers = {name: kind(model, limits, Metrics().of(name)) for name, kind in workers.items()}
    for worker in workers.values():
        worker.start()
        worker.compiler.start()
        while not worker.is_ready:
            if worker.error is not None:
                raise RuntimeError("the worker ended") from worker.error
            time.sleep(0.05)
    return workers


def batch_by_batch(running: list, waiting: list) -> list:
    """The baseline's candidates: while nothing is decoded, those of the oldest's shape."""
    return [] if running else [each for each in waiting if each.shape == waiting[0].shape]


def settled(measure: Callable[[], Any]) -> Any:
    """The result of the first round that compiles nothing, or of the last of `WARM_UPS`."""
    for _ in range(WARM_UPS):
        compiled, measured = COMPILATIONS.number, measure()
        if COMPILATIONS.number == compiled:
            break
    return measured


def _round(worker, limits, prompts, sizes, arrivals_s) -> Round:
    """Queues the inputs for a worker as they arrive, and waits for all answers."""
    from switchx.serving.request_queue import Answer, Failure, ProgramShape, QueuedInput

    events: queue.SimpleQueue = queue.SimpleQueue()
    first_s = {}
    answered_s = {}
    answers = {}
    start_s = time.monotonic()
    for number, (prompt, size, at_s) in enumerate(zip(prompts, sizes, arrivals_s, strict=True)):
        settings = DecodingConfig(size)
        shape = ProgramShape.of(prompt, settings, limits)

        def deliver(event, number=number) -> None:
            events.put((number, event, time.monotonic()))

        time.sleep(max(0.0, start_s + at_s - time.monotonic()))
        each = QueuedInput(prompt, settings, 0, shape, deliver, is_streaming=True)
        if not worker.queue.put([each]):
            raise RuntimeError("the queue is closed: the worker ended") from worker.error
    while len(answers) < len(prompts):
        number, event, now_s = events.get(timeout=WAIT_S)
        if isinstance(event, Failure):
            raise RuntimeError("a batch failed; the log says how")
        if isinstance(event, Answer):
            answered_s[number], answers[number] = now_s, event.hypothesis.tokens
        if isinstance(event, Answer) or event.tokens:
            first_s.setdefault(number, now_s)
    num_tokens = sum(map(len, answers.values()))
    last_s = max(answered_s.values())

    def median_s(moments_s) -> float:
        waited = [moments_s[i] - start_s - at_s for i, at_s in enumerate(arrivals_s)]
        return float(np.median(waited))

    return {
        "tokens_per_s": num_tokens / (last_s - start_s),
        "first_token_s": median_s(first_s),
        "answer_s": median_s(answered_s),
        "answers": [answers[number] for number in range(len(prompts))],
    }


def _found(mix: Mix, done: dict[str, list[Round]], per_s: float, compiled: int):
    ours, baseline = done["in flight"], done["batch by batch"]
    names = ("tokens_per_s", "first_token_s", "answer_s")

    def ratio(name: str) -> float:
        pairs = zip(ours, baseline, strict=True)
        return statistics.median(a[name] / b[name] for a, b in pairs)

    rows = []
    for policy, rounds in done.items():
        row = {"scheduling": f"{mix.name}, {policy}", "arrivals_per_s": per_s}
        for name in names:
            row[name] = statistics.median(each[name] for each in rounds)
            row[f"{name}_vs_baseline"] = ratio(name) if rounds is ours else 1.0
        rows.append(row)
    rows[0]["compilations"] = compiled
    checks = [Check(name, ratio(pair), bound) for pair, (name, bound) in mix.checks.items()]
    first, *others = ours + baseline
    return rows, checks, all(each["answers"] == first["answers"] for each in others)
