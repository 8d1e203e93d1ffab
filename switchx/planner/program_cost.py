# SPDX-License-Identifier: Apache-2.0
"""What a program computes, counted in the program and not by a formula: FLOPs, expert slots.

XLA's own `cost_analysis` counts the body of a loop once, however often it runs. An expert's
block of rows has empty slots where its capacity was rounded up; what is computed for them is
lost (Fedus et al. 2021, arXiv:2101.03961, section 2.2).
Dims: E expert, R rows of an expert's block, D model, F feed-forward
"""

import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction

import numpy as np

from switchx.models.config import ModelConfig
from switchx.partitioning.hlo_collectives import (
    NO_SHARES,
    branch_share,
    called_by,
    computations_of,
    trip_count,
)
from switchx.partitioning.ticks import PIPE

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (?:\w+\[([\d,]*)\]|\()")
_CONVOLUTION = re.compile(
    r" convolution\(%?([\w.-]+), %?([\w.-]+)\)(?:, window=\{([^}]*)\})?.*?"
    r" dim_labels=(\w+)_(\w+)->(\w+)"
)
# What a TPU's kernel says of itself (`pl.CostEstimate`).
_KERNEL = re.compile(r'"tpu_custom_call".*"cost_estimate":\{"flops":"(\d+)"')
_DOT = re.compile(r" dot\(%?([\w.-]+), .*lhs_contracting_dims=\{([\d,]*)\}")


def matrix_flops(
    hlo: str,
    *,
    trips: int | None = None,
    shares: Mapping[str, Fraction] = NO_SHARES,
    kernel_share: Fraction = Fraction(1),
) -> int:
    """Adds up 2 m n k of every matrix product that a run of the program executes.

    TPUs have convolutions where there were products; these count what they multiply, without
    padding and dilation. A TPU's kernels count as they say. Of a conditional's branches the
    most expensive one counts.

    Args:
        hlo: of `compiled.as_text()`.
        trips: of loops that end when the data says so; of nested ones, of the innermost
            altogether, as loops over experts and over each one's rows run once a row.
        shares: of conditionals that tables decide (`hlo_collectives.branch_share`).
        kernel_share: of the rows that kernels count, those that the data lets them multiply.

    Raises:
        ValueError: there is such a loop with a product in it, and `trips` is None.
    """
    computations, entry = computations_of(hlo)
    return round(sum(_Counter(computations, trips, shares, kernel_share).flops(entry)))


def instruction_flops(computations: dict[str, list[str]]) -> Callable[[str, str], int]:
    """2 m n k of an instruction's products, by its computation and line; kernels count none.

    Args:
        computations: of `hlo_collectives.computations_of`; loops in them have trip counts.
    """
    counter = _Counter(computations, None, NO_SHARES, Fraction(0))
    return lambda computation, line: sum(counter.of_line(computation, line))


class _Counter:
    """FLOPs of a computation: outside of loops that the data ends, and inside of them."""

    def __init__(
        self,
        computations: dict[str, list[str]],
        trips: int | None,
        shares: Mapping[str, Fraction],
        kernel_share: Fraction,
    ):
        self._computations = computations
        self._trips = trips
        self._shares = shares
        self._kernel_share = kernel_share
        self._known: dict[str, tuple[int, int]] = {}
        self._shapes: dict[str, dict[str, list[int]]] = {}

    def flops(self, name: str) -> tuple[int, int]:
        if name not in self._known:
            each = [self.of_line(name, line) for line in self._computations[name]]
            self._known[name] = sum(out for out, _ in each), sum(inside for _, inside in each)
        return self._known[name]

    def of_line(self, computation: str, line: str) -> tuple[int, int]:
        if computation not in self._shapes:
            self._shapes[computation] = {
                match[1]: [int(n) for n in match[2].split(",") if n]
                for each in self._computations[computation]
                if (match := _INSTRUCTION.match(each)) and match[2] is not None
            }
        return self._of(line, self._shapes[computation])

    def _of(self, line: str, shapes: dict[str, list[int]]) -> tuple[int, int]:
        if dot := _DOT.search(line):
            contracted = [shapes[dot[1]][int(axis)] for axis in dot[2].split(",") if axis]
            return 2 * math.prod(shapes[_INSTRUCTION.match(line)[1]]) * math.prod(contracted), 0
        if convolution := _CONVOLUTION.search(line):
            name = _INSTRUCTION.match(line)[1]
            return _convolution_flops(convolution, shapes[name], shapes), 0
        if kernel := _KERNEL.search(line):
            return int(kernel[1]) * self._kernel_share, 0
        if not (names := called_by(line)):
            return 0, 0
        outside, inside = max((self.flops(name) for name in names), key=sum)
        if " conditional(" in line:
            share = branch_share(line, self._shares)
            return outside * share, inside * share
        if " while(" not in line or outside + inside == 0:
            return outside, inside
        if (trips := trip_count(line, self._computations)) is not None:
            return outside * trips, inside * trips
        if self._trips is None:
            raise ValueError(
                f"a loop has no known trip count; give trips: {line.strip()[:200]}"
            )
        return 0, outside * self._trips + inside


def _convolution_flops(convolution: re.Match, output: list[int], shapes) -> int:
    """FLOPs of one convolution; a batch of products is one that is dilated."""
    left, right = shapes[convolution[1]], shapes[convolution[2]]
    left_labels, right_labels, output_labels = convolution.group(4, 5, 6)
    window = dict(re.findall(r"(\w+)=([\d_x-]+)", convolution[3] or ""))
    flops = 2 * output[output_labels.index("b")] * output[output_labels.index("f")]
    flops *= right[right_labels.index("i")]
    for axis in range(len(left) - 2):
        # Of a padding the part before.
        stride, padding, left_dilation, right_dilation = (
            int(window[name].split("x")[axis].partition("_")[0]) if name in window else default
            for name, default in _WINDOW
        )
        size, kernel, outputs = (
            sizes[labels.index(str(axis))]
            for sizes, labels in (
                (left, left_labels), (right, right_labels), (output, output_labels)
            )
        )  # fmt: skip
        # Pairs of an output and a kernel element that meet an input element.
        index = np.arange(outputs)[:, None] * stride + np.arange(kernel)[None] * right_dilation
        index -= padding
        is_inside = (index >= 0) & (index < (size - 1) * left_dilation + 1)
        flops *= int(np.sum(is_inside & (index % left_dilation == 0)))
    return flops


_WINDOW = (("stride", 1), ("pad", 0), ("lhs_dilate", 1), ("rhs_dilate", 1))


def executed_slots(jaxpr, config: ModelConfig) -> float:
    """Rows that pass an expert in one run of a traced forward pass, over all devices.

    They are those of the products `[E, R, D] x [E, D, F]`: no other product of a Transformer
    has one batch dimension and contracts D. Inside of `jax.shard_map` every device has its
    own rows, or its part of F.

    Args:
        jaxpr: of `forward` (`jax.jit(...).trace(...).jaxpr`).

    Returns:
        0 where rows are not in equal blocks: there, none is empty.
    """
    d_ff = config.switch.d_ff or config.d_ff
    inputs = 2 if config.is_gated else 1
    return _rows(jaxpr.jaxpr, config.d_model, d_ff, inputs)


def _rows(jaxpr, d_model: int, d_ff: int, inputs: int) -> float:
    rows = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            rows += _expert_rows(equation, d_model, d_ff, inputs)
            continue
        inside = [_rows(one, d_model, d_ff, inputs) for one in _called(equation)]
        if not inside:
            continue
        times = 1
        if equation.primitive.name == "scan":
            times = equation.params["length"]
        elif equation.primitive.name == "shard_map":
            mesh = equation.params["mesh"]
            # Stages have layers of their own, not tokens.
            times = mesh.size // mesh.shape.get(PIPE, 1)
        is_choice = equation.primitive.name == "cond"
        rows += times * (max(inside) if is_choice else sum(inside))
    return rows


def _expert_rows(equation, d_model: int, d_ff: int, inputs: int) -> float:
    """E R of a product of experts' inputs; all `inputs` of them together count a row once.

    A part of F counts in part. Where that part is as long as D, the product with w_out has the
    same shapes and takes its share.
    """
    (contracted, _), (batch, _) = equation.params["dimension_numbers"]
    left, right = (variable.aval.shape for variable in equation.invars)
    if len(batch) != 1 or len(left) != 3 or len(right) != 3:
        return 0.0
    experts, inner = left[batch[0]], math.prod(left[axis] for axis in contracted)
    rows = math.prod(left) // (experts * inner)
    features = math.prod(right) // (experts * inner)
    if inner != d_model or d_ff % features:
        return 0.0
    alike = inputs + 1 if features == inner else inputs
    return experts * rows * features / d_ff / alike


def _called(equation) -> list:
    """The programs that an equation runs."""
    found = []
    for value in equation.params.values():
        for one in value if isinstance(value, tuple | list) else [value]:
            one = getattr(one, "jaxpr", one)
            if hasattr(one, "eqns"):
                found.append(one)
    return found
