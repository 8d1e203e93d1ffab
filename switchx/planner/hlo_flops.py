# SPDX-License-Identifier: Apache-2.0
"""FLOPs of the matrix products in a compiled program, every turn of a loop counted.

XLA's own `cost_analysis` counts the body of a loop once, however often it runs.
"""

import math
import re

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (?:\w+\[([\d,]*)\]|\()")
_DOT = re.compile(r" dot\(%?([\w.-]+), .*lhs_contracting_dims=\{([\d,]*)\}")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|branch_computations)=\{?(%?[\w.-]+(?:, ?%[\w.-]+)*)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


def matrix_flops(hlo: str, *, turns: int | None = None) -> int:
    """2 m n k for every dot that runs, of `compiled.as_text()`.

    Of a conditional's branches the most expensive one counts.

    Args:
        turns: of loops that end when the data says so.

    Raises:
        ValueError: there is such a loop with a product in it, and `turns` is None.
    """
    computations, entry = _computations(hlo)
    return _Counter(computations, turns).flops(entry)


def _computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation, and the name of the entry."""
    computations, current, entry = {}, [], ""
    for line in hlo.splitlines():
        if match := _COMPUTATION.match(line):
            current = computations[match[2]] = []
            entry = match[2] if match[1] else entry
        elif "=" in line:
            current.append(line)
    return computations, entry


class _Counter:
    def __init__(self, computations: dict[str, list[str]], turns: int | None):
        self._computations = computations
        self._turns = turns
        self._known: dict[str, int] = {}

    def flops(self, name: str) -> int:
        if name not in self._known:
            lines = self._computations[name]
            shapes = {
                match[1]: [int(n) for n in match[2].split(",") if n]
                for line in lines
                if (match := _INSTRUCTION.match(line)) and match[2] is not None
            }
            self._known[name] = sum(self._of(line, shapes) for line in lines)
        return self._known[name]

    def _of(self, line: str, shapes: dict[str, list[int]]) -> int:
        if dot := _DOT.search(line):
            contracted = [shapes[dot[1]][int(axis)] for axis in dot[2].split(",") if axis]
            return 2 * math.prod(shapes[_INSTRUCTION.match(line)[1]]) * math.prod(contracted)
        if not (called := _CALLED.search(line)):
            return 0
        names = [name.strip().lstrip("%") for name in called[1].split(",")]
        each = max(self.flops(name) for name in names)
        if " while(" not in line or each == 0:
            return each
        trips = _TRIPS.search(line)
        if trips is None and self._turns is None:
            raise ValueError(
                f"a loop does not say how often it turns; give turns: {line.strip()[:200]}"
            )
        return each * (int(trips[1]) if trips else self._turns)
