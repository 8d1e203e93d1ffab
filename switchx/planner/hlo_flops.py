# SPDX-License-Identifier: Apache-2.0
"""FLOPs of the matrix products in a compiled program, every turn of a loop counted.

XLA's own `cost_analysis` counts the body of a loop once, however often it runs.
"""

import math
import re

from switchx.partitioning.hlo_collectives import CALLED, TRIPS, computations_of

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (?:\w+\[([\d,]*)\]|\()")
_DOT = re.compile(r" dot\(%?([\w.-]+), .*lhs_contracting_dims=\{([\d,]*)\}")


def matrix_flops(hlo: str, *, turns: int | None = None) -> int:
    """2 m n k for every dot that runs, of `compiled.as_text()`.

    Of a conditional's branches the most expensive one counts.

    Args:
        turns: of loops that end when the data says so; of nested ones, of the innermost
            altogether, as loops over experts and over each one's rows turn once a row.

    Raises:
        ValueError: there is such a loop with a product in it, and `turns` is None.
    """
    computations, entry = computations_of(hlo)
    return sum(_Counter(computations, turns).flops(entry))


class _Counter:
    """FLOPs of a computation: outside of loops that the data ends, and inside of them."""

    def __init__(self, computations: dict[str, list[str]], turns: int | None):
        self._computations = computations
        self._turns = turns
        self._known: dict[str, tuple[int, int]] = {}

    def flops(self, name: str) -> tuple[int, int]:
        if name not in self._known:
            lines = self._computations[name]
            shapes = {
                match[1]: [int(n) for n in match[2].split(",") if n]
                for line in lines
                if (match := _INSTRUCTION.match(line)) and match[2] is not None
            }
            each = [self._of(line, shapes) for line in lines]
            self._known[name] = sum(out for out, _ in each), sum(inside for _, inside in each)
        return self._known[name]

    def _of(self, line: str, shapes: dict[str, list[int]]) -> tuple[int, int]:
        if dot := _DOT.search(line):
            contracted = [shapes[dot[1]][int(axis)] for axis in dot[2].split(",") if axis]
            return 2 * math.prod(shapes[_INSTRUCTION.match(line)[1]]) * math.prod(contracted), 0
        if not (called := CALLED.search(line)):
            return 0, 0
        names = [name.strip().lstrip("%") for name in called[1].split(",")]
        outside, inside = max((self.flops(name) for name in names), key=sum)
        if " while(" not in line or outside + inside == 0:
            return outside, inside
        if trips := TRIPS.search(line):
            return outside * int(trips[1]), inside * int(trips[1])
        if self._turns is None:
            raise ValueError(
                f"a loop does not say how often it turns; give turns: {line.strip()[:200]}"
            )
        return 0, outside * self._turns + inside
