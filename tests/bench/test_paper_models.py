# SPDX-License-Identifier: Apache-2.0
"""The papers' models are those of our configurations."""

import dataclasses

import gin
import pytest

from switchx.bench import pipeline_moe_paper, se_moe_paper
from switchx.bench.paper_models import gpt, paper_workload, with_dispatcher
from switchx.planner.layout import Layout
from switchx.planner.memory import state_bytes
from switchx.planner.model_cost import count_parameters
from tests.processes import ROOT

SMALL, LARGE = pipeline_moe_paper.SMALL, pipeline_moe_paper.LARGE


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("gpt3_medium", gpt(**SMALL)),
        ("gpt3_medium_moe", gpt(**SMALL, experts=64)),
        ("gpt3_6_7b", gpt(**LARGE)),
        ("gpt3_6_7b_moe", gpt(**LARGE, experts=64)),
        ("se_moe", gpt(**se_moe_paper.SIZES, experts=8, every=1)),
    ],
)
def test_sizes_are_the_configurations(name, model):
    try:
        gin.add_config_file_search_path(str(ROOT / "configs"))
        gin.parse_config_files_and_bindings([f"models/{name}.gin"], [])
        shipped = gin.get_configurable("ModelConfig")()
    finally:
        gin.clear_config()
    assert count_parameters(model) == count_parameters(shipped)
    assert (model.num_heads, model.max_length) == (shipped.num_heads, shipped.max_length)


def test_state_has_the_papers_bytes_a_parameter():
    model = gpt(2, 64, 4, 512, experts=4)
    workload = paper_workload(model, 4, optimizer_bytes=14)
    count = count_parameters(model).total
    assert state_bytes(workload, Layout(), "params") == 2 * count
    assert state_bytes(workload, Layout(), "optimizer") == 14 * count
    assert workload.routing(4, 2048) == (4, 2048, 512)
    assert workload.tokens == 4 * 2048


def test_another_dispatcher_is_the_same_model():
    model = gpt(2, 64, 4, 512, experts=4)
    other = with_dispatcher(model, "sliced")
    assert other.switch.dispatcher == "sliced"
    assert dataclasses.replace(other, switch=model.switch) == model
