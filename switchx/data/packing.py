# SPDX-License-Identifier: Apache-2.0
"""Packing: several examples in one row, each in the first row that holds it."""

from typing import Protocol

from switchx.data.features import Example, Features

# Number of rows that are filled side by side.
OPEN_ROWS = 8


class Examples(Protocol):
    """Examples one by one, with a look at the next one; None is their end."""

    def peek(self) -> Example | None: ...
    def take(self) -> Example | None: ...


def pack_rows(
    examples: Examples, features: Features, num_rows: int = OPEN_ROWS
) -> list[list[Example]]:
    """Fills up to `num_rows` rows; each example goes into the first that has room for it.

    The first example that fits in no row closes the rows, and stays in the stream.

    Args:
        examples: examples, none of which is too long for an empty row.

    Returns:
        The rows that hold any example; none only if the stream is at its end.
    """
    rows, free = [], []
    while (example := examples.peek()) is not None:
        size = features.size(example)
        row = next((i for i, have in enumerate(free) if fits(size, have)), len(rows))
        if row == num_rows:
            break
        if row == len(rows):
            rows.append([])
            free.append(features.capacity)
        rows[row].append(examples.take())
        free[row] = tuple(have - used for have, used in zip(free[row], size, strict=True))
    return rows


def fits(size: tuple[int, ...], free: tuple[int, ...]) -> bool:
    """Whether an example's tokens, by feature, fit into what is free."""
    return all(used <= have for used, have in zip(size, free, strict=True))
