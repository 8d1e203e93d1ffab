# SPDX-License-Identifier: Apache-2.0
"""What is counted reads as Prometheus has it, under vLLM's names."""

from prometheus_client.parser import text_string_to_metric_families

from switchx.serving.metrics import Metrics

# Of vLLM's documentation, without its prefix.
VLLM = {
    "num_requests_running", "num_requests_waiting", "time_to_first_token_seconds",
    "e2e_request_latency_seconds", "request_queue_time_seconds", "prompt_tokens",
    "generation_tokens", "request_success",
}  # fmt: skip


def test_names_are_vllms_and_values_are_read_back():
    metrics = Metrics()
    metrics.running.set(3)
    metrics.first_token_s.observe(0.03)
    metrics.success.labels("stop").inc()
    families = {
        family.name: family
        for family in text_string_to_metric_families(metrics.text().decode())
    }
    assert {f"switchx:{name}" for name in VLLM} <= set(families)
    assert families["switchx:num_requests_running"].samples[0].value == 3
    values = {
        sample.labels.get("le"): sample.value
        for sample in families["switchx:time_to_first_token_seconds"].samples
        if sample.name.endswith("_bucket")
    }
    assert values["0.02"] == 0 and values["0.04"] == 1 == values["+Inf"]


def test_servers_count_apart():
    one, other = Metrics(), Metrics()
    one.prompt_tokens.inc(5)
    assert b"switchx:prompt_tokens_total 5.0" in one.text()
    assert b"switchx:prompt_tokens_total 0.0" in other.text()
