# SPDX-License-Identifier: Apache-2.0
"""Lines without a terminal; the bar with one, step, loss, tokens per second, time left."""

import io
import logging
import re

import pytest
from rich.console import Console

from switchx import progress
from switchx.progress import NotebookReporter, TerminalReporter, reporter_here

METRICS = {
    "loss": 2.34567,
    "tokens_per_s": 12345.6,
    "accuracy": 0.25,
    "dropped_fraction": 0.125,
}


class Clock:
    """Seconds that pass when told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def reporter_on(clock, *, is_terminal: bool) -> tuple[TerminalReporter, io.StringIO]:
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=is_terminal, width=100, color_system=None, highlight=False,
        legacy_windows=False, _environ={"TERM": "xterm"},
    )  # fmt: skip
    return TerminalReporter(console, clock), out


def test_lines_have_the_seconds_since_the_start(clock):
    reporter, out = reporter_on(clock, is_terminal=False)
    with reporter:
        reporter.note("loading")
        clock.now += 12.34
        reporter.begin(0, 40)
        reporter.stepped(20)
        reporter.logged(20, METRICS)
        reporter.logged(21, {"loss": float("nan"), "tokens_per_s": 3.0, "skipped_steps": 2})
        reporter.evaluated(20, {"neg_log_perplexity": -1.5, "accuracy": 0.5})
    assert out.getvalue() == (
        "   0.0s  loading\n"
        "  12.3s  step    20  loss 2.346  accuracy 0.250  dropped 12.5%  12,346 tokens/s\n"
        "  12.3s  step    21  loss nan  skipped 2  3 tokens/s\n"
        "  12.3s  step    20  validation: negative log perplexity -1.500  accuracy 0.500\n"
    )
    assert max(map(len, out.getvalue().splitlines())) <= 80


def test_lines_are_neither_broken_nor_markup_and_log_records_are_some(clock):
    reporter, out = reporter_on(clock, is_terminal=False)
    text = "expected float32[8] under [model], [/bold] " + "long " * 40 + "end"
    with reporter:
        reporter.note(text)
    assert out.getvalue() == f"   0.0s  {text}\n"
    reporter, out = reporter_on(clock, is_terminal=False)
    with reporter:
        logging.getLogger("switchx.data").info("preparing text")
        logging.getLogger("absl").warning("a library warns")
        logging.getLogger("absl").warning("%s of %d", "3")  # its fault, which ends nothing
    assert out.getvalue() == ("   0.0s  preparing text\n   0.0s  warning: a library warns\n")


def last_bar(out: io.StringIO) -> str:
    """The last line with the time elapsed, a text, and so on."""
    lines = out.getvalue().replace("\r", "\n").splitlines()
    return [line for line in lines if re.search(r"\d:\d\d:\d\d \w", line)][-1]


def test_bar_shows_step_loss_rate_and_time_left(clock):
    reporter, out = reporter_on(clock, is_terminal=True)
    with reporter:
        reporter.begin(0, 40)
        reporter._progress.refresh()
        assert "compiling" in last_bar(out)
        clock.now += 50  # compiles
        reporter.stepped(1)
        reporter._progress.refresh()
        assert "left" not in last_bar(out)
        clock.now += 4
        reporter.stepped(5)
        reporter.logged(5, METRICS)
        reporter._progress.refresh()
        bar = last_bar(out)
        assert "step 5/40" in bar
        assert bar.rstrip().endswith("loss 2.346  12,346 tokens/s 0:00:35 left")
        assert len(bar) <= 110  # the width, and what moves the cursor


def test_time_left_of_a_resumed_run_counts_its_own_steps(clock):
    reporter, _ = reporter_on(clock, is_terminal=True)
    reporter.begin(1000, 3000)
    for step in (1001, 1002, 1003):
        reporter.stepped(step)
        clock.now += 10
    reporter.stepped(1004)
    task = reporter._progress.tasks[0]
    assert task.fields["time_left"] == "5:32:40 left"  # 1996 steps of 10 s
    assert (task.completed, task.total) == (1004, 3000)
    reporter.begin(0, 257)  # other work, at a pace of its own
    clock.now += 12
    reporter.stepped(1)
    assert reporter._progress.tasks[0].fields["time_left"] == "0:51:12 left"


def test_bar_goes_when_nothing_was_trained_and_stays_after_training(clock):
    reporter, out = reporter_on(clock, is_terminal=True)
    with reporter:
        reporter._progress.refresh()
        assert "starting" in last_bar(out)
        reporter.note("evaluating")
        before = len(out.getvalue())
    assert "━" not in out.getvalue()[before:]
    reporter, out = reporter_on(clock, is_terminal=True)
    with reporter:
        reporter.begin(0, 2)
        reporter.stepped(2)
        before = len(out.getvalue())
    assert "step 2/2" in out.getvalue()[before:]


class Display:
    """Stands in for a notebook's front end: what is displayed, and its states."""

    def __init__(self):
        self.displayed, self.updates = [], []

    def __call__(self, shown, display_id):
        self.displayed.append(shown)
        self.updates.append(shown._repr_html_())
        return self

    def update(self, shown):
        self.updates.append(shown._repr_html_())


@pytest.fixture
def display(monkeypatch):
    display = Display()
    monkeypatch.setattr("IPython.display.display", display)
    return display


def test_a_notebook_has_one_display_with_a_bar_and_lines(clock, display, capfd):
    with NotebookReporter(clock) as reporter:
        reporter.note("expected <float32> & [model]")
        assert "<progress" not in display.updates[-1]
        reporter.begin(0, 40)
        reporter.logged(20, METRICS)
        for step in range(20, 23):
            clock.now += 1
            reporter.stepped(step)
        logging.getLogger("absl").warning("a library warns")
        before = len(display.updates)
        reporter.stepped(22)  # at once: not drawn again
        assert len(display.updates) == before
    assert len(display.displayed) == 1 and capfd.readouterr() == ("", "")
    last = display.updates[-1]
    assert '<progress value="22" max="40"' in last
    assert "step 22/40  loss 2.346  12,346 tokens/s</code>" in last  # no time is left
    assert "0:00:18 left" in display.updates[-2]
    assert "expected &lt;float32&gt; &amp; [model]\n" in last
    assert "   3.0s  warning: a library warns" in last
    assert repr(reporter).splitlines()[0] == "step 22/40  loss 2.346  12,346 tokens/s"


def test_a_notebook_says_how_many_lines_it_leaves_out(clock, display):
    with NotebookReporter(clock) as reporter:
        for number in range(progress.SHOWN_LINES + 1234):
            reporter.note(f"line {number}")
        reporter.begin(0, 5)
    assert "<progress" not in display.updates[-1]  # nothing was trained
    shown = repr(reporter).splitlines()
    assert shown[0] == "1,234 earlier lines are not shown" and shown[1].endswith("line 1234")
    assert len(shown) == 1 + progress.SHOWN_LINES


def test_where_one_is_decides_what_is_shown(monkeypatch):
    assert isinstance(reporter_here(), TerminalReporter)
    monkeypatch.setattr("IPython.get_ipython", lambda: None)
    assert not progress.in_notebook()
    kernel = type("Shell", (), {"kernel": object()})
    monkeypatch.setattr("IPython.get_ipython", kernel)
    assert isinstance(reporter_here(), NotebookReporter)
    monkeypatch.setattr("jax.process_index", lambda: 2)
    assert isinstance(reporter_here(), progress.SilentReporter)
