# SPDX-License-Identifier: Apache-2.0
"""A cost model of the Hopper kernels, read off their machine code.

    python -m pallas_kernels.aot.gpu_cost

prints, for the shapes of Table 1 of Kim et al. 2022 (arXiv:2211.10017), the microseconds that
are expected of an H200, and what the fit to all other measured cells predicts for each. The
compiler's table (`gpu_budgets.json`) has the instructions of loop and epilogue, and their
cycles in a simulation (gpu_simulation.py).

A product takes the time of a launch, and then the longer of two: reading the weights at the
card's rate, or the loop's cycles for the steps of the busiest SM's tiles. The launch is fitted,
with what is serial around it; no other number is. What a tile takes besides its steps could be
told from it before the kernel had its schedule inside (3,685 cycles), and no longer can.
Dims: R rows, D inputs, F outputs, E experts, N rows of a tile
"""

import dataclasses
import functools
import importlib
import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pallas_kernels.aot.case import Case, benchmark_cases
from pallas_kernels.aot.gpu_simulation import Instruction, loop_cycles
from pallas_kernels.tiling.gpu import H200_SMS, best_parts

TABLE = pathlib.Path(__file__).with_name("gpu_budgets.json")
CLOCK_HZ = 1.98e9  # of an H100 and an H200 (h200.txtpb), which a full load holds
# Rate at which kernels that copy weights and multiply nothing read, by the card: on an H200 the
# difference of two widths of weights over that of their times, on an H100 what a copy moves.
READ_BYTES_PER_S = {"H200": 4.5e12, "H100": 2.95e12}
# Warpgroups that multiply, of the tilings that are compiled: a scheduler's warps.
WARPS = 2
_INSTRUCTION = re.compile(r"^\s*(\S+):(\S+):(\S+):\S+:(\d+)\s+/\*[0-9a-f]+\*/\s+(.*)")
_LABEL = re.compile(r"^\s*\.(L_x_\d+):")
_BRANCH = re.compile(r"\bBRA\b.*\(\.(L_x_\d+)\)")
_WIDTH = re.compile(r"HGMMA\.64x(\d+)x")


class Measured(NamedTuple):
    """A measured cell with 32 experts of 1024x4096, and the code that ran.

    Attributes:
        bits: bits of a weight.
        tile_cycles: cycles of the loop for the steps of a tile; None where memory bounds it.
        us: microseconds of a call.
    """

    weights: str
    rows: int
    bits: int
    tile_cycles: int | None
    us: float


# On an H200 with JAX 0.11.2 (experiments/accelerator); quantized tiles have 256 features.
MEASURED = (
    Measured("bfloat16", 1, 16, None, 69.7),
    Measured("bfloat16", 4, 16, None, 73.9),
    Measured("bfloat16", 16, 16, None, 72.4),
    Measured("int8", 1, 8, None, 41.7),
    Measured("int8", 4, 8, None, 47.9),
    Measured("int8", 16, 8, None, 44.8),
    Measured("int4", 1, 4, 4 * 2122, 28.7),
    Measured("int4", 4, 4, 4 * 2122, 31.8),
    Measured("int4", 16, 4, 4 * 2122, 32.7),
)
_TILES = -(-32 * 4096 // 256 // H200_SMS)


@functools.cache
def launch_s(cells: Sequence[Measured] = MEASURED) -> float:
    """The seconds besides reading and products that fit the cells best.

    These are the launch, the schedule, the first weights on their way and the last sums; the
    fit is by least squares of relative errors.
    """
    weights = np.array([1e6 / cell.us for cell in cells])
    rest = np.array([1 - _known_s(cell) / cell.us * 1e6 for cell in cells])
    return float(weights @ rest / (weights @ weights))


def _known_s(cell: Measured) -> float:
    if cell.tile_cycles is None:
        return 32 * 1024 * 4096 * cell.bits / 8 / READ_BYTES_PER_S["H200"]
    return _TILES * cell.tile_cycles / CLOCK_HZ


def left_out() -> list[dict[str, Any]]:
    """Each measured cell, and the time that the fit to all others predicts for it."""
    rows = []
    for cell in MEASURED:
        others = tuple(each for each in MEASURED if each != cell)
        expected_us = 1e6 * (launch_s(others) + _known_s(cell))
        rows.append(
            {
                "measured": f"{cell.weights}, rows {cell.rows}",
                "us": cell.us,
                "expected_us": expected_us,
                "ratio": expected_us / cell.us,
            }
        )
    return rows


def read_loop(sass: str) -> dict[str, int]:
    """Instructions, simulated cycles and HGMMA of the loop over D and of its epilogue.

    The loop is the innermost one with HGMMA; where tiles are cut, the one for whole tiles. Its
    cycles are for a run while all warps of a scheduler run it; `loop_latency` is for a warp
    alone. Its epilogue ends where the loop over tiles does. There is one store for each bit of
    the number of rows, of which a whole tile takes one.

    Args:
        sass: machine code with control codes, as Mosaic dumps it.

    Raises:
        ValueError: there is no such loop.
    """
    instructions, labels = [], {}
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif instruction := _INSTRUCTION.match(line):
            instructions.append(Instruction(*instruction.groups()))
    texts = [instruction.text for instruction in instructions]
    targets = [
        labels.get(branch[1]) if (branch := _BRANCH.search(text)) else None for text in texts
    ]
    loops = [
        (begin, end + 1)
        for end, begin in enumerate(targets)
        if begin is not None and begin <= end
    ]
    found = []
    for begin, end in loops:
        widths = [int(each) for each in _WIDTH.findall("\n".join(texts[begin:end]))]
        if widths:
            found.append((-max(widths), end - begin, begin, end, len(widths)))
    if not found:
        raise ValueError(
            f"expected a loop with HGMMA among {len(texts)} instructions with control codes; "
            "other versions of nvdisasm may write them otherwise"
        )
    _, _, begin, end, hgmma = min(found)
    around = [last for first, last in loops if first < begin and last > end]
    epilogue = _epilogue(texts, targets, end, min(around, default=len(texts)))
    return {
        "loop_instructions": end - begin,
        "loop_cycles": loop_cycles(instructions[begin:end], WARPS),
        "loop_latency": loop_cycles(instructions[begin:end], 1),
        "loop_hgmma": hgmma,
        "epilogue_instructions": len(epilogue),
        "epilogue_latency": loop_cycles([instructions[i] for i in epilogue], 1),
    }


def _epilogue(texts: list[str], targets: list, begin: int, end: int) -> list[int]:
    """The instructions that run from `begin` to `end` with one store of each result."""
    taken, is_stored, i = [], False, begin
    while i < end:
        taken.append(i)
        if "STS" in texts[i]:  # The next store is of another result.
            is_stored = False
        target, i = targets[i], i + 1
        if target is not None and i < target and "UTMASTG" in "\n".join(texts[i:target]):
            i = target if is_stored else i
            is_stored = True
    return taken


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The predicted time of a product with few rows.

    Attributes:
        tiles: number of tiles of the busiest SM.
        seconds: predicted seconds, with the launch.
        products_s, memory_s: seconds of these tiles' products, and of reading the weights; the
            longer one counts.
    """

    tiles: int
    seconds: float
    products_s: float
    memory_s: float

    @property
    def bound(self) -> str:
        return "memory" if self.memory_s > self.products_s else "products"


def predict(row: dict[str, int], case: Case, card: str = "H200") -> Prediction:
    """Predicts the time of a product whose experts each have rows, but fewer than a tile has.

    Args:
        row: the case's row in the compiler's table.
        card: one of `READ_BYTES_PER_S`.
    """
    tiling, num_matrices = tiling_of(case), 1 + case.is_gated_unit
    experts = min(case.R, case.E)
    tiles = experts * -(-case.F // (tiling.tile_m * tiling.warpgroups))
    parts = best_parts(tiles, case.D // tiling.tile_k, tiling.splits, H200_SMS)
    busiest = -(-tiles * parts // H200_SMS)
    cycles = _runs(row, case, num_matrices) * row["loop_cycles"] / parts
    products_s = busiest * cycles / CLOCK_HZ
    num_bytes = experts * num_matrices * case.D * case.F * (case.bits or 16) / 8
    memory_s = num_bytes / READ_BYTES_PER_S[card]
    return Prediction(busiest, launch_s() + max(products_s, memory_s), products_s, memory_s)


def _runs(row: dict[str, int], case: Case, num_matrices: int) -> float:
    """Runs of the loop for a tile: one has 16 channels of an HGMMA of 64 features."""
    halves = num_matrices * tiling_of(case).tile_m // 64
    return case.D * halves / (16 * row["loop_hgmma"])


def predictions(card: str = "H200") -> list[dict[str, Any]]:
    """A row for each product of Table 1's shapes with few rows."""
    rows = []
    for name, case in benchmark_cases().items():
        if case.direction == "forward" and name.endswith(" few"):
            found = predict(_table()[name], case, card)
            rows.append(
                {
                    "product": name,
                    "expected_us": 1e6 * found.seconds,
                    "bound": found.bound,
                    "products_us": 1e6 * found.products_s,
                    "memory_us": 1e6 * found.memory_s,
                    "tiles": found.tiles,
                }
            )
    return rows


def predicted_s(
    R: int, D: int, F: int, E: int, bits: int | None, card: str = "H200"
) -> float | None:
    """Seconds of a product of bfloat16 rows.

    None where no compiled case has its matrices and the tile that it runs with.
    """
    op = "grouped_matmul" if bits is None else "quantized_grouped_matmul"
    wanted = Case(op, R, D, F, E, bits=bits)
    for name, case in benchmark_cases().items():
        if (case.op, case.bits, case.D, case.F, case.direction) == (op, bits, D, F, "forward"):
            is_same = _tile(case) == _tile(wanted) and tiling_of(wanted).splits == 1
            if name.endswith(" few") and is_same:
                return predict(_table()[name], wanted, card).seconds
    return None


def _tile(case: Case) -> tuple:
    tiling = tiling_of(case)
    return tiling.tile_m, tiling.tile_n, tiling.tile_k, tiling.warpgroups


def _table() -> dict[str, dict[str, int]]:
    """The resources of each case, as the newest JAX compiles it: what cards run."""
    return list(json.loads(TABLE.read_text()).values())[-1]


def tiling_of(case: Case):
    """The default tiling of a forward product."""
    module = importlib.import_module(f"pallas_kernels.{case.op}.gpu")
    options = {} if case.bits is None else {"bits": case.bits, "group_size": case.group_size}
    options["num_matrices"] = 1 + case.is_gated_unit
    return module.default_tiling(case.R, case.D, case.F, case.E, **options)


if __name__ == "__main__":
    print(f"launch {1e6 * launch_s():.1f} us")
    for each in left_out() + predictions():
        shown = (f"{v:.3g}" if isinstance(v, float) else str(v) for v in each.values())
        print("  ".join(f"{key}={value}" for key, value in zip(each, shown, strict=True)))
