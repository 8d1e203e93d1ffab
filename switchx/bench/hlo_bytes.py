# SPDX-License-Identifier: Apache-2.0
"""Kernels that a compiled program launches, and the bytes that they move from and to memory.

Read off the HLO text, as `planner/program_cost.py` reads FLOPs: XLA's `cost_analysis` counts a
loop once, and believes what a Pallas kernel says of itself. Here a kernel reads each operand
once and writes each result once; of what it gathers or slices, the part that it takes.
Arrays that a TPU's compiler keeps in vector memory (`S(1)` in a layout) move nothing. Pallas
kernels are looked up among the launches that were recorded while the program was traced
(`pallas_kernels/launches.py`), which count the copies of their grids.
"""

import dataclasses
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

PALLAS_TARGETS = ("tpu_custom_call", "mosaic_gpu")

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$")
_ARRAY = re.compile(r"([a-z]+\d*)\[([\d,]*)\](?:\{([^}]*)\})?")
_NAME = re.compile(r"%([\w.-]+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_PARAMETER = re.compile(r"^(\d+)\)")
# Names of values, not work.
_FREE = {
    "parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all",
    "partition-id", "replica-id", "opt-barrier",
}  # fmt: skip
_LOOKED_THROUGH = {"bitcast", "reshape", "copy", "transpose", "convert"}
_HLO_DTYPES = {
    "bfloat16": "bf16", "float16": "f16", "float32": "f32", "int32": "s32", "int8": "s8",
    "int4": "s4", "uint8": "u8", "uint32": "u32", "bool": "pred",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Moved:
    """Of one run of a program.

    Attributes:
        kernels: launches of XLA's kernels, copies among them, and of Pallas'.
        pallas_kernels: those of Pallas alone.
        num_bytes: between memory and all of them.
        pallas_bytes: between memory and Pallas' kernels.
    """

    kernels: int = 0
    pallas_kernels: int = 0
    num_bytes: int = 0
    pallas_bytes: int = 0

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
        return 0 if "S(1)" in self.layout else array_bytes((self.dtype, self.shape))

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


def moved_bytes(
    hlo: str, launches: Iterable[Launch] = (), group_sizes: Sequence[int] = ()
) -> Moved:
    """Adds up what one run of the program launches and moves.

    Of a conditional's branches the one that moves the most counts.

    Args:
        hlo: of `compiled.as_text()`.
        launches: recorded while it was traced.
        group_sizes: rows of each expert, for which Pallas' kernels are counted.

    Raises:
        ValueError: a loop has no known trip count, or a Pallas kernel was not recorded.
    """
    known = {_key_of(each): each for each in launches}
    return _Counter(computations_of(hlo), known, np.asarray(group_sizes)).of_entry()


def _key_of(launch: Launch) -> tuple:
    def keys(arrays):
        return tuple((_HLO_DTYPES[str(each.dtype)], tuple(each.shape)) for each in arrays)

    return keys(launch.operands), keys(launch.results)


class _Counter:
    def __init__(self, computations, launches: dict[tuple, Launch], group_sizes):
        (self._computations, self._entry) = computations
        self._launches, self._group_sizes = launches, group_sizes
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
        return sum((self._one(each, instructions) for each in instructions.values()), Moved())

    def _one(self, each: _Instruction, instructions: dict[str, _Instruction]) -> Moved:
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
        if target and target[1].startswith(PALLAS_TARGETS):
            size = self._of_pallas(each, [arrays[name] for name in each.operands])
            return Moved(1, 1, size, size)
        if each.opcode.endswith("-start"):  # (destination, source, context)
            return Moved(1, 0, each.results[0].moved + sum(a.moved for a in arrays.values()))
        written = sum(result.moved for result in each.results)
        if each.opcode == "fusion":
            [called] = called_by(each.line)
            read = self._read_by_fusion(called, each.operands, arrays)
        elif each.opcode in ("gather", "dynamic-slice", "slice"):
            first, *others = arrays.values()
            read = min(first.moved, written) + sum(other.moved for other in others)
        else:
            read = sum(array.moved for array in arrays.values())
        return Moved(1, 0, read + written)

    def _of_pallas(self, each: _Instruction, operands: list[_Array]) -> int:
        key = tuple(a.key for a in operands), tuple(a.key for a in each.results)
        if key not in self._launches:
            raise ValueError(
                f"a Pallas kernel was not recorded, its bytes are not known: {key}; "
                f"recorded were {list(self._launches)}"
            )
        read, written = self._launches[key].copied(self._group_sizes)
        pairs = zip((*operands, *each.results), (*read, *written), strict=True)
        return sum(size if array.moved else 0 for array, size in pairs)

    def _read_by_fusion(self, called: str, operands, arrays: dict[str, _Array]) -> int:
        """Of each operand what the fusion takes: all of it, unless it only takes parts."""
        inside = self._instructions(called)
        total, seen = 0, set()
        for each in inside.values():
            if each.opcode != "parameter":
                continue
            name = operands[int(_PARAMETER.match(each.line.split("parameter(", 1)[1])[1])]
            if name in arrays and name not in seen:
                seen.add(name)
                whole = arrays[name].moved
                total += min(whole, self._taken(each.name, inside, whole))
        return total

    def _taken(self, name: str, inside: dict[str, _Instruction], whole: int) -> int:
        total = 0
        for user in inside.values():
            if name not in user.operands:
                continue
            if user.opcode in _LOOKED_THROUGH:
                total += self._taken(user.name, inside, whole)
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
                total += self._taken(parameter, self._instructions(called), whole)
            else:
                return whole
        return total


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
