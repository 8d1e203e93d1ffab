# SPDX-License-Identifier: Apache-2.0
"""Kernels that a compiled program launches, the bytes that they move, and their seconds.

Read off the HLO text, as `planner/program_cost.py` reads FLOPs: XLA's `cost_analysis` counts a
loop once, and believes what a Pallas kernel says of itself. Here a kernel reads each operand
once and writes each result once; of what it gathers or slices, the part that it takes.
Arrays that a TPU's compiler keeps in vector memory (`S(1)` in a layout) move nothing. A copy
that nothing reads is not counted: at a program's end it puts an argument back where the next
run begins with it (cross-program prefetch), and that run does not copy it again. Pallas
kernels are looked up among the launches that were recorded while the program was traced
(`pallas_kernels/launches.py`), which count the copies and the products of their grids.

Seconds are an estimate. A TPU's compiler writes the cycles that it expects beside most of its
kernels; where it does not (sorts, gathers, scatters, copies), and of Pallas' kernels, a
roofline stands in: bytes over the memory's rate, or products over the chip's, whichever takes
longer.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Sequence

import numpy as np

from pallas_kernels.launches import Launch
from switchx.partitioning.hlo_collectives import (
    array_bytes,
    called_by,
    computations_of,
    trip_count,
)
from switchx.planner.program_cost import instruction_flops

PALLAS_TARGETS = ("tpu_custom_call", "mosaic_gpu")

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$")
_ARRAY = re.compile(r"([a-z]+\d*)\[([\d,]*)\](?:\{([^}]*)\})?")
_NAME = re.compile(r"%([\w.-]+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_PARAMETER = re.compile(r"^(\d+)\)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
# Names of values, not work.
_FREE = {
    "parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all",
    "partition-id", "replica-id", "opt-barrier",
}  # fmt: skip
# Parts that lie beside each other in memory already.
_FREE_TARGETS = {"ConcatBitcast"}
_LOOKED_THROUGH = {"bitcast", "reshape", "copy", "transpose", "convert"}
_HLO_DTYPES = {
    "bfloat16": "bf16", "float16": "f16", "float32": "f32", "int32": "s32", "int8": "s8",
    "int4": "s4", "uint8": "u8", "uint32": "u32", "bool": "pred", "float8_e4m3fn": "f8e4m3fn",
}  # fmt: skip


# A kernel of XLA's own on TPUs: the softmax of float32 scores times the values.
ONLINE_SOFTMAX = "online-softmax"


@dataclasses.dataclass(frozen=True)
class Rates:
    """Of a chip: what its matrix units and its memory do in a second, and its cycles."""

    flops_per_s: float
    bytes_per_s: float
    cycles_per_s: float


@dataclasses.dataclass(frozen=True)
class Moved:
    """Of one run of a program.

    Attributes:
        kernels: launches of XLA's kernels, copies among them, and of Pallas'.
        pallas_kernels: those of Pallas alone.
        num_bytes: between memory and all of them.
        pallas_bytes: between memory and Pallas' kernels.
        pallas_flops: 2 m n k of the tiles that those multiply; of what is counted.
        compiler_s: seconds of XLA's kernels that the compiler gave cycles of.
        other_s: of all other kernels, by a roofline.
        roofline_s: of all kernels, by a roofline; no seconds where no rates were given.
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

    def __add__(self, other: "Moved") -> "Moved":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Moved(*(one + another for one, another in pairs))

    def times(self, trips: int) -> "Moved":
        return Moved(*(trips * each for each in dataclasses.astuple(self)))


@dataclasses.dataclass(frozen=True)
class _Array:
    dtype: str
    shape: tuple[int, ...]
    layout: str

    @property
    def moved(self) -> int:
        """Bytes, none where it stays in vector memory."""
        return 0 if "S(1)" in self.layout else self.size

    @property
    def size(self) -> int:
        return array_bytes((self.dtype, self.shape))

    @property
    def key(self) -> tuple:
        return self.dtype, self.shape


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    results: tuple[_Array, ...]
    opcode: str
    operands: tuple[str, ...]
    line: str

    @property
    def is_root(self) -> bool:
        return self.line.lstrip().startswith("ROOT ")


def moved_bytes(
    hlo: str,
    launches: Iterable[Launch] = (),
    group_sizes: Sequence[int] = (),
    rates: Rates | None = None,
) -> Moved:
    """Adds up what one run of the program launches and moves.

    Of a conditional's branches the one that moves the most counts.

    Args:
        hlo: of `compiled.as_text()`.
        launches: recorded while it was traced.
        group_sizes: rows of each expert, for which Pallas' kernels are counted.
        rates: of the chip, for seconds.

    Raises:
        ValueError: a loop has no known trip count, or a Pallas kernel was not recorded.
    """
    known = {_key_of(each): each for each in launches}
    return _Counter(computations_of(hlo), known, np.asarray(group_sizes), rates).of_entry()


def _key_of(launch: Launch) -> tuple:
    def keys(arrays):
        return tuple((_HLO_DTYPES[str(each.dtype)], tuple(each.shape)) for each in arrays)

    return keys(launch.operands), keys(launch.results)


class _Counter:
    def __init__(self, computations, launches: dict[tuple, Launch], group_sizes, rates):
        (self._computations, self._entry) = computations
        self._flops = instruction_flops(self._computations)
        self._launches, self._group_sizes, self._rates = launches, group_sizes, rates
        self._parsed: dict[str, dict[str, _Instruction]] = {}

    def of_entry(self) -> Moved:
        return self._of(self._entry)

    def _instructions(self, computation: str) -> dict[str, _Instruction]:
        if computation not in self._parsed:
            found = filter(None, map(_instruction, self._computations[computation]))
            self._parsed[computation] = {each.name: each for each in found}
        return self._parsed[computation]

    def _of(self, computation: str) -> Moved:
        instructions = self._instructions(computation)
        counted = (self._one(computation, each) for each in instructions.values())
        return sum(counted, Moved())

    def _one(self, computation: str, each: _Instruction) -> Moved:
        instructions = self._instructions(computation)
        if each.opcode in _FREE or each.opcode.endswith(("-done", "-update")):
            return Moved()
        if each.opcode in ("while", "conditional", "call"):
            inside = max(map(self._of, called_by(each.line)), key=lambda one: one.num_bytes)
            if each.opcode != "while":
                return inside
            if (trips := trip_count(each.line, self._computations)) is None:
                raise ValueError(f"a loop has no known trip count: {each.line.strip()[:200]}")
            return inside.times(trips)
        arrays = {
            name: instructions[name].results[0]
            for name in each.operands
            if name in instructions and instructions[name].results
        }
        target = _TARGET.search(each.line)
        if target and target[1] in _FREE_TARGETS:
            return Moved()
        if target and target[1].startswith(PALLAS_TARGETS):
            size, flops = self._of_pallas(each, [arrays[name] for name in each.operands])
            seconds = self._roofline(size, flops)
            return Moved(1, 1, size, size, flops, other_s=seconds, roofline_s=seconds)
        if each.opcode.endswith("-start"):
            if _is_unread(each, instructions):
                return Moved()
            size = _copied_bytes(each, list(arrays.values()))
            return Moved(
                1, 0, size, other_s=self._roofline(size), roofline_s=self._roofline(size)
            )
        size = self._of_kernel(each, arrays, lambda array: array.moved)
        if self._rates is None:
            return Moved(1, 0, size)
        flops = self._flops(computation, each.line)
        roofline = self._roofline(size, flops)
        if cycles := _CYCLES.search(each.line):
            seconds = int(cycles[1]) / self._rates.cycles_per_s
            return Moved(1, 0, size, compiler_s=seconds, roofline_s=roofline)
        # Vector memory is quicker than HBM, but not free: what stays there counts here.
        whole = self._of_kernel(each, arrays, lambda array: array.size)
        return Moved(1, 0, size, other_s=self._roofline(whole, flops), roofline_s=roofline)

    def _of_kernel(self, each: _Instruction, arrays: dict[str, _Array], size_of) -> int:
        """Bytes that one of XLA's kernels reads and writes."""
        written = sum(size_of(result) for result in each.results)
        if each.opcode == "fusion":
            [called] = called_by(each.line)
            written = self._written_by_fusion(called, each.results, size_of)
            return written + self._read_by_fusion(called, each.operands, arrays, size_of)
        if each.opcode == "dynamic-update-slice":
            part = size_of(arrays[each.operands[1]])
            return part + min(written, arrays[each.operands[1]].size)
        if each.opcode in ("gather", "dynamic-slice", "slice"):
            first, *others = map(size_of, arrays.values())
            return written + min(first, written) + sum(others)
        return written + sum(map(size_of, arrays.values()))

    def _roofline(self, num_bytes: int, flops: int = 0) -> float:
        if self._rates is None:
            return 0.0
        return max(num_bytes / self._rates.bytes_per_s, flops / self._rates.flops_per_s)

    def _of_pallas(self, each: _Instruction, operands: list[_Array]) -> tuple[int, int]:
        if each.name.startswith(ONLINE_SOFTMAX):
            scores, values = operands
            flops = 2 * math.prod(scores.shape) * values.shape[-1]
            return sum(array.moved for array in (*operands, *each.results)), flops
        key = tuple(a.key for a in operands), tuple(a.key for a in each.results)
        if key not in self._launches:
            raise ValueError(
                f"a Pallas kernel was not recorded, its bytes are not known: {key}; "
                f"recorded were {list(self._launches)}"
            )
        launch = self._launches[key]
        read, written = launch.copied(self._group_sizes)
        pairs = zip((*operands, *each.results), (*read, *written), strict=True)
        flops = launch.flops(self._group_sizes) if launch.flops else 0
        return sum(size if array.moved else 0 for array, size in pairs), flops

    def _written_by_fusion(self, called: str, results: Sequence[_Array], size_of) -> int:
        """Of each result what the fusion writes: a part where it updates an array in place."""
        inside = self._instructions(called)
        root = next(each for each in inside.values() if each.is_root)
        parts = [inside[name] for name in root.operands] if root.opcode == "tuple" else [root]
        if root.opcode == "fusion":
            return self._written_by_fusion(called_by(root.line)[0], results, size_of)
        if len(parts) != len(results):  # of one instruction, such as a sort of several arrays
            return sum(map(size_of, results))
        return sum(map(functools.partial(self._written, inside, size_of), parts, results))

    def _written(self, inside, size_of, each: _Instruction, result: _Array) -> int:
        """Bytes of a result that an instruction of a fusion writes."""
        while each.opcode == "bitcast":
            each = inside[each.operands[0]]
        if each.opcode == "fusion" and len(each.results) == 1:
            return self._written_by_fusion(called_by(each.line)[0], [result], size_of)
        whole = size_of(result)
        if each.opcode == "dynamic-update-slice":
            return min(whole, inside[each.operands[1]].results[0].size)
        return whole

    def _read_by_fusion(self, called: str, operands, arrays: dict[str, _Array], size_of) -> int:
        """Of each operand what the fusion takes: all of it, unless it only takes parts."""
        inside = self._instructions(called)
        total, seen = 0, set()
        for each in inside.values():
            if each.opcode != "parameter":
                continue
            name = operands[int(_PARAMETER.match(each.line.split("parameter(", 1)[1])[1])]
            if name in arrays and name not in seen:
                seen.add(name)
                whole = size_of(arrays[name])
                total += min(whole, self._taken(each.name, inside, whole))
        return total

    def _taken(self, name: str, inside: dict[str, _Instruction], whole: int) -> int:
        taken, is_result = self._used(name, inside, whole)
        return whole if is_result else taken

    def _used(self, name: str, inside: dict[str, _Instruction], whole: int) -> tuple[int, bool]:
        """Bytes of an array that a computation takes; whether it hands the array on."""
        total, is_result = 0, inside[name].is_root
        for user in inside.values():
            if name not in user.operands:
                continue
            if user.opcode in _LOOKED_THROUGH:
                taken, is_handed_on = self._used(user.name, inside, whole)
                total, is_result = total + taken, is_result or is_handed_on
            elif user.opcode in ("gather", "dynamic-slice", "slice") and (
                user.operands[0] == name
            ):
                total += sum(array_bytes(result.key) for result in user.results)
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == name:
                continue  # written in place
            elif user.opcode == "fusion":
                [called] = called_by(user.line)
                at = user.operands.index(name)
                parameter = next(
                    one.name
                    for one in self._instructions(called).values()
                    if one.opcode == "parameter" and f"parameter({at})" in one.line
                )
                taken, is_handed_on = self._used(parameter, self._instructions(called), whole)
                total += taken
                if is_handed_on:
                    taken, is_handed_on = self._used(user.name, inside, whole)
                    total, is_result = total + taken, is_result or is_handed_on
            else:
                return whole, False
        return total, is_result


def _is_unread(start: _Instruction, instructions: dict[str, _Instruction]) -> bool:
    """Whether nothing in its computation reads what an asynchronous copy brings."""
    done = {each.name for each in instructions.values() if start.name in each.operands}
    readers = (each for each in instructions.values() if done.intersection(each.operands))
    is_result = any(instructions[name].is_root for name in done)
    return start.opcode == "copy-start" and not is_result and not any(readers)


def _copied_bytes(start: _Instruction, operands: list[_Array]) -> int:
    """Of an asynchronous copy (destination, source, ...) or slice (source, part, ...)."""
    if start.opcode == "slice-start":
        whole, part, *_ = start.results
        return part.moved + min(whole.moved, part.size)
    return start.results[0].moved + sum(each.moved for each in operands)


def _instruction(line: str) -> _Instruction | None:
    if not (match := _INSTRUCTION.match(line)):
        return None
    name, result, opcode, rest = match.groups()
    arrays = tuple(
        _Array(dtype, tuple(int(n) for n in shape.split(",") if n), layout or "")
        for dtype, shape, layout in _ARRAY.findall(result)
    )
    # Operands end at the parenthesis that closes the first one.
    depth, end = 1, 0
    while end < len(rest) and depth:
        depth += {"(": 1, ")": -1}.get(rest[end], 0)
        end += 1
    return _Instruction(name, arrays, opcode, tuple(_NAME.findall(rest[:end])), line)
