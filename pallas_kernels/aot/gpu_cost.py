# SPDX-License-Identifier: Apache-2.0
"""A cost model of the Hopper kernels: what bounds their loop, read off the machine code.

    python -m pallas_kernels.aot.gpu_cost

prints, for the shapes of Table 1 of Kim et al. 2022 (arXiv:2211.10017), the cycles that one run
of the loop over D takes of each resource of an SM, and the share of the memory's bandwidth that
follows. Of the loop the compiler's table (`gpu_budgets.json`) has its instructions, its HGMMA
and the cycles of one warp; nothing was measured. The longest resource is taken for the time:

    issue    instructions of all warpgroups; each of the four schedulers issues one a cycle, and
             has a warp of every warpgroup
    latency  one warp that issues in order: the stall counts that ptxas wrote into the code, the
             waits for what it loads and exchanges through shared memory, and those for its own
             products, as if the tensor core had no others
    tensor   64 x N x 16 products of an HGMMA at 2,048 a cycle (bfloat16, dense)
    memory   the weights' bytes at an SM's share of the bandwidth; rows come from the cache
    copies   Little's law: a copy is under way for a fixed time, and all stages of the ring but
             the one that is multiplied are

Waits for barriers, start, epilogue and the last wave are not in it: it is an upper bound.
Dims: R rows, D inputs, F outputs, E experts, N rows of a tile
"""

import dataclasses
import importlib
import json
import pathlib
import re
from typing import Any

from pallas_kernels.aot.case import Case, benchmark_cases
from pallas_kernels.tiling.gpu import H200_SMS, Tiling

TABLE = pathlib.Path(__file__).with_name("gpu_budgets.json")
# Of an H200 (h200.txtpb).
BYTES_PER_S, CLOCK_HZ = 4.8e12, 1.98e9
PRODUCTS_PER_CYCLE = 2048
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
    """`loop_instructions`, `loop_latency` (cycles) and `loop_hgmma` of the loop over D.

    It is the innermost loop with HGMMA; where tiles are cut, that of whole ones.

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
    loops = []
    for end, text in enumerate(texts):
        branch = _BRANCH.search(text)
        begin = labels.get(branch[1], end + 1) if branch else end + 1
        widths = [int(each) for each in _WIDTH.findall("\n".join(texts[begin : end + 1]))]
        if widths:
            loops.append((-max(widths), end - begin, begin, end + 1, len(widths)))
    if not loops:
        raise ValueError(
            f"expected a loop with HGMMA among {len(texts)} instructions with control codes; "
            "other versions of nvdisasm may write them otherwise"
        )
    _, _, begin, end, hgmma = min(loops)
    return {
        "loop_instructions": end - begin,
        "loop_latency": _latency(instructions[begin:end]),
        "loop_hgmma": hgmma,
    }


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


def tiling_of(case: Case) -> Tiling:
    """The default tiling of a forward product."""
    module = importlib.import_module(f"pallas_kernels.{case.op}.gpu")
    options = {} if case.bits is None else {"bits": case.bits, "group_size": case.group_size}
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


def _tile(tiling: Tiling) -> tuple:
    return tiling.tile_m, tiling.tile_n, tiling.tile_k, tiling.warpgroups


if __name__ == "__main__":
    for each in predictions():
        shown = (f"{v:.3g}" if isinstance(v, float) else str(v) for v in each.values())
        print("  ".join(f"{key}={value}" for key, value in zip(each, shown, strict=True)))
