# SPDX-License-Identifier: Apache-2.0
"""Refusals: when they are made, and what they say."""

import pytest

from switchx.fields import require, require_choice


def test_what_holds_passes_and_what_does_not_is_said():
    require(True, "never")
    with pytest.raises(ValueError) as error:
        require(False, "x=1; use 2")
    assert str(error.value) == "x=1; use 2"


def test_a_choice_is_one_of_its_choices():
    require_choice("x", "a", ("a", "b"))
    with pytest.raises(ValueError) as error:
        require_choice("x", "c", ("a", "b"))
    assert str(error.value) == "x='c' is unknown; use one of a, b"
