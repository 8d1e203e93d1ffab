# SPDX-License-Identifier: Apache-2.0
"""Copies and waits that make a compiled program slow, read off its HLO text.

Copies between device and host memory; of constants, in loops; and waits for the host.

`switchx compile` and tests hold the ring of `host_ring.py` against it. The TPU compiler writes
a slice of an array in host memory as a start and an end (`dynamic-slice-start`, ...), in the
order in which it runs them, so what stands between computes while the copy runs; XLA's compiler
for GPUs writes a fusion that has the slice alone (`fusion-start`). The memory
space of the host is 5 (`S(5)`). The compiler for GPUs may note the addresses of a loop's
slices as an offset and a stride (`byte_stride`); of a reversed loop these were wrong
(openxla/xla#46231).
"""

import dataclasses
import re

from switchx.compiled.hlo import Computation, Instruction, Program, parse, within

_HOST = "S(5)"
_COPIES = ("dynamic-slice", "dynamic-update-slice", "copy")
# What takes no time of the cores.
_NO_WORK = re.compile(
    r"(?:.*-(?:start|done|update)|copy|bitcast|tuple|get-tuple-element|parameter|constant|"
    r"after-all|opt-barrier)$"
)
# What has nothing but constants where its operands have.
_OF_CONSTANTS = ("constant", "iota", "broadcast", "reshape", "bitcast", "copy", "fusion")
_WITH_HOST = ("infeed", "outfeed", "send", "recv")
_CALLBACK = re.compile(r'custom_call_target="\w*python\w*callback')
_THUNK = re.compile(r"( *)\d+: k(CommandBuffer|While|Conditional)?")
_STRIDE = re.compile(r'"byte_stride":"?(-?\d+)')


@dataclasses.dataclass(frozen=True)
class HostCopy:
    """One instruction that copies to or from host memory.

    Attributes:
        kind: `dynamic-slice` to the device, `dynamic-update-slice` to the host, or `copy`.
        num_bytes: that it copies.
        count: how often a step executes it.
        bytes_meanwhile: operands and results of what is computed between its start and its
            end.
        is_of_layer: whether it is where layers are computed, beside matrix products; the
            optimizer's loops have none.
    """

    kind: str
    num_bytes: int
    count: int
    bytes_meanwhile: int
    is_of_layer: bool

    @property
    def is_overlapped(self) -> bool:
        """Whether as many bytes are computed with meanwhile as are copied."""
        return self.bytes_meanwhile >= self.num_bytes


def host_copies(hlo: str) -> list[HostCopy]:
    """All asynchronous copies of an HLO text; of those in loops, with the trips of these.

    A loop whose trips the data decides counts as often as the array that is sliced has
    layers.
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
    """What is started: of a fusion, what its computation ends with.

    Raises:
        ValueError: it is no copy.
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
    """The share of bytes that are copied while as many are computed with, of those for layers.

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
    """Bytes between the slices of host memory that loops take, where a compiler noted them.

    The ring reads the numbers of layers from an array, so that none can be noted.
    """
    noted = (_STRIDE.findall(each.rest) for each in parse(hlo) if _HOST in each.text)
    return [int(stride) for strides in noted for stride in strides]


def _trips_of(program: Program) -> dict[Computation, int | None]:
    """How often a step runs each computation; None where data decides."""
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
    """Bytes of operands and results of what computes until the copy has ended."""
    total, scheduled = 0, list(start.computation)
    for each in scheduled[scheduled.index(start) + 1 :]:
        if each.opcode.endswith("-done") and each.operands == (start,):
            break
        if not _NO_WORK.match(each.opcode):
            arrays = (array for one in {each, *each.operands} for array in one.arrays)
            total += sum(array.num_bytes for array in arrays if array.shape)
    return total


def copied_constants(hlo: str) -> list[int]:
    """Bytes of each copy, in a loop, of an array that is the same constant in every turn.

    XLA moves constants out of loops. One that is written in place there, as the zeros that a
    collective's result goes into, is then copied in each turn.
    """
    program = parse(hlo)
    callers = {
        called: (each, place) for each in program for place, called in enumerate(each.called)
    }

    def is_in_loop(computation: Computation) -> bool:
        caller, _ = callers.get(computation, (None, 0))
        return caller is not None and (
            caller.opcode == "while" or is_in_loop(caller.computation)
        )

    def is_carried(state: Instruction, index: int | None) -> bool:
        """Whether a loop hands an element of its state on as it is."""
        last = state.computation.root
        if index is None or last.opcode != "tuple":
            return False
        element = last.operands[index]
        is_same = element.attributes.get("index") == str(index)
        return is_same and element.operands == (state,)

    def is_constant(each: Instruction, index: int | None = None) -> bool:
        """Whether an array, or an element of a tuple, comes from constants alone."""
        if each.opcode == "get-tuple-element":
            return is_constant(each.operands[0], int(each.attributes["index"]))
        if each.opcode == "tuple":
            return is_constant(each.operands[index])
        if each.opcode != "parameter":
            is_made = each.opcode in _OF_CONSTANTS or "AllocateBuffer" in each.rest
            return is_made and all(map(is_constant, each.operands))
        caller, place = callers.get(each.computation, (None, 0))
        if caller is not None and caller.opcode == "conditional":
            return is_constant(caller.operands[place + 1], index)
        is_same = caller is not None and caller.opcode == "while" and is_carried(each, index)
        return is_same and is_constant(caller.operands[0], index)

    return [
        each.arrays[0].num_bytes
        for each in program
        if each.opcode == "copy" and each.arrays[0].shape
        if is_in_loop(each.computation) and is_constant(each.operands[0])
    ]


def host_waits(hlo: str, thunks: str) -> int:
    """How often a GPU's program waits for the host, with one turn of each loop.

    The host reads whether a loop goes on whose trips are not known, and which branch a
    conditional takes, unless they are in a command buffer (a CUDA graph). It also takes part
    in callbacks and transfers.

    Args:
        thunks: what XLA runs, of the same program: `*.thunk_sequence_after_thunk_passes.txt`
            of `--xla_dump_to`, or `*.thunk_sequence.txt` where it has no command buffer.
    """
    program, captured, buffer = parse(hlo), [], None
    for thunk in filter(None, map(_THUNK.match, thunks.splitlines())):
        depth = len(thunk[1])
        if buffer is None or depth <= buffer:
            buffer = depth if thunk[2] == "CommandBuffer" else None
        if thunk[2] in ("While", "Conditional"):
            captured.append(buffer is not None)
    choices = [
        each for each in within(program.entry) if each.opcode in ("while", "conditional")
    ]
    pairs = zip(choices, captured, strict=True)
    read = sum(not free and '"known_trip_count"' not in each.rest for each, free in pairs)
    return read + sum(
        each.opcode in _WITH_HOST or bool(_CALLBACK.search(each.rest)) for each in program
    )
