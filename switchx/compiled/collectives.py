# SPDX-License-Identifier: Apache-2.0
"""Collectives of a compiled program: their kinds, bytes and groups, read off its HLO text.

`switchx compile` prints them; tests and `bench scale` compare them with what the papers and
the planner say.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import TypeAlias

import numpy as np

from switchx.compiled.hlo import NO_SHARES, Instruction, parse

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_IOTA = re.compile(r"\[(?P<groups>[\d,]+)\]<=\[(?P<shape>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?")
# Device numbers of a mesh, or those of a transposed array.
_TRANSPOSED = re.compile(r"\[(?P<shape>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?")
_MESH = re.compile(
    r"mesh\[(?P<sizes>[^\]]*)\](?:\((?P<devices>[^ {]*)\))? ?\{(?P<axes>[^}]*)\}"
)
_REDUCE_SCATTER = "all-reduce-scatter"
# The TPU compiler runs some collectives beside products: a computation with `_FUSED_START`
# begins one, and the computations in which it continues name it again.
_FUSED_PART = 'chain_id="'
_FUSED_START = 'custom_call_target="AsyncCollectiveStart"'

# Types and shapes.
Arrays: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]


@dataclasses.dataclass(frozen=True)
class HloCollective:
    """One collective instruction.

    Attributes:
        kind: name of the collective in HLO, one of `KINDS`.
        arrays: (dtype, shape) of each result; several if XLA combined them.
        groups: device numbers of each group; for a permute, source and target.
        num_bytes: bytes of all arrays on one device where they are whole: the result of an
            all-gather, the operand of a reduce-scatter and of an asynchronous ragged
            all-to-all (which the TPU compiler pads), either of them otherwise.
    """

    kind: str
    arrays: Arrays
    groups: tuple[tuple[int, ...], ...]
    num_bytes: int


def collectives(hlo: str) -> list[HloCollective]:
    """Lists all collectives of an HLO text (`compiled.as_text()`), in its order.

    A collective in a loop's body is listed once, however often it runs (`executed_collectives`
    counts its trips); one that moves nothing between devices is left out.
    """
    program = parse(hlo)
    found = (_collective(each, program.num_devices) for each in program if _begins(each))
    return [one for one in found if one]


def executed_collectives(
    hlo: str, shares: Mapping[str, Fraction] = NO_SHARES
) -> Counter[HloCollective]:
    """Counts how often one run of the program executes each of its collectives.

    In a conditional, the branch that moves the most bytes counts.

    Args:
        shares: see `Program.sum_of_run`.

    Raises:
        ValueError: a loop with collectives in it has no known trip count.
    """
    program = parse(hlo)

    def own(each: Instruction) -> Counter | None:
        if not _begins(each):
            return Counter()
        found = _collective(each, program.num_devices)
        return Counter([found]) if found else None

    executed = program.sum_of_run(own, size=total_bytes, shares=shares)
    return Counter({one: round(count) for one, count in executed.items()})


def collectives_by_kind(
    hlo: str, shares: Mapping[str, Fraction] = NO_SHARES
) -> dict[str, tuple[int, int]]:
    """Kind -> (number of times a run executes it, bytes on one device).

    Args:
        shares: see `Program.sum_of_run`.
    """
    counts, sizes = Counter(), Counter()
    for one, count in executed_collectives(hlo, shares).items():
        counts[one.kind] += count
        sizes[one.kind] += count * one.num_bytes
    return {kind: (counts[kind], sizes[kind]) for kind in sorted(counts)}


def total_bytes(executed: Counter[HloCollective]) -> int:
    """The bytes of all executed collectives, as `HloCollective.num_bytes` counts them."""
    return sum(one.num_bytes * count for one, count in executed.items())


def overlapped_exchanges(hlo: str, product: str) -> int:
    """Counts the all-to-alls that are under way while a certain matrix product is computed.

    The program is scheduled, as the TPU compiler's are: instructions are in the order in which
    they run, and an asynchronous all-to-all has a start and an end.

    Args:
        product: a part of the name of what the product was traced from (`op_name`).
    """
    found = 0
    for computation in parse(hlo).computations.values():
        running: dict[Instruction, bool] = {}  # whether the product came since its start
        for each in computation:
            if each.opcode == "all-to-all-start":
                running[each] = False
            elif each.opcode == "all-to-all-done":
                found += running.pop(each.operands[0], False)
            elif product in each.op_name and _has_product(each):
                running = dict.fromkeys(running, True)
    return found


def _has_product(each: Instruction) -> bool:
    inside = (one for called in each.called for one in called)
    return any(one.opcode in ("dot", "convolution") for one in (each, *inside))


def _begins(each: Instruction) -> bool:
    """Whether an instruction is not a later part of a collective begun by another one."""
    return _FUSED_PART not in each.rest or any(
        _FUSED_START in one.rest for one in each.computation
    )


def _collective(each: Instruction, num_devices: int) -> HloCollective | None:
    """An instruction's collective; if fused with slices of its result, a reduce-scatter."""
    kind = each.opcode.removesuffix("-start")
    if kind not in KINDS:
        return None
    is_start, arrays = kind != each.opcode, each.arrays
    if is_start and kind == "ragged-all-to-all":
        arrays = arrays[:1]  # of (operand, output, offsets and sizes), output, ...
    elif is_start and kind != "all-reduce":
        # Its result is (operands, results): the results are the second half. A permute has two
        # counters after them, and so has the TPU compiler's all-to-all.
        if len(arrays) > 2 and all((x.dtype, x.shape) == ("u32", ()) for x in arrays[-2:]):
            arrays = arrays[:-2]
        arrays = arrays[len(arrays) // 2 :]
    groups = _groups(each) or (tuple(range(num_devices)),)
    if all(len(set(group)) == 1 for group in groups):
        return None
    scale = len(groups[0]) if kind == "reduce-scatter" else 1
    num_bytes = scale * sum(array.num_bytes for array in arrays)
    # The TPU compiler writes one as a fusion of an all-reduce and of slices of its results.
    if kind == "all-reduce" and each.computation.name.startswith(_REDUCE_SCATTER):
        kind, arrays = "reduce-scatter", each.computation.root.arrays
    return HloCollective(kind, tuple((x.dtype, x.shape) for x in arrays), groups, num_bytes)


def _groups(each: Instruction) -> tuple[tuple[int, ...], ...]:
    attributes = each.attributes
    text = attributes.get("replica_groups") or attributes.get("source_target_pairs") or ""
    if text.startswith("{"):
        return tuple(
            tuple(int(n) for n in group.split(",") if n)
            for group in re.findall(r"\{([\d,]*)\}", text[1:-1])
        )
    if match := _MESH.match(text + attributes.get("device_ids", "")):
        return _mesh_groups(match)
    if match := _IOTA.match(text):
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
