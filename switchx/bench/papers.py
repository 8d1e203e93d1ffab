# SPDX-License-Identifier: Apache-2.0
"""`switchx check papers`: the planner's predictions against what two papers measured.

Chen et al. 2023 (Pipeline MoE, arXiv:2304.11414); Shen et al. 2022 (SE-MoE,
arXiv:2205.10034). The hardware specs were written before, one efficiency a resource; an
error stands as it is.
"""

from typing import Any

from switchx.bench import pipeline_moe_paper, se_moe_paper
from switchx.bench.published import Cell
from switchx.bench.report import Check, Report

# Papers round parameters to two or three digits.
PARAMETER_ERROR = 0.03


def run() -> Report:
    """Every cell, the errors of the predicted ones, and checks."""
    cells = pipeline_moe_paper.cells() + se_moe_paper.cells()
    return Report("check papers", [cell.row() for cell in cells], checks(cells))


def checks(cells: list[Cell]) -> list[Check]:
    """Parameters within rounding, and who has to be the faster one; how much is in the rows."""
    parameters = [
        abs(cell.error)
        for cell in cells
        if "parameters" in cell.cell and cell.predicted is not None
    ]
    small = pipeline_moe_paper.speedup("6.7B DPMoE DP32", "6.7B PPMoE TP8 PP4")
    large = pipeline_moe_paper.speedup("143B DPMoE DP128 TP2", "143B PPMoE TP8 PP16")
    saving = se_moe_paper.hierarchical_saving()
    return [
        Check("papers_parameters_error", max(parameters), f"<={PARAMETER_ERROR}"),
        Check("ppmoe_vs_dpmoe_small", small[1], ">=1.0"),
        Check("ppmoe_vs_dpmoe_143b", large[1], ">=1.0"),
        Check("hierarchical_saving", saving, ">=0.0"),
    ]


def headline_rows() -> list[dict[str, Any]]:
    """The comparisons that the papers are known for, measured and predicted."""
    names = ("PPMoE over", "both all-to-alls of forward", "Section 5.3")
    cells = pipeline_moe_paper.cells() + se_moe_paper.cells()
    return [cell.row() for cell in cells if any(name in cell.cell for name in names)]
