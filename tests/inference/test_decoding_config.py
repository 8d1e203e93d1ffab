# SPDX-License-Identifier: Apache-2.0
"""Settings of decoding that mean nothing are refused, each with the way out."""

import pytest

from switchx.inference.config import DecodingConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0; use at least 1"),
        ({"beam_size": 0}, "beam_size=0; use at least 1"),
        ({"temperature": -1.0}, "temperature=-1.0; use 0 to 100"),
        ({"temperature": 0.001}, "temperature=0.001; use 0 for the likeliest token"),
        ({"temperature": 1.0, "top_k": 0}, "top_k=0; use 1 to "),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p=1.5; use 0 to 1"),
        ({"early_stopping": "soon"}, "use one of True, False, never"),
        ({"pruning": "all"}, "use one of none, experts, compact"),
        ({"temperature": 1.0, "beam_size": 2}, "beam_size=2; temperature=1.0 samples"),
        ({"top_k": 3}, "temperature=0 does not sample"),
    ],
)
def test_nonsense_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DecodingConfig(**settings)


def test_the_default_is_greedy():
    assert not DecodingConfig().is_sampling and DecodingConfig().beam_size == 1
