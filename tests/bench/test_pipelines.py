# SPDX-License-Identifier: Apache-2.0
"""What devices hold of a pipelined model: activations by schedule, no more than a stage."""

import dataclasses

import pytest

from switchx.bench import pipelines
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.schedule import ScheduleSpec
from switchx.training import program
from switchx.training.evaluate import eval_step


def test_memory_that_grows_is_seen():
    rows = [
        {"schedule": kind, "temporary_bytes": size}
        for kind, size in (("gpipe", 100), ("1f1b", 100), ("1f1b", 101), ("gpipe", 900))
    ]
    assert pipelines.growth(rows, "gpipe") == 9.0 and pipelines.growth(rows, "1f1b") == 1.01


SMALL = dataclasses.replace(pipelines.NARROW, num_decoder_layers=2)
MESH = MeshSpec(pipe=2, data=4)


def test_activations_of_1f1b_do_not_grow_with_the_microbatches():
    few, many = (
        pipelines.memory_row(ScheduleSpec(), number, model=SMALL, mesh=MESH)
        for number in (8, 128)
    )
    assert many["temporary_bytes"] <= 1.01 * few["temporary_bytes"]
    assert many["kept_inputs"] == few["kept_inputs"]
    for row in (few, many):
        assert 0.9 * row["stage_bytes"] < row["argument_bytes"] <= 1.05 * row["stage_bytes"]


@pytest.mark.slow
def test_activations_of_gpipe_do():
    row, flat = (
        pipelines.memory_row(spec, 128, model=SMALL, mesh=MESH)
        for spec in (ScheduleSpec("gpipe"), ScheduleSpec())
    )
    assert row["temporary_bytes"] > 2 * flat["temporary_bytes"]


def few_programs(monkeypatch):
    monkeypatch.setattr(pipelines, "DEEP", {"both": pipelines.DEEP["decoder-only"]})
    return pipelines.program_rows()


@pytest.mark.slow
def test_no_program_has_more_than_its_stage(monkeypatch):
    rows = few_programs(monkeypatch)
    assert [row["program"].split(",")[0] for row in rows] == [
        "training", "evaluation", "initialization",
    ]  # fmt: skip
    assert pipelines.holds_whole_model(rows).holds


@pytest.mark.slow
def test_an_evaluation_that_gathers_the_blocks_is_found(monkeypatch):
    """What the compiler makes of stacked blocks that are split over `pipe`."""
    monkeypatch.setattr(
        program, "pipelined_eval_step", lambda model, schedule, *given: eval_step(model, *given)
    )
    found = pipelines.holds_whole_model(few_programs(monkeypatch))
    assert (found.value, found.holds) == (1, False)
