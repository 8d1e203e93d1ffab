# SPDX-License-Identifier: Apache-2.0
"""A cost model of the Hopper kernels: what bounds their loop, read off the machine code.

    python -m pallas_kernels.aot.gpu_cost

prints, for the shapes of Table 1 of Kim et al. 2022 (arXiv:2211.10017), the cycles that one run
of the loop over D takes of each resource of an SM, and the share of the memory's bandwidth that
follows; what a tile of many rows takes with its epilogue, and what ping-pong would take; and
how many SMs are busy with few active experts. Of loop and epilogue the compiler's table
(`gpu_budgets.json`) has the instructions, HGMMA and the cycles of one warp; nothing was
measured. The longest resource is taken for the time:

    issue    instructions of all warpgroups; each of the four schedulers issues one a cycle, and
             has a warp of every warpgroup
    latency  one warp that issues in order: the stall counts that ptxas wrote into the code, the
             waits for what it loads and exchanges through shared memory, and those for its own
             products, as if the tensor core had no others
    tensor   64 x N x 16 products of an HGMMA at 2,048 a cycle (bfloat16, dense)
    memory   the weights' bytes at an SM's share of the bandwidth; rows come from the cache
    copies   Little's law: a copy is under way for a fixed time, and all stages of the ring but
             the one that is multiplied are
    l2       of tiles of many rows, their bytes at an SM's share of the L2 cache's

Waits for barriers, start and the last wave are not in it, and of few rows the
epilogue is not, which the ring hides: it is an upper bound.
Dims: R rows, D inputs, F outputs, E experts, N rows of a tile
"""

import dataclasses
import importlib
import itertools
import json
import math
import pathlib
import re
from typing import Any

import numpy as np

from pallas_kernels.aot.case import EXPERTS, ROWS, Case, benchmark_cases, epilogue_cases
from pallas_kernels.bench.cells import MATRICES
from pallas_kernels.grouped_matmul import tile_schedule
from pallas_kernels.tiling.gpu import H200_SMS, Tiling, best_parts, steps_of_busiest

TABLE = pathlib.Path(__file__).with_name("gpu_budgets.json")
# Of an H200 (h200.txtpb).
BYTES_PER_S, CLOCK_HZ = 4.8e12, 1.98e9
PRODUCTS_PER_CYCLE = 2048
# From the L2 cache to all SMs, as XLA's cost model of dots has it, measured on an H100.
L2_BYTES_PER_S = 6.65e12
# Cycles until a result is there, assumed, of the order that microbenchmarks of an H100 give
# (Luo et al. 2024, arXiv:2402.13499): through shared memory, and from the L2 cache. A copy from
# memory that is busy takes longer.
SHARED_CYCLES, GLOBAL_CYCLES, COPY_CYCLES = 30, 300, 1000
# Scoreboards that are waited for, those set by reads and by results, the stall count, the text.
_INSTRUCTION = re.compile(r"^\s*(\S+):(\S+):(\S+):\S+:(\d+)\s+/\*[0-9a-f]+\*/\s+(.*)")
_LABEL = re.compile(r"^\s*\.(L_x_\d+):")
_BRANCH = re.compile(r"\bBRA\b.*\(\.(L_x_\d+)\)")
_WIDTH = re.compile(r"HGMMA\.64x(\d+)x")
_GLOBAL_LOAD = re.compile(r"^(@\S+ )?LDG?\.")
_PRODUCT_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\w+)")


def read_loop(sass: str) -> dict[str, int]:
    """Instructions, cycles of one warp and HGMMA of the loop over D and of its epilogue.

    It is the innermost loop with HGMMA; where tiles are cut, that of whole ones. Its epilogue
    ends where the loop over tiles does. Of the stores, which are one for each bit of the
    number of rows, a whole tile takes one.

    Args:
        sass: with control codes, as Mosaic dumps it.

    Raises:
        ValueError: there is no such loop.
    """
    instructions, labels = [], {}
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif instruction := _INSTRUCTION.match(line):
            instructions.append(instruction.groups())
    texts = [instruction[-1] for instruction in instructions]
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
        "loop_latency": _latency(instructions[begin:end]),
        "loop_hgmma": hgmma,
        "epilogue_instructions": len(epilogue),
        "epilogue_latency": _latency([instructions[i] for i in epilogue]),
    }


def _epilogue(texts: list[str], targets: list, begin: int, end: int) -> list[int]:
    """The instructions that run from `begin` to `end` with one store of each result."""
    taken, is_stored, i = [], False, begin
    while i < end:
        taken.append(i)
        if "STS" in texts[i]:  # What is stored next is another result.
            is_stored = False
        target, i = targets[i], i + 1
        if target is not None and i < target and "UTMASTG" in "\n".join(texts[i:target]):
            i, is_stored = (target if is_stored else i), True
    return taken


def _latency(loop) -> int:
    """Cycles of one run of a loop by one warp, after runs that have filled its pipeline.

    It issues in order. An instruction waits for the scoreboards that it names; a wait for
    products leaves that many groups of them, the last of a group has a `gsb0`.
    """
    now, products_end, ready, groups, ends = 0.0, 0.0, {}, [], []
    for _ in range(3):
        for waits, read, written, stall, text in loop:
            now = max([now, *(ready.get(each, 0) for each in waits.split("&"))])
            if wait := _PRODUCT_WAIT.search(text):
                done = groups[: len(groups) - int(wait[1], 16)]
                now = max([now, *done[-1:]])
            if width := _WIDTH.search(text):
                products_end = max(products_end, now) + _product_cycles(int(width[1]))
                groups += [products_end] if "gsb0" in text else []
            took = GLOBAL_CYCLES if _GLOBAL_LOAD.match(text) else SHARED_CYCLES
            ready[written] = max(ready.get(written, 0), now + took)
            ready[read] = max(ready.get(read, 0), now + SHARED_CYCLES)  # operands
            ready["-"] = 0
            now += int(stall)
        ends.append(now)
    return round(ends[-1] - ends[-2])


def _product_cycles(rows: int) -> float:
    """Of one HGMMA: 64 features, 16 channels."""
    return 64 * 16 * rows / PRODUCTS_PER_CYCLE


@dataclasses.dataclass(frozen=True)
class Cycles:
    """Of one run of the loop on an SM, by resource."""

    issue: float
    latency: float
    tensor: float
    memory: float
    copies: float

    @property
    def longest(self) -> float:
        return max(dataclasses.astuple(self))

    @property
    def bandwidth_share(self) -> float:
        return self.memory / self.longest

    @property
    def bound(self) -> str:
        """The resource that takes longest."""
        return max(dataclasses.asdict(self).items(), key=lambda item: item[1])[0]


def predict(loop: dict[str, int], tiling: Tiling, bits: int | None, num_matrices: int = 1):
    """The `Cycles` of a loop; weights are read once, as with few rows an expert.

    Args:
        loop: of `read_loop`.
        bits: of a quantized weight; None for 16.
    """
    halves = num_matrices * tiling.tile_m // 64
    channels = 16 * loop["loop_hgmma"] / halves
    weights = channels * tiling.warpgroups * tiling.tile_m * num_matrices
    bytes_per_cycle = BYTES_PER_S / CLOCK_HZ / H200_SMS
    return Cycles(
        issue=loop["loop_instructions"] * tiling.warpgroups,
        latency=loop["loop_latency"],
        tensor=loop["loop_hgmma"] * _product_cycles(tiling.tile_n) * tiling.warpgroups,
        memory=weights * (bits or 16) / 8 / bytes_per_cycle,
        copies=COPY_CYCLES / (tiling.stages - 1),
    )


@dataclasses.dataclass(frozen=True)
class TileCycles:
    """Of a whole tile of many rows: products, then an epilogue, beside copies from the cache.

    With ping-pong each warpgroup has tiles of its own, so that one's epilogue is hidden behind
    the other's products. Its accumulators are as large, for half of the features or for half
    of the rows: for the same products either the rows or the weights are copied twice, and
    with half of the rows converted twice.

    Attributes:
        products: the longest of issue, latency and tensor cores.
        epilogue: until the result is on its way to memory.
        l2: copies from the L2 cache, which go on during both as far as the ring has stages.
        total: the longer of products with epilogue, and of these copies.
        ping_pong: for the same products, in the better of the two ways.
        even_l2_bytes_per_s: of an L2 cache with which ping-pong would take as long as
            products with epilogue; infinite where its own conversions take longer.
    """

    products: float
    epilogue: float
    l2: float
    total: float
    ping_pong: float
    even_l2_bytes_per_s: float


def tile_cycles(row: dict[str, int], case: Case) -> TileCycles:
    """What a tile costs whose rows fill it, and with ping-pong.

    Args:
        row: of the case, in the compiler's table.
    """
    tiling, num_matrices = tiling_of(case), 1 + case.is_gated_unit
    groups, cycles = tiling.warpgroups, predict(row, tiling, case.bits, num_matrices)
    runs = case.D * num_matrices * tiling.tile_m // 64 / (16 * row["loop_hgmma"])
    products = runs * max(cycles.issue, cycles.latency, cycles.tensor)
    issue, latency = row["epilogue_instructions"] * groups, row["epilogue_latency"]
    epilogue = max(issue, latency)
    waits = max(0, cycles.latency - cycles.tensor / groups)
    rate = L2_BYTES_PER_S / CLOCK_HZ / H200_SMS
    x_bytes = case.D * tiling.tile_n * 2
    w_bytes = case.D * num_matrices * tiling.tile_m * groups * (case.bits or 16) // 8
    ways = []
    for copied, times in (
        (groups * x_bytes + w_bytes, 1),
        (x_bytes + groups * w_bytes, groups),
    ):
        one_run = cycles.latency + (times - 1) * waits
        hidden = max(runs * times * cycles.issue + issue, runs * one_run + latency)
        hidden = max(hidden, runs * cycles.tensor)
        ways.append((max(hidden, copied / rate), hidden, copied))
    ping_pong, hidden, copied = min(ways)
    l2 = (x_bytes + w_bytes) / rate
    together, even = products + epilogue, math.inf
    if hidden < together:
        even = copied / together * H200_SMS * CLOCK_HZ
    return TileCycles(
        products=products,
        epilogue=epilogue,
        l2=l2,
        total=max(l2, together),
        ping_pong=ping_pong,
        even_l2_bytes_per_s=even,
    )


def tiles() -> list[dict[str, Any]]:
    """A row for each product with many rows."""
    [table] = json.loads(TABLE.read_text()).values()
    found = []
    for name, case in many_rows().items():
        cycles = tile_cycles(table[name], case)
        found.append({"product": name, **dataclasses.asdict(cycles)})
    return found


def many_rows() -> dict[str, Case]:
    """Forward products with many rows that the table has, by name."""
    cases = benchmark_cases() | epilogue_cases()
    return {
        name: case
        for name, case in cases.items()
        if name.endswith(" many") and case.direction == "forward"
    }


def tiling_of(case: Case) -> Tiling:
    """The default tiling of a forward product."""
    module = importlib.import_module(f"pallas_kernels.{case.op}.gpu")
    options = {} if case.bits is None else {"bits": case.bits, "group_size": case.group_size}
    options["num_matrices"] = 1 + case.is_gated_unit
    return module.default_tiling(case.R, case.D, case.F, case.E, **options)


def predictions() -> list[dict[str, Any]]:
    """A row for each product of Table 1's shapes with few rows."""
    [table] = json.loads(TABLE.read_text()).values()
    rows = []
    for name, case in benchmark_cases().items():
        if case.direction == "forward" and name.endswith(" few"):
            cycles = predict(table[name], tiling_of(case), case.bits)
            rows.append({
                "product": name, **dataclasses.asdict(cycles), "bound": cycles.bound,
                "bandwidth_share": cycles.bandwidth_share,
            })  # fmt: skip
    return rows


def predicted_share(R: int, D: int, F: int, E: int, bits: int | None) -> float | None:
    """The share of the bandwidth for a product of bfloat16 rows.

    None where no compiled case has its matrices and the tile that it runs with.
    """
    op = "grouped_matmul" if bits is None else "quantized_grouped_matmul"
    wanted = tiling_of(Case(op, R, D, F, E, bits=bits))
    [table] = json.loads(TABLE.read_text()).values()
    for name, case in benchmark_cases().items():
        if (case.op, case.bits, case.D, case.F, case.direction) == (op, bits, D, F, "forward"):
            tiling = tiling_of(case)
            if _tile(tiling) == _tile(wanted) and name.endswith(" few"):
                return predict(table[name], tiling, bits).bandwidth_share
    return None


def occupancy(case: Case, active: int) -> dict[str, float]:
    """How `active` experts, which share a product's rows equally, occupy an H200.

    Returns:
        Of the parts of D that the kernel takes, and beside them (`whole_`) of D in one part:
        waves of tiles over all SMs, SMs with a tile on average, and the steps along D of the
        busiest SM, with one for each store.
    """
    tiling, steps = tiling_of(case), case.D // tiling_of(case).tile_k
    sizes_E = np.zeros(case.E, np.int32)
    sizes_E[:active] = case.R // active
    row_tiles = int(tile_schedule.row_tiles(sizes_E, case.R, tiling.tile_n).count[1])
    tiles = row_tiles * -(-case.F // (tiling.tile_m * tiling.warpgroups))
    parts = best_parts(tiles, steps, tiling.splits, H200_SMS)
    found = {"parts": parts}
    for name, count in (("", parts), ("whole_", 1)):
        waves = tiles * count / H200_SMS
        found |= {
            f"{name}waves": waves,
            f"{name}busy_sms": tiles * count / math.ceil(waves),
            f"{name}steps": steps_of_busiest(count, tiles, steps, H200_SMS),
        }
    return found


def occupancies() -> list[dict[str, Any]]:
    """A row for each number of active experts of 32, of Table 1's shapes, 8 rows for each."""
    rows = []
    for (D, F), bits in itertools.product(MATRICES, (None, 8, 4)):
        for active in (1, 2, 4, 8, EXPERTS):
            op = "grouped_matmul" if bits is None else "quantized_grouped_matmul"
            case = Case(op, ROWS["few"] * active, D, F, EXPERTS, bits=bits)
            rows.append({
                "product": f"int{bits} {D}x{F}" if bits else f"bfloat16 {D}x{F}",
                "active": active, **occupancy(case, active),
            })  # fmt: skip
    return rows


def _tile(tiling: Tiling) -> tuple:
    return tiling.tile_m, tiling.tile_n, tiling.tile_k, tiling.warpgroups


if __name__ == "__main__":
    for each in predictions() + tiles() + occupancies():
        shown = (f"{v:.3g}" if isinstance(v, float) else str(v) for v in each.values())
        print("  ".join(f"{key}={value}" for key, value in zip(each, shown, strict=True)))
