# SPDX-License-Identifier: Apache-2.0
"""The report of both papers: every cell has an error or a reason, and checks can fail."""

import dataclasses

from switchx.bench import papers, pipeline_moe_paper, se_moe_paper


def test_every_cell_has_an_error_or_a_reason():
    report = papers.run()
    names = [(row["paper"], row["cell"]) for row in report.results]
    assert len(set(names)) == len(names) > 50
    for row in report.results:
        assert (row["relative_error"] is None) == (row["predicted"] is None)
        assert row["predicted"] is not None or row["note"]
    assert [check.name for check in report.checks] == [
        "papers_parameters_error", "ppmoe_vs_dpmoe_small",
        "ppmoe_vs_dpmoe_143b", "hierarchical_saving",
    ]  # fmt: skip
    assert all(check.holds for check in report.checks)


def test_a_wrong_count_is_found():
    cells = pipeline_moe_paper.cells() + se_moe_paper.cells()
    i = next(i for i, cell in enumerate(cells) if "parameters" in cell.cell)
    cells[i] = dataclasses.replace(cells[i], predicted=1.1 * cells[i].published)
    failed = [check.name for check in papers.checks(cells) if not check.holds]
    assert failed == ["papers_parameters_error"]


def test_headlines_are_those_of_the_issue():
    names = " ".join(row["cell"] for row in papers.headline_rows())
    for part in ("best DPMoE, 143B", "slowest dense, small", "slowest dense, 143B",
                 "all-to-alls of forward", "hierarchical all-to-all"):  # fmt: skip
        assert part in names
