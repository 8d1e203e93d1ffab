# SPDX-License-Identifier: Apache-2.0
"""Memory of pipelined steps, off the compiled programs."""

import dataclasses

import pytest

from switchx.bench.pipeline import MODEL, memory_row, memory_rows
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.schedule import ScheduleSpec

SMALL = dataclasses.replace(MODEL, num_decoder_layers=2)
MESH = MeshSpec(pipe=2, data=4)


def test_activations_of_1f1b_do_not_grow_with_the_microbatches():
    few, many = memory_rows([ScheduleSpec()], (8, 128), model=SMALL, mesh=MESH)
    assert many["temporary_bytes"] <= 1.01 * few["temporary_bytes"]
    assert many["kept_inputs"] == few["kept_inputs"]
    for row in (few, many):
        assert 0.9 * row["stage_bytes"] < row["argument_bytes"] <= 1.05 * row["stage_bytes"]


@pytest.mark.slow
def test_activations_of_gpipe_do():
    row = memory_row(ScheduleSpec("gpipe"), 128, model=SMALL, mesh=MESH)
    flat = memory_row(ScheduleSpec(), 128, model=SMALL, mesh=MESH)
    assert row["temporary_bytes"] > 2 * flat["temporary_bytes"]
