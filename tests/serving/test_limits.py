# SPDX-License-Identifier: Apache-2.0
"""Limits: refused where they contradict each other; the few sizes that are compiled."""

import pytest

from switchx.serving.limits import Limits
from tests.data.refusals import refused


def test_sizes_of_compiled_programs():
    limits = Limits(max_new_tokens=100)
    assert [limits.prompt_length(n) for n in (1, 16, 17, 1000)] == [16, 16, 32, 1024]
    assert [limits.room(n) for n in (1, 16, 17, 65, 100)] == [16, 16, 64, 100, 100]
    assert limits.default_new_tokens == 64
    assert Limits(max_new_tokens=8).default_new_tokens == 8
    assert Limits(max_new_tokens=8).room(3) == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size=0; use at least 1"),
        ({"body_timeout_s": 0}, "body_timeout_s=0; use at least 0.01"),
        ({"batch_wait_s": -1}, "batch_wait_s=-1; use at least 0"),
        ({"batch_size": 2000}, "batch_size=2000; use at most 1024"),
        ({"max_waiting": 3}, "max_inputs=64; use at most 3 (max_waiting)"),
        ({"max_new_tokens": 5000}, "max_new_tokens=5000; use at most 4096"),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    with refused(message):
        Limits(**changes)
