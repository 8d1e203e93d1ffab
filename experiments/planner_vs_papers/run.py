# SPDX-License-Identifier: Apache-2.0
"""What the planner says of the tables of Pipeline MoE and SE-MoE, cell by cell.

    make experiments EXPERIMENT=planner_vs_papers

Chen et al. 2023 (Pipeline MoE, arXiv:2304.11414); Shen et al. 2022 (SE-MoE, arXiv:2205.10034).
The hardware specs were written before the comparison, with one efficiency a resource; an error
stands as it is. No device is needed, and no data.
"""

import dataclasses
from typing import Any

from experiments.measured import Ratio
from experiments.planner_vs_papers import pipeline_moe, se_moe
from experiments.planner_vs_papers.papers import Cell
from experiments.study import Study, main
from switchx.results import Check

# Papers round parameters to two or three digits.
PARAMETER_ERROR = 0.03
LARGE = "PPMoE over the best DPMoE, 143B"
SPEEDUPS = ("PPMoE over the best DPMoE", "SE-MoE over DeepSpeed")


def verdict(checks: list[dict]) -> dict:
    """Reproduced: every check holds, and at 143B PPMoE is the faster one over all that the
    paper leaves open. Not reproduced: some check does not hold."""
    measured, (low, high) = pipeline_moe.speedup(LARGE)
    failed = [each["name"] for each in checks if not each["holds"]]
    word = "reproduced" if low > 1 else "undecided"
    return {
        "verdict": "not reproduced" if failed else word,
        "because": f"Of {len(checks)} checks fail: {', '.join(failed) or 'none'}. At 143B "
        f"PPMoE is {low:.2f} to {high:.2f} times as fast as the best DPMoE by what the paper "
        f"leaves open; it measured {measured:.2f}.",
        "effect": Ratio((low * high) ** 0.5, low, high),
        "effect_of": f"{LARGE}, range and its middle (measured {measured:.2f})",
    }


def checks(cells: list[Cell]) -> list[Check]:
    """Parameters within rounding; what is measured lies in what is predicted."""
    parameters = [
        abs(cell.error)
        for cell in cells
        if "parameters" in cell.cell and cell.predicted is not None
    ]
    found = [Check("papers_parameters_error", max(parameters), f"<={PARAMETER_ERROR}")]
    for name, what in (
        ("ppmoe_vs_dpmoe_small", "PPMoE over the best DPMoE, small"),
        ("ppmoe_vs_dpmoe_143b", "PPMoE over the best DPMoE, 143B"),
    ):
        measured, (low, high) = pipeline_moe.speedup(what)
        found += [
            Check(f"{name}_low", low, f"<={measured:.3f}"),
            Check(f"{name}_high", high, f">={measured:.3f}"),
        ]
    return [*found, Check("hierarchical_saving", se_moe.hierarchical_saving(), ">=0.0")]


def compared() -> dict:
    """Every cell with its error, and the checks."""
    cells = pipeline_moe.cells() + se_moe.cells()
    rows = [dataclasses.asdict(each) | {"holds": each.holds} for each in checks(cells)]
    return {
        "cells": [each.row() for each in cells],
        "checks": [{k: v for k, v in row.items() if k != "is_judged"} for row in rows],
    }


def judge(results: dict[str, Any]) -> dict[str, Any]:
    (checked,) = results["tables"]
    return verdict(checked["rows"]) | {
        "intervals": speedups_of(results["results"]),
        "intervals_of": "predicted over measured",
    }


def run(study: Study) -> None:
    done = study.cells()
    found = done.get({"papers": "both"}, compared)
    title = "Checks; every cell with its error is in `results.json`:"
    study.publish(
        done,
        {},
        judge,
        seeds=[],
        tables=[{"title": title, "rows": found["checks"]}],
        results=found["cells"],
    )


def speedups_of(cells: list[dict]) -> dict[str, Ratio]:
    """Of one system over another, predicted over measured, for the picture."""
    found = {}
    for cell in cells:
        if any(name in cell["cell"] for name in SPEEDUPS):
            bounds = (cell["predicted_low"], cell["predicted_high"])
            low, high = (each / cell["published"] for each in bounds)
            found[cell["cell"]] = Ratio((low * high) ** 0.5, low, high)
    return found


if __name__ == "__main__":
    main(__file__, __doc__, run)
