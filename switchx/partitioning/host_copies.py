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
import math
import re

from switchx.partitioning.hlo_collectives import called_by, computations_of, trip_count

_HOST = "S(5)"
_START = re.compile(
    r"%?(?P<name>[\w.-]+) = (?P<type>\(.*\)) "
    r"(?P<kind>dynamic-slice|dynamic-update-slice|copy|fusion)-start\("
)
_CALLED = re.compile(r"calls=%?([\w.-]+)")
_ROOT = re.compile(r"ROOT .* (dynamic-slice|dynamic-update-slice|copy)\(")
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<type>.*?) (?P<op>[a-z][\w-]*)\("
)
_ARRAY = re.compile(r"\b(?P<dtype>pred|[a-z]+\d+)\[(?P<shape>[\d,]+)\]")
_OPERAND = re.compile(r"%([\w.-]+)")
# What takes no time of the cores.
_NO_WORK = re.compile(
    r"(?:.*-(?:start|done|update)|copy|bitcast|tuple|get-tuple-element|parameter|constant|"
    r"after-all|opt-barrier)$"
)
_INDEX = re.compile(r"\), index=(\d+)")
# What has nothing but constants where its operands have.
_OF_CONSTANTS = ("constant", "iota", "broadcast", "reshape", "bitcast", "copy", "fusion")
_OF_HOST = re.compile(
    r" (?:infeed|outfeed|send|recv)\(|custom_call_target=\"\w*python\w*callback"
)
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
    computations, entry = computations_of(hlo)
    found = []
    for name, trips in _trips_of(computations, entry).items():
        lines = computations[name]
        has_products = any(
            " convolution(" in line or " dot(" in line for line in _within(lines, computations)
        )
        for place, line in enumerate(lines):
            match = _START.search(line)
            if match is None or _HOST not in match["type"]:
                continue
            kind = _kind(match, line, computations)
            sizes = [(_bytes(array), array) for array in _ARRAY.finditer(match["type"])]
            layers = max(sizes, key=lambda size: size[0])[1]["shape"].split(",")[0]
            found.append(
                HostCopy(
                    kind,
                    min(size for size, _ in sizes),
                    int(layers) if trips is None else trips,
                    _bytes_meanwhile(lines, place, match["name"]),
                    has_products,
                )
            )
    return found


def _kind(match: re.Match, line: str, computations) -> str:
    """What is started: of a fusion, what its computation ends with.

    Raises:
        ValueError: it is no copy.
    """
    if match["kind"] != "fusion":
        return match["kind"]
    called = _CALLED.search(line)
    ends = [_ROOT.search(each) for each in computations.get(called and called[1], ())]
    kinds = [end[1] for end in ends if end]
    if not kinds:
        raise ValueError(f"{match['name']} of host memory copies nothing: {line.strip()[:200]}")
    return kinds[0]


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
    return [
        int(match[1])
        for line in hlo.splitlines()
        if _HOST in line
        for match in _STRIDE.finditer(line)
    ]


def _trips_of(computations, entry: str) -> dict[str, int | None]:
    """How often a step runs each computation; None where data decides."""
    trips: dict[str, int | None] = {entry: 1}
    open_ = [entry]
    while open_:
        name = open_.pop()
        for line in computations[name]:
            for called in called_by(line):
                if called in trips or called not in computations:
                    continue
                own = 1
                if " while(" in line:
                    own = trip_count(line, computations)
                outer = trips[name]
                trips[called] = None if own is None or outer is None else own * outer
                open_.append(called)
    return trips


def _within(lines: list[str], computations, seen: set | None = None):
    """All lines of a computation and of those that it calls."""
    seen = set() if seen is None else seen
    for line in lines:
        yield line
        for called in called_by(line):
            if called in computations and called not in seen:
                seen.add(called)
                yield from _within(computations[called], computations, seen)


def _bytes_meanwhile(lines: list[str], start: int, name: str) -> int:
    """Bytes of operands and results of what computes until the copy has ended."""
    sizes = {}
    for line in lines:
        if match := _INSTRUCTION.match(line):
            sizes[match["name"]] = sum(map(_bytes, _ARRAY.finditer(match["type"])))
    total = 0
    for line in lines[start + 1 :]:
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        if match["op"].endswith("-done") and f"(%{name})" in line:
            return total
        if not _NO_WORK.match(match["op"]):
            arguments = line[match.end() :].split(")", 1)[0]
            names = {match["name"], *_OPERAND.findall(arguments)}
            total += sum(sizes.get(each, 0) for each in names)
    return total


def _bytes(array: re.Match) -> int:
    digits = re.sub(r"\D", "", array["dtype"])
    return math.prod(map(int, array["shape"].split(","))) * int(digits or 8) // 8


def copied_constants(hlo: str) -> list[int]:
    """Bytes of each copy, in a loop, of an array that is the same constant in every turn.

    XLA moves constants out of loops. One that is written in place there, as the zeros that a
    collective's result goes into, is then copied in each turn.
    """
    made, callers = {}, {}
    for name, lines in computations_of(hlo)[0].items():
        made[name] = {}
        for match in filter(None, map(_INSTRUCTION.match, lines)):
            line = match.string
            operands = _OPERAND.findall(line[match.end() :].split(")", 1)[0])
            made[name][match["name"]] = one = match["op"], operands, line
            callers |= {each: (name, one, place) for place, each in enumerate(called_by(line))}

    def is_in_loop(name: str) -> bool:
        where, (op, *_), _ = callers.get(name, ("", ("",), 0))
        return op == "while" or (where in callers and is_in_loop(where))

    def is_carried(body: str, state: str, index: int | None) -> bool:
        """Whether a loop hands an element of its state on as it is."""
        [(op, last, _)] = [each for each in made[body].values() if " ROOT " in f" {each[2]}"]
        if index is None or op != "tuple":
            return False
        _, operands, line = made[body][last[index]]
        return operands == [state] and f"), index={index}" in line

    def is_constant(name: str, value: str, index: int | None = None) -> bool:
        """Whether an array, or an element of a tuple, comes from constants alone."""
        op, operands, line = made[name][value]
        if op == "get-tuple-element":
            return is_constant(name, operands[0], int(_INDEX.search(line)[1]))
        if op == "tuple":
            return is_constant(name, operands[index])
        if op != "parameter":
            is_made = op in _OF_CONSTANTS or "AllocateBuffer" in line
            return is_made and all(is_constant(name, each) for each in operands)
        where, (op, operands, _), place = callers.get(name, ("", ("", [], ""), 0))
        if op == "conditional":
            return is_constant(where, operands[place + 1], index)
        is_same = op == "while" and is_carried(name, value, index)
        return is_same and is_constant(where, operands[0], index)

    return [
        _bytes(array)
        for name in filter(is_in_loop, made)
        for op, operands, line in made[name].values()
        if op == "copy" and (array := _ARRAY.search(line)) and is_constant(name, operands[0])
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
    computations, entry = computations_of(hlo)
    captured, buffer = [], None
    for thunk in filter(None, map(_THUNK.match, thunks.splitlines())):
        depth = len(thunk[1])
        if buffer is None or depth <= buffer:
            buffer = depth if thunk[2] == "CommandBuffer" else None
        if thunk[2] in ("While", "Conditional"):
            captured.append(buffer is not None)
    choices = [
        line
        for line in _within(computations[entry], computations)
        if " while(" in line or " conditional(" in line
    ]
    pairs = zip(choices, captured, strict=True)
    read = sum(not free and '"known_trip_count"' not in line for line, free in pairs)
    return read + len(_OF_HOST.findall(hlo))
