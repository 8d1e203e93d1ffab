# SPDX-License-Identifier: Apache-2.0
"""Kernels that a compiled program launches, the bytes that they move, and their seconds.

They are read off the HLO text: XLA's `cost_analysis` counts a loop once, and believes what a
Pallas kernel says about itself. Here a kernel reads each operand once and writes each result
once; of what it gathers or slices, only the part that it takes counts.
Arrays that a TPU's compiler keeps in vector memory (`S(1)` in a layout) move nothing. A copy
that nothing reads is not counted: at a program's end it puts an argument back where the next
run starts with it (cross-program prefetch), and that run does not copy it again. Pallas
kernels are looked up among the launches recorded while the program was traced
(`pallas_kernels/launches.py`), which count the copies and the products of their grids.

Seconds are an estimate. A TPU's compiler writes the cycles that it expects beside most of its
kernels; where it does not (sorts, gathers, scatters, copies), and for Pallas kernels, a
roofline is used: bytes over the memory's rate, or products over the chip's, whichever takes
longer.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from pallas_kernels.launches import Launch
from switchx.compiled.flops import product_flops
from switchx.compiled.hlo import Array, Computation, Instruction, parse, within

PALLAS_TARGETS = ("tpu_custom_call", "mosaic_gpu")

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
# Opcodes that name values and do no work.
_FREE = {
    "parameter",
    "constant",
    "bitcast",
    "tuple",
    "get-tuple-element",
    "after-all",
    "partition-id",
    "replica-id",
    "opt-barrier",
}
# Parts that are already adjacent in memory.
_FREE_TARGETS = {"ConcatBitcast"}
_TAKES_PARTS = {"gather", "dynamic-slice", "slice"}
_LOOKED_THROUGH = {"bitcast", "reshape", "copy", "transpose", "convert"}
_HLO_DTYPES = {
    "bfloat16": "bf16", "float16": "f16", "float32": "f32", "int32": "s32", "int8": "s8",
    "int4": "s4", "uint8": "u8", "uint32": "u32", "bool": "pred", "float8_e4m3fn": "f8e4m3fn",
}  # fmt: skip


# A kernel of XLA's own on TPUs: the softmax of float32 scores times the values.
ONLINE_SOFTMAX = "online-softmax"


@dataclasses.dataclass(frozen=True)
class Rates:
    """Rates of a chip per second: its matrix units, its memory and its cycles."""

    flops_per_s: float
    bytes_per_s: float
    cycles_per_s: float


@dataclasses.dataclass(frozen=True)
class Moved:
    """The kernels of one run of a program, and the bytes that they move.

    Attributes:
        kernels: number of launches of XLA's kernels, copies included, and of Pallas kernels.
        pallas_kernels: number of launches of Pallas kernels only.
        num_bytes: bytes between memory and all kernels.
        pallas_bytes: bytes between memory and the Pallas kernels.
        pallas_flops: 2 m n k of the tiles that the Pallas kernels multiply, for those that
            count them.
        compiler_s: seconds of the XLA kernels for which the compiler gives cycles.
        other_s: seconds of all other kernels, by a roofline.
        roofline_s: seconds of all kernels, by a roofline; 0 if no rates were given, like the
            two above.
    """

    kernels: int = 0
    pallas_kernels: int = 0
    num_bytes: int = 0
    pallas_bytes: int = 0
    pallas_flops: int = 0
    compiler_s: float = 0.0
    other_s: float = 0.0
    roofline_s: float = 0.0

    @property
    def estimated_s(self) -> float:
        return self.compiler_s + self.other_s


def moved_bytes(
    hlo: str,
    launches: Iterable[Launch] = (),
    group_sizes: Sequence[int] = (),
    rates: Rates | None = None,
) -> Moved:
    """Adds up the launches of one run of the program and the bytes that they move.

    In a conditional, the branch that moves the most bytes counts.

    Args:
        hlo: HLO text of the program, as `compiled.as_text()`.
        launches: launches of Pallas kernels, recorded while the program was traced.
        group_sizes: rows of each expert, for which Pallas kernels are counted.
        rates: rates of the chip, for seconds; None computes none.

    Raises:
        ValueError: a loop has no known trip count, or a Pallas kernel was not recorded.
    """
    known = {_key_of(each): each for each in launches}
    kernels = _Kernels(known, np.asarray(group_sizes), rates)
    found = parse(hlo).sum_of_run(kernels.moved, size=lambda moved: moved["num_bytes"])
    return Moved(**found)


def _key_of(launch: Launch) -> tuple:
    def keys(arrays):
        return tuple((_HLO_DTYPES[str(each.dtype)], tuple(each.shape)) for each in arrays)

    return keys(launch.operands), keys(launch.results)


def _in_memory(array: Array) -> int:
    """Bytes of an array, 0 if it stays in vector memory."""
    return 0 if "S(1)" in array.layout else array.num_bytes


@dataclasses.dataclass(frozen=True)
class _Kernels:
    """Counts the bytes that instructions move, one by one.

    Attributes:
        launches: recorded launches of Pallas kernels, by dtypes and shapes of operands and
            results.
    """

    launches: dict[tuple, Launch]
    group_sizes: np.ndarray
    rates: Rates | None

    def moved(self, each: Instruction) -> Counter | None:
        """Fields of `Moved`; None for an instruction that counts as what it runs."""
        if each.opcode in ("while", "conditional", "call"):
            return None
        target = each.attributes.get("custom_call_target", "").strip('"')
        is_unread = each.opcode == "copy-start" and _is_unread(each)
        if each.opcode in _FREE or each.is_end or target in _FREE_TARGETS or is_unread:
            return Counter()
        if target.startswith(PALLAS_TARGETS):
            size, flops = self._of_pallas(each)
            seconds = self._roofline(size, flops)
            return Counter(
                kernels=1,
                pallas_kernels=1,
                num_bytes=size,
                pallas_bytes=size,
                pallas_flops=flops,
                other_s=seconds,
                roofline_s=seconds,
            )
        if each.opcode.endswith("-start"):
            size = _copied_bytes(each)
            seconds = self._roofline(size)
            return Counter(kernels=1, num_bytes=size, other_s=seconds, roofline_s=seconds)
        size = _kernel_bytes(each, _in_memory)
        if self.rates is None:
            return Counter(kernels=1, num_bytes=size)
        flops = sum(map(product_flops, within([each])))
        found = Counter(kernels=1, num_bytes=size, roofline_s=self._roofline(size, flops))
        if cycles := _CYCLES.search(each.rest):
            found["compiler_s"] = int(cycles[1]) / self.rates.cycles_per_s
        else:
            # Vector memory is faster than HBM, but not free: what stays there counts here.
            size = _kernel_bytes(each, lambda array: array.num_bytes)
            found["other_s"] = self._roofline(size, flops)
        return found

    def _roofline(self, num_bytes: int, flops: int = 0) -> float:
        if self.rates is None:
            return 0.0
        return max(num_bytes / self.rates.bytes_per_s, flops / self.rates.flops_per_s)

    def _of_pallas(self, each: Instruction) -> tuple[int, int]:
        operands = [one.arrays[0] for one in each.operands]
        if each.name.startswith(ONLINE_SOFTMAX):
            scores, values = operands
            flops = 2 * math.prod(scores.shape) * values.shape[-1]
            return sum(map(_in_memory, (*operands, *each.arrays))), flops
        key = tuple(
            tuple((array.dtype, array.shape) for array in arrays)
            for arrays in (operands, each.arrays)
        )
        if key not in self.launches:
            raise ValueError(
                f"a Pallas kernel was not recorded, its bytes are not known: {key}; "
                f"recorded were {list(self.launches)}"
            )
        launch = self.launches[key]
        read, written = launch.copied(self.group_sizes)
        pairs = zip((*operands, *each.arrays), (*read, *written), strict=True)
        flops = launch.flops(self.group_sizes) if launch.flops else 0
        return sum(size if _in_memory(array) else 0 for array, size in pairs), flops


def _kernel_bytes(each: Instruction, size_of: Callable[[Array], int]) -> int:
    """Bytes that one of XLA's kernels reads and writes."""
    if each.opcode == "fusion":
        [called] = each.called
        written = _written_by_fusion(called, each.arrays, size_of)
        return written + _read_by_fusion(called, each, size_of)
    written, arrays = sum(map(size_of, each.arrays)), _read(each)
    if each.opcode == "dynamic-update-slice":
        part = each.operands[1].arrays[0]
        return size_of(part) + min(written, part.num_bytes)
    if each.opcode in _TAKES_PARTS:
        first, *others = map(size_of, arrays)
        return written + min(first, written) + sum(others)
    return written + sum(map(size_of, arrays))


def _read(each: Instruction) -> list[Array]:
    """The first array of each operand, once."""
    return [one.arrays[0] for one in dict.fromkeys(each.operands) if one.arrays]


def _written_by_fusion(called: Computation, results: Sequence[Array], size_of) -> int:
    """The bytes that a fusion writes: for an array that it updates in place, only the part."""
    root = called.root
    if root.opcode == "fusion":
        return _written_by_fusion(root.called[0], results, size_of)
    parts = root.operands if root.opcode == "tuple" else [root]
    if len(parts) != len(results):  # of one instruction, such as a sort of several arrays
        return sum(map(size_of, results))
    pairs = zip(parts, results, strict=True)
    return sum(_written(each, result, size_of) for each, result in pairs)


def _written(each: Instruction, result: Array, size_of) -> int:
    """Bytes of a result that an instruction of a fusion writes."""
    while each.opcode == "bitcast":
        each = each.operands[0]
    if each.opcode == "fusion" and len(each.arrays) == 1:
        return _written_by_fusion(each.called[0], [result], size_of)
    whole = size_of(result)
    if each.opcode == "dynamic-update-slice":
        return min(whole, each.operands[1].arrays[0].num_bytes)
    return whole


def _parameter(called: Computation, number: int) -> Instruction:
    arguments = (each for each in called if each.opcode == "parameter")
    return next(each for each in arguments if int(each.arguments) == number)


def _read_by_fusion(called: Computation, fusion: Instruction, size_of) -> int:
    """The bytes that a fusion reads: for an operand that it takes parts of, only the parts."""
    total = 0
    for operand in dict.fromkeys(fusion.operands):
        if operand.arrays:
            whole = size_of(operand.arrays[0])
            each = _parameter(called, fusion.operands.index(operand))
            taken, is_result = _used(each, whole)
            total += whole if is_result else min(whole, taken)
    return total


def _used(each: Instruction, whole: int) -> tuple[int, bool]:
    """Bytes of an array that a computation takes, and whether it passes the array on."""
    total, is_result = 0, each.is_root
    for user in each.computation:
        if each not in user.operands:
            continue
        is_first = user.operands[0] is each
        is_handed_on = user.opcode in _LOOKED_THROUGH
        if user.opcode in _TAKES_PARTS and is_first:
            total += sum(array.num_bytes for array in user.arrays)
        elif user.opcode == "fusion":
            parameter = _parameter(user.called[0], user.operands.index(each))
            taken, is_handed_on = _used(parameter, whole)
            total += taken
        elif not (is_handed_on or (user.opcode == "dynamic-update-slice" and is_first)):
            return whole, False  # an update is in place
        if is_handed_on:
            taken, is_handed_on = _used(user, whole)
            total, is_result = total + taken, is_result or is_handed_on
    return total, is_result


def _is_unread(start: Instruction) -> bool:
    """Whether nothing in its computation reads what an asynchronous copy brings."""
    ends = {each for each in start.computation if start in each.operands}
    is_read = any(ends.intersection(each.operands) for each in start.computation)
    return not is_read and not any(each.is_root for each in ends)


def _copied_bytes(start: Instruction) -> int:
    """The bytes of an asynchronous copy (destination, source, ...) or slice (source, part,
    ...)."""
    if start.opcode == "slice-start":
        whole, part, *_ = start.arrays
        return _in_memory(part) + min(_in_memory(whole), part.num_bytes)
    return _in_memory(start.arrays[0]) + sum(map(_in_memory, _read(start)))
