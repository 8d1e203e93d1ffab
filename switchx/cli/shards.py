# SPDX-License-Identifier: Apache-2.0
"""Many inputs in shards: computed in any order, written in theirs, with progress."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

# A shard has several batches, so that each has inputs of about one length.
BATCHES_PER_SHARD = 8
NOTE_EVERY_S = 10


def run_in_shards(
    inputs: Sequence[Any],
    output,
    compute: Callable[[Sequence[Any], int], Iterable[tuple[int, str]]],
    reporter,
    *,
    batch_size: int,
    clock=time.perf_counter,
) -> None:
    """Writes a line for each input from `output.num_lines` on, a shard at a time.

    Args:
        output: a `ResumableOutput` or a `StandardOutput`.
        compute: gives each input's number and its line, of a shard and its first number.
        reporter: a `TerminalReporter`.
    """
    first, noted_s = output.num_lines, clock()
    done, total = first, len(inputs)
    if first:
        reporter.note(f"{first:,} of {total:,} lines are there already")
    reporter.begin(first, total)
    while done < total:
        shard = inputs[done : done + BATCHES_PER_SHARD * batch_size]
        lines, first_number = [None] * len(shard), done
        for number, line in compute(shard, first_number):
            lines[number - first_number] = line
            done += 1
            reporter.stepped(done)
            if clock() - noted_s >= NOTE_EVERY_S:
                noted_s = clock()
                reporter.note(f"{done:,} of {total:,} lines  {reporter.time_left(done)}")
        output.append(lines)
