# SPDX-License-Identifier: Apache-2.0
"""Packing: several examples share a row, each a segment that attention keeps apart.

First fit over a few open rows. Grain has the same algorithm, but as a dataset whose state
is its own; here the examples of a row are drawn from a stream that can be put back to
where a window of rows began, which is all the state that packing needs.
"""

from typing import Protocol

from switchx.data.features import Example, Features

OPEN_ROWS = 8


class ExampleSource(Protocol):
    """Examples in order, with a look at the next one."""

    def peek(self) -> Example | None:
        """The next example, which stays; None after the last one."""

    def take(self) -> Example:
        """The next example, which is used up."""


def pack_rows(
    examples: ExampleSource, features: Features, num_rows: int = OPEN_ROWS
) -> list[list[Example]]:
    """Fills up to `num_rows` rows; each example goes into the first with room for it.

    An encoder-decoder's example has room where both its sides do. The first example that
    has room nowhere closes the rows, and stays in the stream for the next ones.

    Args:
        examples: none of which is too long for an empty row.

    Returns:
        The rows that hold any example; none only if the stream is at its end.
    """
    rows, free = [], []
    while (example := examples.peek()) is not None:
        size = features.size(example)
        row = next((i for i, room in enumerate(free) if _fits(size, room)), len(rows))
        if row == num_rows:
            break
        if row == len(rows):
            rows.append([])
            free.append(features.capacity)
        rows[row].append(examples.take())
        free[row] = tuple(have - used for have, used in zip(free[row], size, strict=True))
    return rows


def _fits(size: tuple[int, ...], room: tuple[int, ...]) -> bool:
    return all(used <= have for used, have in zip(size, room, strict=True))
