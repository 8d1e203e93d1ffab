# SPDX-License-Identifier: Apache-2.0
"""Bodies that arrive or do not, and requests that are read without trust."""

import asyncio
import dataclasses
import json

import hypothesis
import pytest
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect, Request

from switchx.fields import options
from switchx.inference.config import DecodingConfig
from switchx.inference.model_mesh import ModelMesh
from switchx.partitioning.mesh import MeshSpec
from switchx.serving.refusals import Refusal
from switchx.serving.requests import (
    FIELDS,
    fault_of_experts,
    json_object,
    read_body,
    read_request,
    until_disconnected,
)
from tests.serving.served import LIMITS, model

JSON = ("content-type", "application/json; charset=utf-8")


def request_of(parts, *headers, pause_s=0.0):
    """A request whose body is `parts`; then the client leaves."""
    messages = [
        {"type": "http.request", "body": part, "more_body": i + 1 < len(parts)}
        for i, part in enumerate(parts)
    ]

    async def receive():
        await asyncio.sleep(pause_s)
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    raw = [(name.encode(), value.encode()) for name, value in headers or (JSON,)]
    return Request({"type": "http", "method": "POST", "headers": raw}, receive)


def refused(request, **changes) -> Refusal:
    with pytest.raises(Refusal) as caught:
        asyncio.run(read_body(request, dataclasses.replace(LIMITS, **changes)))
    return caught.value


def test_bodies_arrive_whole_too_slowly_or_not():
    request = request_of([b"ab", b"", b"c"])
    assert asyncio.run(read_body(request, LIMITS)) == b"abc"
    asyncio.run(until_disconnected(request))
    error = refused(request_of([b"a", b"b"], pause_s=0.1), body_timeout_s=0.05)
    assert (error.status, error.message) == (
        408, "the body did not arrive within 0.05 s; send it at once",
    )  # fmt: skip
    with pytest.raises(ClientDisconnect):
        asyncio.run(read_body(request_of([]), LIMITS))


@pytest.mark.parametrize("parts", [[b"x" * 4097], [b"x" * 2048] * 3])
def test_too_big(parts):
    assert refused(request_of(parts)).status == 413
    assert refused(request_of(parts, JSON, ("content-length", "9" * 30))).status == 413


@pytest.mark.parametrize(
    ("headers", "status", "said"),
    [
        ([("content-type", "text/plain")], 415, "Content-Type is 'text/plain'; send plain"),
        ([("x", "y")], 415, "Content-Type is 'missing'; send plain JSON, with Content-Type:"),
        ([JSON, ("content-encoding", "br")], 415, "Content-Encoding is 'br'; send plain JSON"),
        ([JSON, ("content-length", "-3")], 400, "Content-Length is '-3'; expected a number"),
    ],
)
def test_wrong_heads(headers, status, said):
    refusal = refused(request_of([b"{}"], *headers))
    assert refusal.status == status and said in refusal.message


def read(body, limits=LIMITS, a_model=None):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    return read_request(json_object(body), a_model or model(), limits)


def refusal(body, **options) -> Refusal:
    with pytest.raises(Refusal) as caught:
        read(body, **options)
    assert caught.value.status == 400
    return caught.value


def test_a_request_with_everything():
    settings = {
        "max_new_tokens": 3, "temperature": 0.5, "top_k": 4, "top_p": 1, "seed": 9,
        "length_penalty": -1, "min_new_tokens": 2, "repetition_penalty": 2,
        "no_repeat_ngram_size": 3, "forced_prefix": [5, 6], "stop": "x", "logprobs": 1,
        "num_return_sequences": 2,
    }  # fmt: skip
    got = read({"inputs": ["ab", [70, 1, 0, 0]], "stream": True, "experts": True} | settings)
    assert got.prompts == [[100, 101, 1]] * 2 + [[70, 1]] * 2 and got.num_rows == 2
    assert got.settings == DecodingConfig(
        3, 1, 0.5, 4, 1.0, 9, -1.0, min_new_tokens=2, repetition_penalty=2.0, logprobs=1,
        no_repeat_ngram_size=3, forced_prefix=(5, 6), stop=("x",), num_return_sequences=2,
    )  # fmt: skip
    assert (
        got.is_streaming
        and got.with_experts
        and got.stops == ("x",)
        and got.num_prompt_tokens == 5
    )
    others = {"model", "inputs", "stream", "experts", "beam_size", "best_of"}
    assert set(settings) | others == set(FIELDS)
    not_asked_for = {"pruning", "prompt_lookup_num_tokens"}
    assert options(DecodingConfig).keys() - set(FIELDS) == not_asked_for


def test_experts_and_ways_of_decoding_that_are_not_answered():
    config, values = model().config, {"inputs": "ab", "experts": True}
    for other, why in (
        ({"config": dataclasses.replace(config, switch=None)}, "has no experts"),
        ({"experts": "some slots"}, "not all on one device"),
        ({"devices": ModelMesh(MeshSpec().abstract(None))}, "not all on one device"),
    ):
        fault = fault_of_experts(dataclasses.replace(model(), **other))
        assert fault is not None and why in fault
    dense = dataclasses.replace(model(), config=dataclasses.replace(config, switch=None))
    with pytest.raises(Refusal, match="experts is true: the model's decoder") as caught:
        read_request(values, dense, LIMITS)
    assert caught.value.field == "experts"
    assert fault_of_experts(model()) is None
    limits = dataclasses.replace(LIMITS, decodings="greedy,beam2")
    values = {"inputs": "ab", "beam_size": 2}
    assert read_request(values, model(), limits).settings.beam_size == 2
    with pytest.raises(Refusal, match="this server answers greedy, beam2") as caught:
        read_request({"inputs": "ab", "temperature": 0.5}, model(), limits)
    assert (caught.value.status, caught.value.field) == (400, "temperature")
    for field, value in {"forced_prefix": [3], "stop": "x", "logprobs": 0}.items():
        with pytest.raises(Refusal, match="this server answers") as caught:
            read_request({"inputs": "ab", field: value}, model(), limits)
        assert caught.value.field == field
    limits = dataclasses.replace(LIMITS, decodings="greedy,processors,logprobs")
    assert read_request({"inputs": "ab", "stop": "x", "forced_prefix": [3]}, model(), limits)


def test_one_text_defaults_and_seeds():
    got = read({"inputs": "ab", "top_k": None})
    assert got.prompts == [[100, 101, 1]]
    assert got.settings == DecodingConfig(8) and not got.is_streaming
    assert read({"inputs": ["", "ab"]}).prompts == [[1], [100, 101, 1]]
    seeds = {read({"inputs": "a", "temperature": 1}).settings.seed for _ in range(8)}
    assert len(seeds) == 8
    assert read({"inputs": "a"}).settings.seed == 0  # greedy decoding reads none


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        ({"inputs": "a", "stop": [3]}, "stop", "expected a text, or a list of texts"),
        ({"inputs": "a", "stop": ["x"] * 5}, "stop", "stop has 5 items; expected 4 at most"),
        ({"inputs": "a", "stop": "x", "beam_size": 2}, "stop", "not stopped by texts"),
        ({"inputs": "a", "forced_prefix": [1e3]}, "forced_prefix", "a list of token ids"),
        ({"inputs": "a", "num_return_sequences": 2}, "num_return_sequences", "has one output"),
        ({"inputs": "a", "temperature": 1, "best_of": 2, "stream": True}, "stream", "best_of"),
        ({"inputs": "a", "temperature": 1, "best_of": 999}, "inputs", "fewer samples"),
        (b"", None, 'the body is empty; send JSON such as {"inputs": ["a text"]}'),
        (b'{"inputs": ["\xff"]}', None, "the body is not UTF-8 at byte 13; encode it"),
        (b'\xef\xbb\xbf{"inputs": "a"}', None, "the body is not JSON: Unexpected UTF-8 BOM"),
        (b"{", None, "the body is not JSON: Expecting property name"),
        (b"[" * 3000, None, "the body is "),
        (b'{"inputs": "a", "inputs": "b"}', None, "a name occurs twice in an object"),
        (b'{"inputs": "a", "top_p": NaN}', None, "NaN is no number of JSON"),
        ([1], None, "the body is a list ([1]); expected a JSON object"),
        ({}, "inputs", "inputs is missing"),
        ({"inputs": "a", "prompt": 1}, "prompt", "'prompt' is no field; fields are inputs, "),
        ({"inputs": 3}, "inputs", "inputs is a number (3); expected a text, or a list"),
        ({"inputs": []}, "inputs", "inputs has 0 items; expected 1 to 8"),
        ({"inputs": ["a"] * 9}, "inputs", "inputs has 9 items; expected 1 to 8"),
        ({"inputs": [[]]}, "inputs[0]", "inputs[0] is empty; give at least one token"),
        ({"inputs": [{}]}, "inputs[0]", "inputs[0] is an object ({}); expected a text, or a"),
        ({"inputs": [[1, True]]}, "inputs[0]", "inputs[0] is a list ([1, true]); expected a"),
        ({"inputs": [[1, 384]]}, "inputs[0]", "inputs[0] has token id 384, the vocabulary"),
        ({"inputs": [[-1]]}, "inputs[0]", "inputs[0] has token id -1, the vocabulary"),
        ({"inputs": [[0, 5]]}, "inputs[0]", "inputs[0] cannot be read: inputs[0] has padding"),
        ({"inputs": ["a" * 16]}, "inputs[0]", "inputs[0] has 17 tokens; expected 16 at most"),
        ({"inputs": [[5] * 17]}, "inputs[0]", "inputs[0] has 17 tokens; expected 16 at most"),
        ({"inputs": ["\ud800"]}, "inputs[0]", "inputs[0] has half a surrogate pair, U+D800"),
        ({"inputs": "a", "stream": 1}, "stream", "stream is a number (1); expected true or"),
        ({"inputs": "a", "beam_size": "2"}, "beam_size", 'beam_size is a text ("2"); expected'),
        ({"inputs": "a", "beam_size": True}, "beam_size", "beam_size is true; expected a"),
        ({"inputs": "a", "beam_size": 3}, "beam_size", "beam_size is a number (3)"),
        ({"inputs": "a", "seed": 10**400}, "seed", "; use 0 to 2147483647"),
        ({"inputs": "a", "seed": 1.0}, "seed", "seed is a number (1.0); expected a whole"),
        (b'{"inputs": "a", "temperature": 1e999}', "temperature", "=inf; use 0 to 100"),
        ({"inputs": "a", "temperature": 10**400}, "temperature", "; use 0 to 100"),
        ({"inputs": "a", "temperature": 1e-30}, "temperature", "=1e-30; use 0 for the"),
        ({"inputs": "a", "temperature": 1, "beam_size": 2}, "beam_size", "beam_size=2; tem"),
        ({"inputs": "a", "top_k": 2}, "top_k", "top_k=2; temperature=0"),
        ({"inputs": "a", "temperature": 1, "top_p": 0}, "top_p", "top_p=0.0; use more than 0"),
        ({"inputs": "a", "temperature": 1, "top_p": 2}, "top_p", "top_p=2.0; use 0 to 1"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(body, field, message):
    got = refusal(body)
    assert got.field == field and message in got.message


@pytest.mark.parametrize("depth", [17, 100, 300, 600, 900, 990, 1000, 5000, 100_000])
def test_no_nesting_depth_escapes(depth):
    for begin, end in (("[", "]"), ('{"a": ', "}")):
        inner = begin * depth + ("1" if begin != "[" else "") + end * depth
        for body in (inner, f'{{"inputs": {inner}}}', f'{{"inputs": "a", "seed": {inner}}}'):
            assert "the body is nested" in refusal(body.encode()).message


def test_long_values_are_cut_and_a_model_may_have_no_vocabulary():
    assert len(refusal({"inputs": "a", "seed": "x" * 9999}).message) < 200
    assert len(refusal({"inputs": "a", "y" * 9999: 1}).message) < 300
    bare = dataclasses.replace(model(), vocabulary=None)
    assert read({"inputs": [[5, 6]]}, a_model=bare).prompts == [[5, 6]]
    assert "came without a vocabulary" in refusal({"inputs": "a"}, a_model=bare).message


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=8,
)
BODIES = st.one_of(
    st.binary(max_size=60),
    VALUES.map(lambda value: json.dumps(value).encode()),
    st.fixed_dictionaries({"inputs": VALUES}, optional=dict.fromkeys(FIELDS[1:], VALUES)).map(
        lambda value: json.dumps(value).encode()
    ),
)


@hypothesis.settings(max_examples=300)
@hypothesis.given(BODIES)
def test_whatever_is_sent_is_read_or_refused(body):
    """And what is read can be answered."""
    try:
        got = read(body)
    except Refusal as error:
        assert error.status == 400 and 0 < len(error.message) < 700
        return
    assert 1 <= len(got.prompts) <= LIMITS.max_inputs
    for prompt in got.prompts:
        assert 1 <= len(prompt) <= LIMITS.max_input_tokens
        assert all(0 <= token < model().config.vocab_size for token in prompt)
    model().generator(**dataclasses.asdict(got.settings))


def test_status_field_and_message():
    refusal = Refusal(400, "top_k is 0", field="top_k")
    assert refusal.as_json()["error"] == {
        "status": 400, "field": "top_k", "message": "top_k is 0",
        "type": "invalid_request_error", "param": "top_k", "code": None,
    }  # fmt: skip
    kinds = [Refusal(status, "").as_json()["error"]["type"] for status in (401, 429, 503)]
    assert kinds == ["authentication_error", "rate_limit_error", "server_error"]
    assert refusal.retry_after_s is None and str(refusal) == "top_k is 0"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (r'{"inputs": "a\ud83d"}', "inputs"),
        (r'{"inputs": ["a", "\udc00b"]}', "inputs[1]"),
        (r'{"inputs": "a", "stop": ["\ud83d"]}', "stop[0]"),
        (r'{"model": "\ud800"}', "model"),
        (r'{"stream_options": {"a": "\ud800"}}', "stream_options.a"),
        (r'{"\ud800": 1}', "a field's name"),
    ],
)
def test_half_a_surrogate_pair_is_named_in_any_field(body, field):
    with pytest.raises(Refusal) as refusal:
        json_object(body.encode())
    assert refusal.value.status == 400 and refusal.value.field == field
    assert str(refusal.value).startswith(f"{field} has half a surrogate pair, U+D")
    whole = r'{"inputs": "\ud83d\ude42", "stop": ["\ud83d\ude42"]}'
    assert json_object(whole.encode())["stop"] == ["🙂"]
