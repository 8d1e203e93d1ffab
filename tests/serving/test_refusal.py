# SPDX-License-Identifier: Apache-2.0
"""A refusal as a client sees it."""

from switchx.serving.requests import Refusal


def test_status_field_and_message():
    refusal = Refusal(400, "top_k is 0", field="top_k")
    want = {"error": {"status": 400, "field": "top_k", "message": "top_k is 0"}}
    assert refusal.as_json() == want
    assert refusal.retry_after_s is None and str(refusal) == "top_k is 0"
