# SPDX-License-Identifier: Apache-2.0
"""Requests are read without trust: each wrong field is named, what is right is understood."""

import dataclasses
import json

import hypothesis
import pytest
from hypothesis import strategies as st

from switchx.serving.requests import FIELDS, AnswerSettings, Refusal, read_request
from tests.serving.served import LIMITS, model


def read(body, limits=LIMITS, a_model=None):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    return read_request(body, a_model or model(), limits)


def refusal(body, **options) -> Refusal:
    with pytest.raises(Refusal) as caught:
        read(body, **options)
    assert caught.value.status == 400
    return caught.value


def test_a_request_with_everything():
    settings = {
        "max_new_tokens": 3, "temperature": 0.5, "top_k": 4, "top_p": 1, "seed": 9,
        "length_penalty": -1,
    }  # fmt: skip
    got = read({"inputs": ["ab", [70, 1, 0, 0]], "stream": True} | settings)
    assert got.prompts == [[100, 101, 1], [70, 1]]
    assert got.settings == AnswerSettings(3, 1, 0.5, 4, 1.0, 9, -1.0) and got.is_streaming
    assert set(settings) | {"inputs", "stream", "beam_size"} == set(FIELDS)
    fields = {field.name for field in dataclasses.fields(AnswerSettings)}
    assert set(FIELDS) - {"inputs", "stream"} == fields


def test_one_text_and_defaults():
    got = read({"inputs": "ab", "top_k": None})
    assert got.prompts == [[100, 101, 1]]
    assert got.settings == AnswerSettings(8) and not got.is_streaming


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
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
        ({"inputs": ["a", " "]}, "inputs[1]", "inputs[1] is empty; give a text"),
        ({"inputs": [[]]}, "inputs[0]", "inputs[0] is empty; give at least one token"),
        ({"inputs": [{}]}, "inputs[0]", "inputs[0] is an object ({}); expected a text, or a"),
        ({"inputs": [[1, True]]}, "inputs[0]", "inputs[0] is a list ([1, true]); expected a"),
        ({"inputs": [[1, 384]]}, "inputs[0]", "inputs[0] has token id 384, the vocabulary"),
        ({"inputs": [[-1]]}, "inputs[0]", "inputs[0] has token id -1, the vocabulary"),
        ({"inputs": [[0, 5]]}, "inputs[0]", "inputs[0] cannot be read: inputs[0] has padding"),
        ({"inputs": ["a" * 16]}, "inputs[0]", "inputs[0] has 17 tokens; expected 16 at most"),
        ({"inputs": [[5] * 17]}, "inputs[0]", "inputs[0] has 17 tokens; expected 16 at most"),
        ({"inputs": ["\ud800"]}, "inputs[0]", "inputs[0] cannot be read: 'utf-8' codec can't"),
        ({"inputs": "a", "stream": 1}, "stream", "stream is a number (1); expected true or"),
        ({"inputs": "a", "beam_size": "2"}, "beam_size", 'beam_size is a text ("2"); expected'),
        ({"inputs": "a", "beam_size": True}, "beam_size", "beam_size is true; expected a"),
        ({"inputs": "a", "beam_size": 3}, "beam_size", "expected a whole number, 1 to 2"),
        ({"inputs": "a", "seed": 10**400}, "seed", "seed is a number (huge); expected a whole"),
        ({"inputs": "a", "seed": 1.0}, "seed", "seed is a number (1.0); expected a whole"),
        (b'{"inputs": "a", "temperature": 1e999}', "temperature", "expected a number, 0 to"),
        ({"inputs": "a", "temperature": 10**400}, "temperature", "(huge); expected a number"),
        ({"inputs": "a", "temperature": 1e-30}, "temperature", "expected 0 for the likeliest"),
        ({"inputs": "a", "temperature": 1, "beam_size": 2}, "beam_size", "expected one of"),
        ({"inputs": "a", "top_k": 2}, "top_k", "top_k without a temperature, so nothing is"),
        ({"inputs": "a", "temperature": 1, "top_p": 0}, "top_p", "top_p is 0; expected more"),
        ({"inputs": "a", "temperature": 1, "top_p": 2}, "top_p", "expected a number, 0 to 1"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(body, field, message):
    got = refusal(body)
    assert got.field == field and message in got.message


def test_long_values_are_cut():
    assert len(refusal({"inputs": "a", "seed": "x" * 9999}).message) < 200
    assert len(refusal({"inputs": "a", "y" * 9999: 1}).message) < 300


def test_a_model_without_a_vocabulary_reads_token_ids():
    bare = dataclasses.replace(model(), vocabulary=None)
    assert read({"inputs": [[5, 6]]}, a_model=bare).prompts == [[5, 6]]
    assert "came without a vocabulary" in refusal({"inputs": "a"}, a_model=bare).message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=8,
)
BODIES = st.one_of(
    st.binary(max_size=60),
    JSON.map(lambda value: json.dumps(value).encode()),
    st.fixed_dictionaries({"inputs": JSON}, optional=dict.fromkeys(FIELDS[1:], JSON)).map(
        lambda value: json.dumps(value).encode()
    ),
)


@hypothesis.settings(deadline=None, max_examples=300)
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
