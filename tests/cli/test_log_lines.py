# SPDX-License-Identifier: Apache-2.0
"""Which log records become lines, and what stands in them."""

import logging
import warnings

from switchx.cli.progress import shown_by


def test_ours_from_info_on_and_others_from_warning_on():
    lines = []
    with shown_by(lines.append):
        logging.getLogger("switchx.data.corpora").info("preparing %s", "text")
        logging.getLogger("switchx.data").debug("nobody sees this")
        logging.getLogger("switchx.training").warning("checkpoint 3 is skipped")
        logging.getLogger("absl").info("nobody sees this")
        logging.getLogger("absl").error("disk on fire")
        logging.getLogger("switchxylophone").info("nobody sees this")
    assert lines == [
        "preparing text",
        "warning: checkpoint 3 is skipped",
        "error: disk on fire",
    ]


def test_warning_of_python_is_one_line():
    lines = []
    logging.captureWarnings(True)
    try:
        with shown_by(lines.append), warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning("overflow", RuntimeWarning, "cast.py", 7, line="x = y")
    finally:
        logging.captureWarnings(False)
    assert lines == ["warning: cast.py:7: RuntimeWarning: overflow"]


def test_what_was_before_is_back_afterwards():
    root, ours = logging.getLogger(), logging.getLogger("switchx")
    before = root.handlers[:], ours.level
    outer, inner = [], []
    with shown_by(outer.append):
        with shown_by(inner.append):
            ours.warning("one")
        ours.warning("two")
    assert (root.handlers, ours.level) == before
    assert (outer, inner) == (["warning: two"], ["warning: one"])
