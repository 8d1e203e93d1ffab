# SPDX-License-Identifier: Apache-2.0
"""Copies between device and host memory that a compiled program makes, read off its HLO text.

`switchx compile` and tests check the ring of `host_ring.py` with it. The TPU compiler writes
a slice of an array in host memory as a start and an end (`dynamic-slice-start`, ...), in the
order in which it runs them, so what is between them computes while the copy runs; XLA's GPU
compiler writes a fusion that has only the slice (`fusion-start`). The memory space of the host
is 5 (`S(5)`). The GPU compiler may note the addresses of a loop's slices as an offset and a
stride (`byte_stride`); for a reversed loop these were wrong (openxla/xla#46231).
"""

import dataclasses
import re

from switchx.compiled.hlo import Computation, Instruction, Program, parse, within

_HOST = "S(5)"
_COPIES = ("dynamic-slice", "dynamic-update-slice", "copy")
# Instructions that take no time of the cores.
_NO_WORK = re.compile(
    r"(?:.*-(?:start|done|update)|copy|bitcast|tuple|get-tuple-element|parameter|constant|"
    r"after-all|opt-barrier)$"
)
_STRIDE = re.compile(r'"byte_stride":"?(-?\d+)')


@dataclasses.dataclass(frozen=True)
class HostCopy:
    """One instruction that copies to or from host memory.

    Attributes:
        kind: `dynamic-slice` to the device, `dynamic-update-slice` to the host, or `copy`.
        num_bytes: number of bytes that it copies.
        count: number of times that a step executes it.
        bytes_meanwhile: bytes of operands and results computed between its start and its end.
        is_of_layer: whether it is in a loop that computes layers, with matrix products; the
            optimizer's loops have none.
    """

    kind: str
    num_bytes: int
    count: int
    bytes_meanwhile: int
    is_of_layer: bool

    @property
    def is_overlapped(self) -> bool:
        """Whether at least as many bytes are computed with meanwhile as are copied."""
        return self.bytes_meanwhile >= self.num_bytes


def host_copies(hlo: str) -> list[HostCopy]:
    """All asynchronous copies of an HLO text; those in loops with the loops' trips.

    A loop whose trips depend on the data counts as often as the sliced array has layers.
    """
    found = []
    for computation, trips in _trips_of(parse(hlo)).items():
        opcodes = {each.opcode for each in within(computation)}
        for each in computation:
            is_copy = each.opcode in [f"{kind}-start" for kind in (*_COPIES, "fusion")]
            if not is_copy or _HOST not in each.type:
                continue
            arrays = [array for array in each.arrays if array.shape]
            largest = max(arrays, key=lambda array: array.num_bytes)
            found.append(
                HostCopy(
                    _kind(each),
                    min(array.num_bytes for array in arrays),
                    largest.shape[0] if trips is None else trips,
                    _bytes_meanwhile(each),
                    not opcodes.isdisjoint(("convolution", "dot")),
                )
            )
    return found


def _kind(start: Instruction) -> str:
    """The opcode of the started copy; for a fusion, that of its computation's root.

    Raises:
        ValueError: the instruction is not a copy.
    """
    kind = start.opcode.removesuffix("-start")
    if kind == "fusion":
        [kind] = [called.root.opcode for called in start.called]
    if kind not in _COPIES:
        raise ValueError(
            f"{start.name} of host memory copies nothing: {start.text.strip()[:200]}"
        )
    return kind


def share_overlapped(copies: list[HostCopy]) -> float:
    """The share of the layers' copied bytes that are copied while as many are computed with.

    The optimizer has nothing else to compute, so its copies are left out.

    Raises:
        ValueError: there is no such copy.
    """
    of_layers = [copy for copy in copies if copy.is_of_layer]
    total = sum(copy.num_bytes * copy.count for copy in of_layers)
    if not total:
        raise ValueError("the program has no copies from host memory for layers")
    return sum(copy.num_bytes * copy.count for copy in of_layers if copy.is_overlapped) / total


def noted_strides(hlo: str) -> list[int]:
    """Bytes between the slices of host memory that loops take, if a compiler noted them.

    The ring reads layer numbers from an array, so that no stride can be noted.
    """
    noted = (_STRIDE.findall(each.rest) for each in parse(hlo) if _HOST in each.text)
    return [int(stride) for strides in noted for stride in strides]


def _trips_of(program: Program) -> dict[Computation, int | None]:
    """The number of times that a step runs each computation; None if it depends on the data."""
    trips: dict[Computation, int | None] = {program.entry: 1}
    open_ = [program.entry]
    while open_:
        computation = open_.pop()
        for each in computation:
            for called in each.called:
                if called in trips:
                    continue
                own = each.trips if each.opcode == "while" else 1
                outer = trips[computation]
                trips[called] = None if own is None or outer is None else own * outer
                open_.append(called)
    return trips


def _bytes_meanwhile(start: Instruction) -> int:
    """Bytes of operands and results of what is computed until the copy has ended."""
    total, scheduled = 0, list(start.computation)
    for each in scheduled[scheduled.index(start) + 1 :]:
        if each.opcode.endswith("-done") and each.operands == (start,):
            break
        if not _NO_WORK.match(each.opcode):
            arrays = (array for one in {each, *each.operands} for array in one.arrays)
            total += sum(array.num_bytes for array in arrays if array.shape)
    return total
