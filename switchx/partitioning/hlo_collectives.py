# SPDX-License-Identifier: Apache-2.0
"""Collectives of a compiled program: their kinds, bytes and groups, read off its HLO text.

Tests and `bench scale` hold these against what the papers and the planner say. The syntax is
XLA's (`compiled.as_text()`), of its CPU, GPU and TPU compilers.
"""

import collections
import dataclasses
import math
import re
import types
from collections.abc import Mapping
from fractions import Fraction
from typing import TypeAlias

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
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(
    r"replica_groups=\[(?P<groups>[\d,]+)\]<=\[(?P<shape>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?"
)
# Of a mesh's devices: their numbers, or those of a transposed array.
_TRANSPOSED = re.compile(r"\[(?P<shape>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=mesh\[(?P<sizes>[^\]]*)\](?:, device_ids=\((?P<devices>[^ {]*)\))? "
    r"?\{(?P<axes>[^}]*)\}"
)
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_ENDED = re.compile(r" [\w-]+-(?:done|update)\(")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|(?:branch|called)_computations|(?:true|false)_computation)="
    r"\{?(%?[\w.-]+(?:, ?%[\w.-]+)*)"
)
_EXCHANGE_START = re.compile(r"%?([\w.-]+) = \(.*\) all-to-all-start\(")
_EXCHANGE_END = re.compile(r" all-to-all-done\(.*?%?([\w.-]+)\)")
_REDUCE_SCATTER = "all-reduce-scatter"
# The TPU compiler runs some beside others' products: a computation with `_FUSED_START` begins
# one, and the computations that it goes on in name it again.
_FUSED_PART, _FUSED_START = 'chain_id="', 'custom_call_target="AsyncCollectiveStart"'
_PRODUCT = re.compile(r" (?:dot|convolution)\(")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
NO_SHARES: Mapping[str, Fraction] = types.MappingProxyType({})
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
# The TPU compiler does not say; a condition then compares a counter with a constant.
_CONDITION = re.compile(r" condition=%?([\w.-]+)")
_COMPARED = re.compile(r"ROOT .* compare\(%?([\w.-]+), %?([\w.-]+)\), direction=LT")

# Types and shapes.
Arrays: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]


@dataclasses.dataclass(frozen=True)
class HloCollective:
    """One collective instruction.

    Attributes:
        kind: as HLO names it, one of `KINDS`.
        arrays: (dtype, shape) of each result; several where XLA combined them.
        groups: device numbers of each group; of a permute, source and target.
        num_bytes: of all arrays on one device where they are whole: the result of an
            all-gather, the operand of a reduce-scatter and of an asynchronous ragged
            all-to-all (which the TPU compiler pads), either of the others.
    """

    kind: str
    arrays: Arrays
    groups: tuple[tuple[int, ...], ...]
    num_bytes: int


def collectives(hlo: str) -> list[HloCollective]:
    """Lists all collectives of an HLO text (`compiled.as_text()`), in its order.

    One in a loop's body is listed once, however often it runs (`executed_collectives` counts
    its trips); one that moves nothing from device to device is left out.
    """
    all_devices = _all_devices(hlo)
    return [
        one
        for name, lines in computations_of(hlo)[0].items()
        for line in lines
        if (one := _collective(line, all_devices, _slices(name, lines)))
        and _begins(line, lines)
    ]


def executed_collectives(
    hlo: str, shares: Mapping[str, Fraction] = NO_SHARES
) -> collections.Counter[HloCollective]:
    """Counts how often one run of the program executes each of its collectives.

    Of a conditional's branches the one that moves the most bytes counts.

    Args:
        shares: see `branch_share`.

    Raises:
        ValueError: a loop with collectives in it has no known trip count.
    """
    all_devices = _all_devices(hlo)
    computations, entry = computations_of(hlo)
    known: dict[str, collections.Counter] = {}

    def of(name: str) -> collections.Counter:
        if name not in known:
            lines = [line for line in computations[name] if _begins(line, computations[name])]
            slices = _slices(name, lines)
            counted = (of_line(line, slices) for line in lines)
            known[name] = sum(counted, collections.Counter())
        return known[name]

    def of_line(line: str, slices: Arrays) -> collections.Counter:
        if own := _collective(line, all_devices, slices):
            return collections.Counter([own])
        # The end of what was started names the same computation again.
        if _ENDED.search(line) or not (names := called_by(line)):
            return collections.Counter()
        inside = max((of(name) for name in names), key=total_bytes)
        if " conditional(" in line and (share := branch_share(line, shares)) != 1:
            return collections.Counter({one: n * share for one, n in inside.items()})
        if " while(" not in line or not inside:
            return inside
        if (trips := trip_count(line, computations)) is None:
            raise ValueError(
                f"a loop with collectives has no known trip count: {line.strip()[:200]}"
            )
        return collections.Counter({one: n * trips for one, n in inside.items()})

    return collections.Counter({one: round(n) for one, n in of(entry).items()})


def _begins(line: str, lines: list[str]) -> bool:
    """Whether an instruction is no later part of a collective that another one began."""
    return _FUSED_PART not in line or any(_FUSED_START in each for each in lines)


def _slices(name: str, lines: list[str]) -> Arrays:
    """What a device keeps where a computation is a reduce-scatter; () in all others.

    The TPU compiler writes one as a fusion of an all-reduce and of slices of its results.
    """
    if not name.startswith(_REDUCE_SCATTER):
        return ()
    [root] = (line for line in lines if line.lstrip().startswith("ROOT "))
    return _arrays(re.match(r"\s*ROOT \S+ = (\(.*?\) |\S+)", root)[1])


def overlapped_exchanges(hlo: str, product: str) -> int:
    """Counts the all-to-alls that are under way while a certain matrix product is computed.

    In a scheduled program, as the TPU compiler's are: instructions stand in the order in which
    they run, and an asynchronous all-to-all as a start and an end.

    Args:
        product: a part of the name of what it was traced from (`op_name`).
    """
    computations, _ = computations_of(hlo)
    found = 0
    for lines in computations.values():
        running: dict[str, bool] = {}  # whether the product came since its start
        for line in lines:
            if start := _EXCHANGE_START.search(line):
                running[start[1]] = False
            elif end := _EXCHANGE_END.search(line):
                found += running.pop(end[1], False)
            elif product in line and _has_product(line, computations):
                running = dict.fromkeys(running, True)
    return found


def _has_product(line: str, computations: dict[str, list[str]]) -> bool:
    inside = (each for name in called_by(line) for each in computations.get(name, ()))
    return any(_PRODUCT.search(each) for each in (line, *inside))


def total_bytes(executed: collections.Counter[HloCollective]) -> int:
    """The bytes of all of them, as `HloCollective.num_bytes` counts."""
    return sum(one.num_bytes * count for one, count in executed.items())


def array_bytes(array: tuple[str, tuple[int, ...]]) -> int:
    """The bytes of one of `HloCollective.arrays`."""
    dtype, shape = array
    bits = _BITS.get(dtype) or int(re.sub(r"\D", "", dtype))
    return math.prod(shape) * bits // 8


def computations_of(hlo: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation, those before the first under "", and the entry's name."""
    current, entry = [], ""
    computations = {entry: current}
    for line in hlo.splitlines():
        if match := _COMPUTATION.match(line):
            current = computations[match[2]] = []
            entry = match[2] if match[1] else entry
        elif "=" in line:
            current.append(line)
    return computations, entry


def called_by(line: str) -> list[str]:
    """Names of the computations that an instruction runs."""
    called = [name for names in _CALLED.findall(line) for name in names.split(",")]
    return [name.strip().lstrip("%") for name in called]


def branch_share(line: str, shares: Mapping[str, Fraction]) -> Fraction:
    """Of the times a `conditional` is reached, those that run its most expensive branch.

    1 unless it stands in a scope of names (`jax.named_scope`) that is one of `shares`: a
    pipeline's ticks read from a table what they do (`partitioning/ticks.branch_shares`).
    """
    if not (traced_from := _OP_NAME.search(line)):
        return Fraction(1)
    # Its own scopes, behind those of the branch that it is in.
    own = re.split(r"/cond/|/body/", traced_from[1])[-1]
    return next((share for name, share in shares.items() if name in own), Fraction(1))


def trip_count(line: str, computations: dict[str, list[str]]) -> int | None:
    """How often the body of a `while` runs; None where the data decides.

    As the compiler says, or from the condition of a counter that `lax.scan` and `fori_loop`
    begin at 0.
    """
    if trips := _TRIPS.search(line):
        return int(trips[1])
    condition = computations.get(_CONDITION.search(line)[1], [])
    for compared in filter(None, map(_COMPARED.search, condition)):
        for one in condition:
            name, _, value = one.strip().partition(" = ")
            bound = re.match(r"[su]32\[\]\S* constant\((\d+)\)", value)
            if bound and name.lstrip("%") == compared[2]:
                return int(bound[1])
    return None


def _all_devices(hlo: str) -> tuple[tuple[int, ...], ...]:
    """One group of all devices: that of collectives which list none."""
    sizes = re.findall(r"(?:num_partitions|replica_count)=(\d+)", hlo.partition("\n")[0])
    return (tuple(range(math.prod(map(int, sizes)))),)


def _arrays(result: str) -> Arrays:
    """The arrays that an instruction returns, as its text has them before its name."""
    return tuple(
        (m["dtype"], tuple(int(size) for size in m["shape"].split(",") if size))
        for m in _ARRAY.finditer(result)
    )


def _collective(line: str, all_devices, slices: Arrays = ()) -> HloCollective | None:
    """An instruction's collective; where it is fused with `slices` of it, a reduce-scatter."""
    match = _INSTRUCTION.search(line)
    if not match:
        return None
    kind, arrays = match["kind"], _arrays(match["result"])
    if match["start"] and kind == "ragged-all-to-all":
        arrays = arrays[:1]  # of (operand, output, offsets and sizes), output, ...
    elif match["start"] and kind != "all-reduce":
        # Its result is (operands, results): the results are the second half. A permute has two
        # counters behind them, and so has the TPU compiler's all-to-all.
        if len(arrays) > 2 and arrays[-2:] == (("u32", ()),) * 2:
            arrays = arrays[:-2]
        arrays = arrays[len(arrays) // 2 :]
    groups = _groups(line) or all_devices
    if all(len(set(group)) == 1 for group in groups):
        return None
    scale = len(groups[0]) if kind == "reduce-scatter" else 1
    num_bytes = scale * sum(map(array_bytes, arrays))
    if slices and kind == "all-reduce":
        kind, arrays = "reduce-scatter", slices
    return HloCollective(kind, arrays, groups, num_bytes)


def _groups(line: str) -> tuple[tuple[int, ...], ...]:
    if match := _LISTED.search(line):
        return tuple(
            tuple(int(n) for n in group.split(",") if n)
            for group in re.findall(r"\{([\d,]*)\}", match[1])
        )
    if match := _MESH.search(line):
        return _mesh_groups(match)
    if match := _IOTA.search(line):
        num_groups = int(match["groups"].split(",")[0])
        return tuple(map(tuple, _transposed(match).reshape(num_groups, -1).tolist()))
    return ()


def _transposed(match: re.Match) -> np.ndarray:
    """Device numbers in the order of an array `[2,4]T(1,0)`."""
    shape = [int(n) for n in match["shape"].split(",")]
    numbers = np.arange(math.prod(shape)).reshape(shape)
    if match["order"]:
        numbers = numbers.transpose([int(n) for n in match["order"].split(",")])
    return numbers


def _mesh_groups(match: re.Match) -> tuple[tuple[int, ...], ...]:
    """Groups along named axes of a mesh, as the TPU compiler writes them."""
    sizes = {name: int(n) for name, n in re.findall(r"'([^']*)'=(\d+)", match["sizes"])}
    numbers = np.arange(math.prod(sizes.values()))
    if match["devices"]:
        if transposed := _TRANSPOSED.fullmatch(match["devices"]):
            numbers = _transposed(transposed)
        else:
            numbers = np.array([int(n) for n in match["devices"].split(",")])
    axes = re.findall(r"'([^']*)'", match["axes"])
    last = [list(sizes).index(name) for name in axes]
    first = [axis for axis in range(len(sizes)) if axis not in last]
    numbers = numbers.reshape(tuple(sizes.values())).transpose(first + last)
    length = math.prod(sizes[name] for name in axes)
    return tuple(map(tuple, numbers.reshape(-1, length).tolist()))
