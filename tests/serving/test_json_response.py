# SPDX-License-Identifier: Apache-2.0
"""What is sent is JSON in UTF-8, whatever is in it."""

import json

import pytest

from switchx.serving.app import JSONResponse, encoded


def test_every_text_can_be_sent():
    for text in ("é🙂", "\ud800", '"\\\n\x00', "\ud83d\ude42 \udfff"):
        assert json.loads(encoded({"text": text}).decode("utf-8", "strict"))["text"] in (
            text,
            text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"),
            "🙂 \udfff",
        )
    assert encoded("é") == '"é"'.encode()


def test_infinities_are_not():
    with pytest.raises(ValueError, match="Out of range"):
        encoded({"score": float("inf")})


def test_a_response_ends_its_line_and_has_a_type():
    response = JSONResponse({"a": 1}, 418, {"x": "y"})
    assert response.body == b'{"a": 1}\n' and response.status_code == 418
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x"] == "y"
