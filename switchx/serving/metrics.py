# SPDX-License-Identifier: Apache-2.0
"""What a server counts, for Prometheus: vLLM's names where it has them, after `switchx:`.

As there, a request is one input: a call with three inputs counts three.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

CONTENT_TYPE = CONTENT_TYPE_LATEST
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

        def add(kind, name, text, **options):
            return kind(f"switchx:{name}", text, registry=self._registry, **options)

        self.running = add(Gauge, "num_requests_running", "Inputs being answered.")
        self.waiting = add(Gauge, "num_requests_waiting", "Inputs in the queue.")
        self.first_token_s = add(
            Histogram,
            "time_to_first_token_seconds",
            "From arrival to the first token; with beams, to the answer.",
            buckets=FIRST_TOKEN,
        )
        self.latency_s = add(
            Histogram,
            "e2e_request_latency_seconds",
            "From arrival to the answer.",
            buckets=LATENCY,
        )
        self.queue_s = add(
            Histogram,
            "request_queue_time_seconds",
            "From arrival to being decoded.",
            buckets=FIRST_TOKEN,
        )
        self.prompt_tokens = add(Counter, "prompt_tokens", "Tokens of inputs.")
        self.generation_tokens = add(
            Counter, "generation_tokens", "Tokens of answers, without their ends."
        )
        self.success = add(
            Counter,
            "request_success",
            "Answered inputs: `stop` came to an end, `length` was cut off.",
            labelnames=["finished_reason"],
        )
        self.abandoned = add(
            Counter, "request_abandoned", "Inputs whose clients left or ran out of time."
        )
        self.batch_size = add(
            Histogram, "batch_size", "Inputs that were decoded together.", buckets=BATCH
        )
        self.responses = add(
            Counter, "http_responses", "Responses by status.", labelnames=["status"]
        )

    def text(self) -> bytes:
        """In Prometheus' format."""
        return generate_latest(self._registry)
