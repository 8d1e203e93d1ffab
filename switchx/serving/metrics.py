# SPDX-License-Identifier: Apache-2.0
"""What a server counts, for Prometheus: vLLM's names where it has them, after `switchx:`.

As there, a request is one input: a call with three inputs counts three.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from switchx.inference.programs import COMPILATIONS, PROGRAMS

# Seconds; vLLM's, thinned.
FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20,
    40, 80,
)  # fmt: skip
LATENCY = (0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120)
BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """Counters of one server, in a registry of its own."""

    def __init__(self):
        self._registry = CollectorRegistry()

        def gauge(name, text):
            return Gauge(f"switchx:{name}", text, registry=self._registry)

        def counter(name, text, *labels):
            return Counter(f"switchx:{name}", text, labels, registry=self._registry)

        def histogram(name, text, buckets):
            return Histogram(f"switchx:{name}", text, registry=self._registry, buckets=buckets)

        self.running = gauge("num_requests_running", "Inputs being answered.")
        self.waiting = gauge("num_requests_waiting", "Inputs in the queue.")
        to_first = "From arrival to the first token; with beams, to the answer."
        self.first_token_s = histogram("time_to_first_token_seconds", to_first, FIRST_TOKEN)
        to_answer = "From arrival to the answer."
        self.latency_s = histogram("e2e_request_latency_seconds", to_answer, LATENCY)
        to_start = "From arrival to being decoded."
        self.queue_s = histogram("request_queue_time_seconds", to_start, FIRST_TOKEN)
        together = "Inputs that were decoded together."
        self.batch_size = histogram("batch_size", together, BATCH)
        self.prompt_tokens = counter("prompt_tokens", "Tokens of inputs.")
        written = "Tokens of answers, without their ends."
        self.generation_tokens = counter("generation_tokens", written)
        answered = "Answered inputs: `stop` came to an end, `length` was cut off."
        self.success = counter("request_success", answered, "finished_reason")
        left = "Inputs whose clients left or ran out of time."
        self.abandoned = counter("request_abandoned", left)
        self.responses = counter("http_responses", "Responses by status.", "status")
        self._registry.register(_Compiled())

    def text(self) -> bytes:
        """In Prometheus' format."""
        return generate_latest(self._registry)


class _Compiled:
    """What this process has compiled, the programs that were read from a cache included."""

    def collect(self):
        number, seconds = COMPILATIONS.number, COMPILATIONS.seconds
        yield CounterMetricFamily("switchx:compilations", "Compiled programs.", number)
        what = "Of compilations, or of reading their results from the persistent cache."
        yield CounterMetricFamily("switchx:compilation_seconds", what, seconds)
        what = "Decoding programs that are kept, of a bounded number."
        yield GaugeMetricFamily("switchx:decoding_programs", what, len(PROGRAMS))
