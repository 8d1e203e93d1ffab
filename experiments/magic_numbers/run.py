# SPDX-License-Identifier: Apache-2.0
"""Conversions of int8 and int4 weights in each kernel, counted in compiled code by chip
(Kim et al. 2022, section 3.4).

    make experiments EXPERIMENT=magic_numbers

Compiles 96 programs for hardware that need not be there; the environment variables
SWITCHX_AOT_TPU and SWITCHX_AOT_GPU name the folders of the compilers.
"""

import itertools
import math
from typing import Any

from experiments.magic_numbers.conversions import COMPILER
from experiments.magic_numbers.count import TARGETS, counts
from experiments.measured import Ratio
from experiments.study import Study, main
from pallas_kernels.aot.case import ROWS


def cost(found: dict[str, Any]) -> float:
    """Cycles of a GPU's loop, instructions of a TPU's kernel."""
    return found["cycles"] if "cycles" in found else found["bundles"]


def comparison(name: str, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each width and type of a chip: the cost of the compiler's conversion and of
    the best magic numbers, with few and with many rows an expert.

    Magic numbers cost less where one way of them does with few rows and with many: by the cost
    model of docs/kernels.md, without what a conversion does not change.
    """
    rows = []
    for (bits, dtype), of_kind in itertools.groupby(found, lambda x: (x["bits"], x["dtype"])):
        costs = {}
        for each in of_kind:
            costs.setdefault(each["conversion"], {})[each["rows"]] = each
        ours = {
            way: [cost(each) for each in by_rows.values()] for way, by_rows in costs.items()
        }
        own = ours.pop(COMPILER)
        best = min(ours, key=lambda way: math.prod(ours[way]))
        wins = all(magic < others for magic, others in zip(ours[best], own, strict=True))
        row = {"chip": name, "weights": f"int{bits}", "rows are": dtype}
        for i, load in enumerate(ROWS):
            row |= {f"{load}: compiler's": own[i], f"{load}: magic": ours[best][i]}
        if "conversions" in costs[COMPILER][ROWS["few"]]:
            row |= {"slow conversions": costs[COMPILER][ROWS["few"]]["conversions"]}
        rows.append(row | {"magic is": best, "costs less": best if wins else COMPILER})
    return rows


def verdict(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Cycles are counted on other chips than the paper's, by a model: reported. The effect is
    that of the paper's type, float16."""
    papers = [row for row in rows if row["rows are"] == "float16"]
    gains = [each for row in papers for each in gains_of(row)]
    wins = [row["costs less"] != COMPILER for row in papers]
    others = [
        f"{row['weights']} to {row['rows are']} on {row['chip']}"
        for row in rows
        if row not in papers and row["costs less"] != COMPILER
    ]
    return {
        "verdict": "reported",
        "because": f"To float16 they cost less in {sum(wins)} of {len(wins)} products on GPUs; "
        f"of other types in: {'; '.join(others) or 'none'}.",
        "effect": spread_of(gains),
        "effect_of": "counted cycles with the compiler's conversion to float16 over those with "
        "magic numbers, mean and range",
    }  # fmt: skip


def gains_of(row: dict[str, Any]) -> list[float]:
    """Cost with the compiler's conversion over that with magic numbers, by load."""
    return [row[f"{load}: compiler's"] / row[f"{load}: magic"] for load in ROWS]


def spread_of(gains: list[float]) -> Ratio:
    """Geometric mean and range."""
    return Ratio(math.exp(sum(map(math.log, gains)) / len(gains)), min(gains), max(gains))


def judge(results: dict[str, Any]) -> dict[str, Any]:
    rows = [row for table in results["tables"] for row in table["rows"]]
    return verdict(rows) | {
        "intervals": by_product(rows),
        "intervals_of": "the compiler's cost over magic numbers'",
    }


def run(study: Study) -> None:
    cells = study.cells()
    names = ["A100, Triton"] if study.is_quick else list(TARGETS)
    found = {
        name: cells.get({"target": name}, lambda name=name: counts(name)) for name in names
    }
    rows = [row for name, each in found.items() for row in comparison(name, each)]
    gpus = [row for row in rows if "slow conversions" in row]
    tables = [{
        "title": "GPUs: cycles of the loop over 128 channels, and how many instructions of a "
        "warp convert integers where the compiler does it, few rows.",
        "rows": gpus,
    }]  # fmt: skip
    if tpus := [row for row in rows if row not in gpus]:
        tables.append({"title": "TPUs: instructions (bundles) of the kernel.", "rows": tpus})
    study.publish(cells, {}, judge, seeds=[0], tables=tables)


def by_product(rows: list[dict[str, Any]]) -> dict[str, Ratio]:
    """Gains by chip and types, for the picture."""
    return {
        f"{row['chip']}, {row['weights']} to {row['rows are']}": spread_of(gains_of(row))
        for row in rows
    }


if __name__ == "__main__":
    main(__file__, __doc__, run)
