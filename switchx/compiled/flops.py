# SPDX-License-Identifier: Apache-2.0
"""FLOPs of a compiled program, counted in its HLO text rather than by a formula.

XLA's own `cost_analysis` counts the body of a loop once, however often it runs.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction

import numpy as np

from switchx.compiled.hlo import NO_SHARES, Instruction, parse

# The FLOPs that a TPU kernel declares (`pl.CostEstimate`).
_KERNEL = re.compile(r'"tpu_custom_call".*"cost_estimate":\{"flops":"(\d+)"')
# GPU products that do not state FLOPs: kernels, cuDNN's attention, cuBLAS.
_UNCOUNTED = re.compile(
    r'custom_call_target="(mosaic_gpu|__gpu\$xla\.gpu\.triton|__cudnn|__cublas)'
)
_WINDOW = (("stride", 1), ("pad", 0), ("lhs_dilate", 1), ("rhs_dilate", 1))


def matrix_flops(
    hlo: str,
    *,
    trips: int | None = None,
    shares: Mapping[str, Fraction] = NO_SHARES,
    kernel_share: Fraction = Fraction(1),
) -> int:
    """Adds up 2 m n k of every matrix product that a run of the program executes.

    The TPU compiler turns products into convolutions; these count what they multiply, without
    padding and dilation. A TPU's kernels count the FLOPs that they declare. In a conditional,
    the most expensive branch counts.

    Args:
        hlo: HLO text of the program, as `compiled.as_text()`.
        trips: number of trips of a loop whose end depends on the data. For nested loops it is
            the total trips of the innermost one, as loops over experts and over each expert's
            rows run once per row.
        shares: see `Program.sum_of_run`.
        kernel_share: share of the rows counted by kernels that the data lets them multiply.

    Raises:
        ValueError: a loop whose end depends on the data has a product in it, and `trips` is
            None.
    """

    def own(each: Instruction) -> Counter | None:
        flops = product_flops(each)
        if not flops and each.opcode == "custom-call" and (match := _KERNEL.search(each.rest)):
            flops = int(match[1]) * kernel_share
        return Counter(outside=flops) if flops else None

    def of_data_loop(turn: Counter) -> Counter:
        return Counter(inside=turn["outside"] * trips + turn["inside"])

    of_data_loop = None if trips is None else of_data_loop
    return round(parse(hlo).sum_of_run(own, shares=shares, of_data_loop=of_data_loop).total())


def has_uncounted_products(hlo: str) -> bool:
    """Whether a program has products that `matrix_flops` cannot see."""
    return _UNCOUNTED.search(hlo) is not None


def product_flops(each: Instruction) -> int:
    """2 m n k of an instruction that is a matrix product; 0 for all others."""
    if each.opcode == "dot":
        (result,), left = each.arrays, each.operands[0].arrays[0].shape
        contracted = re.findall(r"\d+", each.attributes["lhs_contracting_dims"])
        return 2 * math.prod(result.shape) * math.prod(left[int(axis)] for axis in contracted)
    return _convolution_flops(each) if each.opcode == "convolution" else 0


def _convolution_flops(each: Instruction) -> int:
    """FLOPs of one convolution; a batch of products is a dilated convolution."""
    left, right, output = (one.arrays[0].shape for one in (*each.operands, each))
    all_labels = re.split("_|->", each.attributes["dim_labels"])
    _, right_labels, output_labels = all_labels
    window = dict(re.findall(r"(\w+)=([\d_x-]+)", each.attributes.get("window", "")))
    flops = 2 * output[output_labels.index("b")] * output[output_labels.index("f")]
    flops *= right[right_labels.index("i")]
    for axis in range(len(left) - 2):
        # Only the padding before the input is read.
        stride, padding, left_dilation, right_dilation = (
            int(window[name].split("x")[axis].partition("_")[0]) if name in window else default
            for name, default in _WINDOW
        )
        size, kernel, outputs = (
            sizes[labels.index(str(axis))]
            for sizes, labels in zip((left, right, output), all_labels, strict=True)
        )
        # Pairs of an output and a kernel element that meet an input element.
        index = np.arange(outputs)[:, None] * stride + np.arange(kernel)[None] * right_dilation
        index -= padding
        is_inside = (index >= 0) & (index < (size - 1) * left_dilation + 1)
        flops *= int(np.sum(is_inside & (index % left_dilation == 0)))
    return flops
