# SPDX-License-Identifier: Apache-2.0
"""Shards are written in order, from where the output ends, and progress is told."""

import io

import pytest
from rich.console import Console

from switchx.cli.progress import TerminalReporter
from switchx.cli.text.lines import BATCHES_PER_SHARD, run_in_shards
from switchx.cli.text.resumable_output import ResumableOutput

INPUTS = [str(i) for i in range(3 * BATCHES_PER_SHARD + 2)]


class Clock:
    """One that goes on by four seconds a look."""

    now_s = 0

    def __call__(self):
        self.now_s += 4
        return self.now_s


def backwards(shard, first):
    """As decoding does, the last first."""
    for index in reversed(range(len(shard))):
        yield first + index, f"<{shard[index]}>"


def run(path, compute, inputs=INPUTS):
    said = Console(file=io.StringIO(), width=80)
    with (
        TerminalReporter(said, unit="line") as reporter,
        ResumableOutput(path, inputs, {}) as output,
    ):
        run_in_shards(inputs, output, compute, reporter, batch_size=1, clock=Clock())
    return said.file.getvalue()


def test_lines_are_in_order_and_progress_is_told(tmp_path):
    said = run(tmp_path / "out.txt", backwards)
    assert (tmp_path / "out.txt").read_text().split() == [f"<{each}>" for each in INPUTS]
    assert "of 26 lines" in said and "left" in said


@pytest.mark.parametrize("shards", [0, 1, 2])
def test_killed_at_any_time_the_result_is_the_same(tmp_path, monkeypatch, shards):
    """Killed in a shard, and between the shard and the note that it is there."""
    path, seen = tmp_path / "out.txt", []

    def dies(shard, first):
        if first == shards * BATCHES_PER_SHARD:
            raise KeyboardInterrupt
        yield from backwards(shard, first)

    def remembers(shard, first):
        seen.append(first)
        yield from backwards(shard, first)

    with pytest.raises(KeyboardInterrupt):
        run(path, dies)
    assert len(path.read_text().split()) == shards * BATCHES_PER_SHARD
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(ResumableOutput, "_add", lambda *_: 1 / 0)
        run(path, backwards)
    said = run(path, remembers)
    assert path.read_text().split() == [f"<{each}>" for each in INPUTS]
    assert seen[0] == shards * BATCHES_PER_SHARD
    assert ("lines are there already" in said) == bool(shards)
    seen.clear()
    run(path, remembers)
    assert seen == []  # nothing is left to do
