# SPDX-License-Identifier: Apache-2.0
"""FLOPs of the matrix products in a compiled program, every turn of a loop counted.

XLA's own `cost_analysis` counts the body of a loop once, however often it runs.
"""

import math
import re

import numpy as np

from switchx.partitioning.hlo_collectives import CALLED, computations_of, turns_of

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (?:\w+\[([\d,]*)\]|\()")
_CONVOLUTION = re.compile(
    r" convolution\(%?([\w.-]+), %?([\w.-]+)\)(?:, window=\{([^}]*)\})?.*?"
    r" dim_labels=(\w+)_(\w+)->(\w+)"
)
_DOT = re.compile(r" dot\(%?([\w.-]+), .*lhs_contracting_dims=\{([\d,]*)\}")


def matrix_flops(hlo: str, *, turns: int | None = None) -> int:
    """2 m n k for every product that runs, of `compiled.as_text()`.

    TPUs have convolutions where there were products; these count what they multiply, without
    padding and holes. Of a conditional's branches the most expensive one counts.

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
        if convolution := _CONVOLUTION.search(line):
            name = _INSTRUCTION.match(line)[1]
            return _convolution_flops(convolution, shapes[name], shapes), 0
        if not (called := CALLED.search(line)):
            return 0, 0
        names = [name.strip().lstrip("%") for name in called[1].split(",")]
        outside, inside = max((self.flops(name) for name in names), key=sum)
        if " while(" not in line or outside + inside == 0:
            return outside, inside
        if (turns := turns_of(line, self._computations)) is not None:
            return outside * turns, inside * turns
        if self._turns is None:
            raise ValueError(
                f"a loop does not say how often it turns; give turns: {line.strip()[:200]}"
            )
        return 0, outside * self._turns + inside


def _convolution_flops(convolution: re.Match, output: list[int], shapes) -> int:
    """Of one convolution; a batch of products is one with holes between the matrices."""
    left, right = shapes[convolution[1]], shapes[convolution[2]]
    left_labels, right_labels, output_labels = convolution.group(4, 5, 6)
    window = dict(re.findall(r"(\w+)=([\d_x-]+)", convolution[3] or ""))
    flops = 2 * output[output_labels.index("b")] * output[output_labels.index("f")]
    flops *= right[right_labels.index("i")]
    for axis in range(len(left) - 2):
        flops *= _products(
            left[left_labels.index(str(axis))],
            right[right_labels.index(str(axis))],
            output[output_labels.index(str(axis))],
            *(_of_axis(window, name, axis, default) for name, default in _WINDOW),
        )
    return flops


_WINDOW = (("stride", "1"), ("pad", "0_0"), ("lhs_dilate", "1"), ("rhs_dilate", "1"))


def _of_axis(window: dict[str, str], name: str, axis: int, default: str) -> int:
    """One axis' setting; of a padding the part before."""
    given = window[name].split("x")[axis] if name in window else default
    return int(given.partition("_")[0])


def _products(size, kernel, output, stride, padding, left_hole, right_hole) -> int:
    """Pairs of a place of the output and one of the kernel that meet a number, on one axis."""
    place = np.arange(output)[:, None] * stride + np.arange(kernel)[None] * right_hole - padding
    is_there = (place >= 0) & (place < (size - 1) * left_hole + 1) & (place % left_hole == 0)
    return int(np.sum(is_there))
