# SPDX-License-Identifier: Apache-2.0
"""What a server counts, for Prometheus: vLLM's names if it has them, after `switchx:`.

As in vLLM, a request is one input: a call with three inputs counts as three. The process's
memory, time, files and garbage collections are under Prometheus's own names, `process_...`.
"""

import time
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

from switchx.inference.program_cache import COMPILATIONS, PROGRAMS
from switchx.serving.versions import versions

# Seconds; vLLM's, thinned.
FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20,
    40, 80,
)  # fmt: skip
INTER_TOKEN = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5,
)  # fmt: skip
LATENCY = (0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120)
BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# vLLM's label of what belongs to one model.
MODEL = ("model_name",)
REASONS, OUTCOMES = ("stop", "length"), ("loaded", "unchanged", "failed")


class Metrics:
    """Counters of one server, in a registry of its own.

    Attributes:
        responses: counter of the server's HTTP responses, by status. The other families are
            per model; `of` returns those of one model.
        built: names and steps of the models that take requests, for `build_info`.
    """

    def __init__(self):
        self._registry = CollectorRegistry()
        self._models: dict[str, ModelMetrics] = {}
        self.built: Callable[[], Iterable[tuple[str, int]]] = tuple

        def gauge(name, text):
            return Gauge(f"switchx:{name}", text, MODEL, registry=self._registry)

        def counter(name, text, *labels):
            return Counter(f"switchx:{name}", text, labels, registry=self._registry)

        def histogram(name, text, buckets):
            name = f"switchx:{name}"
            return Histogram(name, text, MODEL, registry=self._registry, buckets=buckets)

        self.running = gauge("num_requests_running", "Inputs being answered.")
        self.waiting = gauge("num_requests_waiting", "Inputs in the queue.")
        to_first = "From arrival to the first token; with beams, to the answer."
        self.first_token_s = histogram("time_to_first_token_seconds", to_first, FIRST_TOKEN)
        between = "Between an answer's tokens: the mean of some steps' for each; not of beams."
        self.inter_token_s = histogram("inter_token_latency_seconds", between, INTER_TOKEN)
        to_answer = "From arrival to the answer."
        self.latency_s = histogram("e2e_request_latency_seconds", to_answer, LATENCY)
        to_start = "From arrival to being decoded."
        self.queue_s = histogram("request_queue_time_seconds", to_start, FIRST_TOKEN)
        together = "Inputs that were decoded together."
        self.batch_size = histogram("batch_size", together, BATCH)
        self.prompt_tokens = counter("prompt_tokens", "Tokens of inputs.", *MODEL)
        written = "Tokens of answers, without their ends."
        self.generation_tokens = counter("generation_tokens", written, *MODEL)
        answered = "Answered inputs: `stop` came to an end, `length` was cut off."
        self.success = counter("request_success", answered, *MODEL, "finished_reason")
        left = "Inputs whose clients left or ran out of time."
        self.abandoned = counter("request_abandoned", left, *MODEL)
        again = "Times that a model was loaded again, or was to be: SIGHUP."
        self.reloads = counter("model_reloads", again, *MODEL, "outcome")
        self.responses = counter("http_responses", "Responses by status.", "status")
        self._registry.register(_Compiled())
        self._registry.register(_Built(self))
        ProcessCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def of(self, name: str) -> "ModelMetrics":
        """The counters of a model, which continue when it is reloaded."""
        if name not in self._models:
            self._models[name] = ModelMetrics(self, name)
        return self._models[name]

    def text(self) -> bytes:
        """The counters in Prometheus's format."""
        return generate_latest(self._registry)


class ModelMetrics:
    """The counters of one model; all exist from the beginning, at 0.

    Attributes:
        server: the `Metrics` that have them.
    """

    def __init__(self, server: Metrics, name: str):
        self.server = server
        self.running, self.waiting = server.running.labels(name), server.waiting.labels(name)
        self.first_token_s = server.first_token_s.labels(name)
        self.inter_token_s = server.inter_token_s.labels(name)
        self.latency_s = server.latency_s.labels(name)
        self.queue_s = server.queue_s.labels(name)
        self.batch_size = server.batch_size.labels(name)
        self.prompt_tokens = server.prompt_tokens.labels(name)
        self.generation_tokens = server.generation_tokens.labels(name)
        self.success = {each: server.success.labels(name, each) for each in REASONS}
        self.abandoned = server.abandoned.labels(name)
        self.reloads = {each: server.reloads.labels(name, each) for each in OUTCOMES}

    def count_waits(self, histogram: Histogram, inputs: Sequence) -> None:
        """Counts how long ago each of some `QueuedInput`s arrived."""
        now_s = time.monotonic()
        for each in inputs:
            histogram.observe(now_s - each.arrival_s)

    def count_tokens(self, each, num_steps: int, ended, begun_s: float) -> None:
        """Counts the times to the tokens that some steps gave a `QueuedInput`: each with their
        mean.

        Args:
            ended: the input's hypotheses, if it ended.
            begun_s: time at which the steps began, from which the first tokens' mean is taken;
                that of later ones is taken from the last token, with prefills of others.
        """
        now_s, before_s, new = time.monotonic(), each.token_s, num_steps
        if ended:
            new = len(ended[0].tokens) + ended[0].is_finished - each.num_tokens
        if new < 1:
            return
        later = new
        if before_s is None:
            self.count_waits(self.first_token_s, [each])
            before_s, later = begun_s, new - 1
        for _ in range(later):
            self.inter_token_s.observe((now_s - before_s) / new)
        each.num_tokens, each.token_s = each.num_tokens + new, now_s

    def count_answer(self, each, num_tokens: int, reason: str) -> None:
        """Counts an answer to a `QueuedInput`, once its client has it.

        Args:
            num_tokens: number of the answer's tokens, up to the one that completes a stop
                string.
        """
        # A stop string ends one before the worker does.
        answer_s = time.monotonic() if each.answer_s is None else each.answer_s
        self.latency_s.observe(answer_s - each.arrival_s)
        self.prompt_tokens.inc(len(each.prompt))
        self.generation_tokens.inc(num_tokens)
        self.success[reason].inc()


class _Built:
    """The versions that answer: the code's, and the step of each model."""

    def __init__(self, metrics: Metrics):
        self._metrics = metrics

    def collect(self):
        family = InfoMetricFamily("switchx:build", "What answers.")
        for name, step in self._metrics.built():
            family.add_metric((), versions() | {MODEL[0]: name, "step": str(step)})
        yield family


class _Compiled:
    """Counts of this process's compilations, with the programs that were read from a cache."""

    def collect(self):
        number, seconds = COMPILATIONS.number, COMPILATIONS.seconds
        yield CounterMetricFamily("switchx:compilations", "Compiled programs.", number)
        what = "Of compilations, or of reading their results from the persistent cache."
        yield CounterMetricFamily("switchx:compilation_seconds", what, seconds)
        what = "Decoding programs that are kept, of a bounded number."
        yield GaugeMetricFamily("switchx:decoding_programs", what, len(PROGRAMS))
