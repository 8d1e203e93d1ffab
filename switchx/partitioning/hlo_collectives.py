# SPDX-License-Identifier: Apache-2.0
"""Collectives of a compiled program: their kinds, bytes and groups, read off its HLO text."""

import dataclasses
import math
import re

import numpy as np

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64}
_INSTRUCTION = re.compile(
    rf"= (?P<result>\(.*\)|\S+) (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\("
)
_ARRAY = re.compile(r"(?P<dtype>[a-z]+\d*)\[(?P<shape>[\d,]*)\]")
_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(
    r"replica_groups=\[(?P<groups>[\d,]+)\]<=\[(?P<shape>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?"
)


@dataclasses.dataclass(frozen=True)
class HloCollective:
    """One collective instruction.

    Attributes:
        kind: as HLO names it, one of `KINDS`.
        arrays: (dtype, shape) of each result; several where XLA combined them.
        groups: device numbers of each group.
        num_bytes: of all arrays on one device where they are whole: the result of an
            all-gather, the operand of a reduce-scatter and of an asynchronous ragged
            all-to-all (which the TPU compiler pads), either of the others.
    """

    kind: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    groups: tuple[tuple[int, ...], ...]
    num_bytes: int

    def before_combining(self) -> list["HloCollective"]:
        """The collectives of one array each that XLA made this one of.

        An all-to-all stays as it is: CPU takes its array apart into one a device.
        """
        if self.kind == "all-to-all" or len(self.arrays) == 1:
            return [self]
        scale = self.num_bytes // sum(_num_bytes(*array) for array in self.arrays)
        return [
            HloCollective(self.kind, (array,), self.groups, scale * _num_bytes(*array))
            for array in self.arrays
        ]

    @property
    def devices(self) -> int:
        """Devices in a group."""
        return len(self.groups[0])


def collectives(hlo: str) -> list[HloCollective]:
    """All collectives in an HLO text (`compiled.as_text()`), in its order.

    One in a loop's body is listed once, however often it runs; one over groups of a single
    device moves nothing and is left out.
    """
    # Groups that are not listed are one, of all devices.
    sizes = re.findall(r"(?:num_partitions|replica_count)=(\d+)", hlo.partition("\n")[0])
    everybody = (tuple(range(math.prod(map(int, sizes)))),)
    found = []
    for line in hlo.splitlines():
        match = _INSTRUCTION.search(line)
        if not match:
            continue
        arrays = _arrays(match["result"])
        if match["start"] and match["kind"] == "ragged-all-to-all":
            arrays = arrays[:1]  # of (operand, output, offsets and sizes), output, ...
        elif match["start"] and match["kind"] != "all-reduce":
            # Its result is (operands, results): the results are the second half.
            arrays = arrays[len(arrays) // 2 :]
        groups = _groups(line) or everybody
        if match["kind"] != "collective-permute" and len(groups[0]) == 1:
            continue
        scale = len(groups[0]) if match["kind"] == "reduce-scatter" else 1
        num_bytes = scale * sum(_num_bytes(*array) for array in arrays)
        found.append(HloCollective(match["kind"], arrays, groups, num_bytes))
    return found


def _arrays(result: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple(
        (m["dtype"], tuple(int(size) for size in m["shape"].split(",") if size))
        for m in _ARRAY.finditer(result)
    )


def _num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    bits = _BITS.get(dtype) or int(re.sub(r"\D", "", dtype))
    return math.prod(shape) * bits // 8


def _groups(line: str) -> tuple[tuple[int, ...], ...]:
    if match := _LISTED.search(line):
        return tuple(
            tuple(int(n) for n in group.split(",") if n)
            for group in re.findall(r"\{([\d,]*)\}", match[1])
        )
    if match := _IOTA.search(line):
        sizes, shape = ([int(n) for n in match[k].split(",")] for k in ("groups", "shape"))
        numbers = np.arange(math.prod(shape)).reshape(shape)
        if match["order"]:
            numbers = numbers.transpose([int(n) for n in match["order"].split(",")])
        return tuple(map(tuple, numbers.reshape(sizes[0], -1).tolist()))
    return ()
