# SPDX-License-Identifier: Apache-2.0
"""Limits that contradict each other, and what is counted, under vLLM's names."""

import time

import jax
import pytest
from prometheus_client.parser import text_string_to_metric_families

from switchx.inference.config import DecodingConfig, with_defaults
from switchx.inference.program_cache import COMPILATIONS
from switchx.serving.limits import Limits
from switchx.serving.metrics import Metrics
from switchx.serving.versions import versions
from tests.data.refusals import refused


def test_sizes_of_compiled_programs_and_ways_of_decoding():
    limits = Limits(max_new_tokens=100)
    assert [limits.prompt_length(n) for n in (1, 16, 17, 1000)] == [16, 16, 32, 1024]
    assert [limits.answer_length(n) for n in (1, 16, 17, 65, 100)] == [16, 16, 64, 100, 100]
    nothing = {"prompt_lookup_num_tokens": None}  # a running batch drafts nothing
    assert limits.defaults({}) == nothing | {"max_new_tokens": 64}
    own, few = {"max_new_tokens": 90, "beam_size": 2}, Limits(max_new_tokens=8)
    assert few.defaults(own) == nothing | {"max_new_tokens": 8, "beam_size": 2}
    # A model's least number gives way.
    own = {"min_new_tokens": 20, "max_new_tokens": 50, "prompt_lookup_num_tokens": 3}
    assert few.defaults(own) == nothing | {"min_new_tokens": 8, "max_new_tokens": 8}
    assert with_defaults(own, {"max_new_tokens": 5})["min_new_tokens"] == 5
    assert with_defaults(own, {"max_new_tokens": 5, "min_new_tokens": 9})["min_new_tokens"] == 9
    assert Limits(max_new_tokens=8).answer_length(3) == 8
    limits = Limits(decodings="greedy,beam4")
    assert limits.refusal(DecodingConfig()) is None
    assert limits.refusal(DecodingConfig(beam_size=4)) is None
    field, message = limits.refusal(DecodingConfig(beam_size=2))
    assert field == "beam_size" and "beam2" in message and "greedy, beam4" in message
    field, message = limits.refusal(DecodingConfig(temperature=0.5))
    assert field == "temperature" and "sample" in message
    assert Limits().refusal(DecodingConfig(temperature=0.5)) is None
    with refused("there is no 'beam5'"):
        Limits(decodings="greedy,beam5")


@pytest.mark.parametrize(
    ("decodings", "own", "way"),
    [
        (None, {"beam_size": 3}, (3, False, False)),
        ("greedy", {}, (1, False, False)),
        ("sample", {}, (1, True, False)),
        ("processors,beam2", {"stop": ("x",)}, (2, False, False)),
        ("greedy", {"repetition_penalty": 2.0}, (1, False, False)),
        ("greedy,processors", {"repetition_penalty": 2.0}, (1, False, True)),
    ],
)
def test_what_is_compiled_unasked_is_answered(decodings, own, way):
    limits = Limits(decodings=decodings)
    found = DecodingConfig(**limits.warm_up(own))
    assert limits.refusal(found) is None
    assert (found.beam_size, found.is_sampling, found.has_processors) == way


@pytest.mark.parametrize(
    ("asked", "left"),
    [
        ({}, {"prompt_lookup_num_tokens": 3, "stop": ("x",)}),
        ({"stop": ("y",)}, {"stop": ("y",)}),
        ({"logprobs": 0}, {"stop": ("x",), "logprobs": 0}),
        ({"beam_size": 2}, {"beam_size": 2}),
        ({"temperature": 1.0}, {"temperature": 1.0, "stop": ("x",)}),
    ],
)
def test_a_models_drafts_and_stops_give_way_to_what_they_are_not_for(asked, left):
    assert with_defaults({"prompt_lookup_num_tokens": 3, "stop": ("x",)}, asked) == left


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "Limits.batch_size=0"),
        ({"body_timeout_s": 0}, "body_timeout_s=0"),
        ({"batch_wait_ms": -1}, "batch_wait_ms=-1"),
        ({"batch_size": 2000}, "batch_size=2000"),
        ({"max_waiting": 3}, "max_inputs=64"),
        ({"max_new_tokens": 5000}, "max_new_tokens=5000"),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    with refused(message):
        Limits(**changes)


# Of vLLM's documentation, without its prefix.
VLLM = {
    "num_requests_running", "num_requests_waiting", "time_to_first_token_seconds",
    "e2e_request_latency_seconds", "request_queue_time_seconds", "prompt_tokens",
    "generation_tokens", "request_success", "inter_token_latency_seconds",
}  # fmt: skip


def test_names_are_vllms_and_values_are_read_back():
    metrics = Metrics()
    model = metrics.of("tiny")
    model.running.set(3)
    model.first_token_s.observe(0.03)
    model.success["stop"].inc()
    jax.jit(lambda x: x + 17)(1.0)
    families = {
        family.name: family
        for family in text_string_to_metric_families(metrics.text().decode())
    }
    assert {f"switchx:{name}" for name in VLLM} <= set(families)
    (running,) = families["switchx:num_requests_running"].samples
    assert (running.value, running.labels) == (3, {"model_name": "tiny"})
    (compiled,) = families["switchx:compilations"].samples
    assert compiled.name == "switchx:compilations_total"
    assert compiled.value == COMPILATIONS.number >= 1 and COMPILATIONS.seconds > 0
    values = {
        sample.labels.get("le"): sample.value
        for sample in families["switchx:time_to_first_token_seconds"].samples
        if sample.name.endswith("_bucket")
    }
    assert values["0.02"] == 0 and values["0.04"] == 1 == values["+Inf"]


def test_servers_count_apart_and_say_what_they_are_made_of():
    metrics = Metrics()
    metrics.built = lambda: [("tiny", 5), ("base", 9)]
    families = {
        family.name: family.samples
        for family in text_string_to_metric_families(metrics.text().decode())
    }
    built = families["switchx:build_info"]
    assert [each.name for each in built] == ["switchx:build_info"] * 2
    assert all(each.value == 1 and each.labels["jax"] == jax.__version__ for each in built)
    assert {each.labels["version"] for each in built} == {versions()["version"]}
    steps = {each.labels["model_name"]: each.labels["step"] for each in built}
    assert steps == {"tiny": "5", "base": "9"}
    values = {name: samples[0].value for name, samples in families.items() if samples}
    assert values["process_resident_memory_bytes"] > 1e6
    assert values["process_cpu_seconds"] > 0 and values["process_open_fds"] > 0
    assert 0 < time.time() - values["process_start_time_seconds"] < 1e5
    one, other = Metrics(), Metrics()
    name = b'switchx:prompt_tokens_total{model_name="a"}'
    one.of("a").prompt_tokens.inc(5)
    other.of("a")
    assert name + b" 5.0" in one.text() and name + b" 0.0" in other.text()
