# SPDX-License-Identifier: Apache-2.0
"""Errors of published numbers."""

import pytest

from switchx.bench.published import Cell


def test_errors_are_relative_to_what_is_published():
    cell = Cell("PPMoE", "Table 2", 200.0, 250.0, "a note")
    assert cell.error == pytest.approx(0.25)
    assert cell.row() == {
        "paper": "PPMoE", "cell": "Table 2", "published": 200.0, "predicted": 250.0,
        "relative_error": cell.error, "note": "a note",
    }  # fmt: skip
    assert Cell("PPMoE", "Table 2", 200.0, None).error is None
