# SPDX-License-Identifier: Apache-2.0
"""A simulation of one scheduler of a Hopper SM running the loop over D, from machine code.

Each of an SM's four schedulers issues one instruction per cycle, of whichever of its warps is
ready; it has one warp of each warpgroup that multiplies. A warp issues in order: when the stall
count of its last instruction is over, when the scoreboards that the next one names are clear,
and when the unit that runs it is free. An integer instruction takes two cycles of its unit (16
lanes), a read of shared memory or a shuffle four of the port that all schedulers share, a
product the cycles of the tensor core. Latencies are assumed, of the order that microbenchmarks
give (Luo et al. 2024, arXiv:2402.13499); none of them was fitted.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import NamedTuple

INTEGER = frozenset("PRMT LOP3 SHF LEA VIADD IADD3 ISETP PLOP3 SEL R2UR SGXT".split())
SHARED = frozenset(("LDS", "LDSM", "SHFL"))
# Cycles of a scheduler's unit for one instruction of a warp.
INTEGER_UNIT, PORT, MATRIX_READS = 2, 4, 4
MULTIPLY_UNIT = {"IMAD": 2, "HADD2": 1, "HFMA2": 1, "FMUL": 1}
# Cycles until whatever waits for the instruction may continue.
LATENCY = {"LDS": 29, "LDSM": 29, "SHFL": 24, "MEMBAR": 20, "FENCE": 30, "BAR": 25, "SYNCS": 20}
RESULT = 12
PRODUCT_LATENCY = 33
# Products of the tensor core in a cycle, of bfloat16, dense; all four schedulers together.
PRODUCTS_PER_CYCLE = 2048
RUNS = 12

_PREDICATE = re.compile(r"^@!?U?P\w+\s+")
_WIDTH = re.compile(r"HGMMA\.64x(\d+)x")
_PRODUCTS_LEFT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\w+)")


class Instruction(NamedTuple):
    """A line of machine code with its control codes.

    Attributes:
        waits: scoreboards that have to be clear, separated by `&`; `-` for none.
        reads, writes: scoreboard that is clear once its operands have been read, and scoreboard
            that is clear once its result has been written.
        stall: cycles until the warp's next instruction.
    """

    waits: str
    reads: str
    writes: str
    stall: str
    text: str

    @property
    def opcode(self) -> str:
        return _PREDICATE.sub("", self.text).split()[0].partition(".")[0]


def product_cycles(rows: int) -> float:
    """Cycles of the tensor core for one HGMMA: 64 features, `rows` rows, 16 channels."""
    return 64 * 16 * rows / PRODUCTS_PER_CYCLE


@dataclasses.dataclass
class _Warp:
    """Where a warp is, and what it waits for."""

    place: int = 0
    runs: int = 0
    now: float = 0.0
    scoreboards: dict[str, float] = dataclasses.field(default_factory=dict)
    # When the products that it has issued end, and the groups that they were committed in.
    products_end: float = 0.0
    groups: list[float] = dataclasses.field(default_factory=list)

    def may_issue(self, instruction: Instruction) -> float:
        """When its own order lets it issue the instruction."""
        clear = [self.scoreboards.get(each, 0.0) for each in instruction.waits.split("&")]
        if left := _PRODUCTS_LEFT.search(instruction.text):
            clear += self.groups[: len(self.groups) - int(left[1], 16)][-1:]
        return max([self.now, *clear])


class _Scheduler:
    """One scheduler's units, and when each is free."""

    def __init__(self):
        self.free = dict.fromkeys(("issue", "integer", "multiply", "port", "tensor"), 0.0)

    def unit(self, opcode: str) -> tuple[str, int] | None:
        """The unit that runs an instruction, and for how many cycles; None is never busy."""
        if opcode in SHARED:
            return "port", PORT * (MATRIX_READS if opcode == "LDSM" else 1)
        if opcode in INTEGER:
            return "integer", INTEGER_UNIT
        if opcode in MULTIPLY_UNIT:
            return "multiply", MULTIPLY_UNIT[opcode]
        return None

    def earliest(self, warp: _Warp, instruction: Instruction) -> float:
        unit = self.unit(instruction.opcode)
        free = [self.free["issue"]] + ([self.free[unit[0]]] if unit else [])
        return max(warp.may_issue(instruction), *free)

    def issue(self, warp: _Warp, instruction: Instruction, at: float) -> None:
        opcode = instruction.opcode
        self.free["issue"] = at + 1
        if unit := self.unit(opcode):
            self.free[unit[0]] = at + unit[1]
        done = at + LATENCY.get(opcode, RESULT)
        if width := _WIDTH.search(instruction.text):
            took = product_cycles(int(width[1]))
            self.free["tensor"] = max(self.free["tensor"], at) + took
            after = self.free["tensor"] + PRODUCT_LATENCY
            warp.products_end = max(warp.products_end + took, after)
            if "gsb0" in instruction.text:
                warp.groups.append(warp.products_end)
        for scoreboard in (instruction.reads, instruction.writes):
            if scoreboard != "-":
                pending = warp.scoreboards.get(scoreboard, 0.0)
                warp.scoreboards[scoreboard] = max(pending, done)
        warp.now = at + (LATENCY["BAR"] if opcode == "BAR" else max(1, int(instruction.stall)))


def loop_cycles(loop: Sequence[Instruction], warps: int) -> int:
    """Cycles of one run of a loop, averaged over several runs of each warp.

    Args:
        warps: number of warps of a scheduler, which is that of the warpgroups that multiply.
    """
    scheduler = _Scheduler()
    every = [_Warp() for _ in range(warps)]
    while running := [warp for warp in every if warp.runs < RUNS]:
        # Of the warps that could issue at the same time, the one that is behind.
        warp = min(
            running, key=lambda w: (scheduler.earliest(w, loop[w.place]), w.runs, w.place)
        )
        instruction = loop[warp.place]
        scheduler.issue(warp, instruction, scheduler.earliest(warp, instruction))
        warp.place += 1
        if warp.place == len(loop):
            warp.place, warp.runs = 0, warp.runs + 1
    return round(max(warp.now for warp in every) / RUNS)
