# SPDX-License-Identifier: Apache-2.0
"""Pipeline MoE's tables: copied right, predicted by the planner, in the right order."""

import pytest

from switchx.bench import pipeline_moe_paper
from switchx.bench.pipeline_moe_paper import (
    TABLE_1,
    TABLE_2,
    TABLE_3,
    cells,
    fewest_microbatches,
    forward_seconds,
    predicted_tokens_per_s,
    scattered,
    speedup,
    table_2_workload,
)
from switchx.planner.hardware import load_hardware
from switchx.planner.layout import Layout
from switchx.planner.memory import memory_use
from switchx.planner.step_comm import StepCollective

V100 = load_hardware("v100")
ROWS = {row.name: row for row in TABLE_2}


def test_tables_are_the_papers():
    """Sums and ratios that the paper prints itself, misprints apart."""
    assert (TABLE_1["1st all-to-all"] + TABLE_1["2nd all-to-all"]) / TABLE_1[
        "total"
    ] == pytest.approx(0.655, abs=5e-4)
    assert TABLE_1["MoE"] / TABLE_1["total"] == pytest.approx(0.826, abs=5e-4)
    assert TABLE_3["MoE"] / TABLE_3["total"] == pytest.approx(0.382, abs=5e-4)
    assert len(TABLE_2) == 13
    devices = {row.name: row.layout.size for row in TABLE_2}
    assert devices["143B PPMoE TP8 PP16"] == 128
    assert devices["143B DPMoE DP128 TP2"] == devices["143B DPMoE DP32 TP8"] == 256
    assert all(size == 32 for name, size in devices.items() if ROWS[name].is_small)


def test_printed_ratios_are_the_printed_throughputs():
    """Copied right: to the slowest dense model, one misprint apart (2708 / 3244 is 83.5%)."""
    misprints = {"6.7B PPMoE TP8 PP4": 0.835}
    printed = [row for row in TABLE_2 if row.printed_ratio is not None]
    assert len(printed) == 7
    for row in printed:
        dense = [r for r in TABLE_2 if r.size == row.size and not r.layout.dispatcher]
        ratio = row.tokens_per_s / min(r.tokens_per_s for r in dense)
        assert ratio == pytest.approx(misprints.get(row.name, row.printed_ratio), abs=1e-3)


def test_no_cell_is_predicted_and_unpredictable():
    found = cells()
    silent = [cell.cell for cell in found if cell.predicted is None]
    names = [row.name for row in TABLE_2]
    assert not any(name in cell for name in names for cell in silent)


def test_parameters_are_those_of_the_table():
    found = [c for c in cells() if c.cell.startswith("parameters")]
    assert len(found) == 4
    assert max(abs(c.error) for c in found) < 0.03


def test_ppmoe_is_predicted_faster_than_dpmoe():
    """By less than measured: the planner's all-to-all knows no contention."""
    measured, predicted = speedup("143B DPMoE DP128 TP2", "143B PPMoE TP8 PP16")
    assert measured == pytest.approx(1.765, abs=1e-3)
    assert 1.0 < predicted < measured
    best = max(
        (row for row in TABLE_2 if "143B DPMoE" in row.name),
        key=lambda row: predicted_tokens_per_s(row.name),
    )
    assert predicted_tokens_per_s("143B PPMoE TP8 PP16") > predicted_tokens_per_s(best.name)


def test_experts_in_the_tensor_group_cost_what_a_dense_ffn_does():
    """Section 3.3.4: the MoE layer's all-reduce is the FFN's."""
    row = ROWS["6.7B PPMoE TP8 PP4"]
    layout = fewest_microbatches(table_2_workload(row), row.layout, V100)
    spent = forward_seconds(table_2_workload(row), layout, V100)
    assert spent["MoE all-reduce"] == pytest.approx(spent["FFN all-reduce"])
    assert spent["experts"] == pytest.approx(spent["FFN"])


def test_fewest_microbatches_fit_and_fewer_do_not():
    row = ROWS["143B PPMoE TP8 PP16"]
    workload = table_2_workload(row)
    layout = fewest_microbatches(workload, row.layout, V100)
    usable = V100.memory.usable_bytes
    assert memory_use(workload, layout).total <= usable


def test_between_stages_every_rank_sends_its_part():
    layout = Layout(pipe=4, model=8)
    sent = StepCollective("collective-permute", "x", "pipeline", ("pipe",), 80.0, 3)
    part, whole = scattered([sent], layout)
    assert (part.kind, part.num_bytes) == ("collective-permute", 10.0)
    assert (whole.kind, whole.axes, whole.num_bytes) == ("all-gather", ("model",), 80.0)
    assert scattered([sent], Layout(pipe=4)) == [sent]


def test_what_cannot_be_predicted_says_why():
    silent = [cell for cell in cells() if cell.predicted is None]
    assert silent and all(cell.note for cell in silent)
    assert pipeline_moe_paper.PAPER == "PPMoE"
