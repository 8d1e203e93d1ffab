# SPDX-License-Identifier: Apache-2.0
"""The page of cards: what a card measured is kept, once, and shown; no rehearsal is."""

import pytest

from experiments.accelerator import pages
from experiments.pages import BEGIN, END
from switchx.bench.accelerator import cards, records


def test_what_a_card_measured_is_kept_and_shown(tmp_path, monkeypatch):
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(pages, "HERE", tmp_path)
    card = cards.Card("NVIDIA H200", "580")
    with records.Records(tmp_path / "out", card) as found:
        for case, measured in (("one", "passed"), ("two", "failed")):
            found.write({"part": "kernel_tests", "code": "0", "case": f"tests/{case}",
                         "measured": measured, "predicted": None, "unit": "test"})  # fmt: skip
    path = pages.keep(tmp_path / "out")
    assert path.name.startswith("nvidia_h200_20")
    text = pages.page()
    assert "Tests: 1 passed, 1 failed." in text and "tests/two" in text
    assert "tests/one" not in text and "kernel_tests_failed | 1 | ==0 | does not hold" in text
    with pytest.raises(ValueError, match="a day's calls go on from each other by --after"):
        pages.keep(tmp_path / "out")
    records.Records(tmp_path / "tried", cards.Card(cards.REHEARSAL))
    with pytest.raises(ValueError, match="is a rehearsal"):
        pages.keep(tmp_path / "tried")
    with pytest.raises(ValueError, match="cannot be read"):
        pages.keep(tmp_path / "nowhere")


def test_the_page_of_cards_is_made_of_results():
    text = (pages.HERE / "README.md").read_text(encoding="utf-8")
    assert pages.page().strip() == text.partition(BEGIN)[2].partition(END)[0].strip()
