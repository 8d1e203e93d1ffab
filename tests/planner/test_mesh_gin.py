# SPDX-License-Identifier: Apache-2.0
"""A plan's gin file: the mesh, rules and dispatcher that it had, and nothing of the run's."""

import dataclasses

import pytest

from switchx.gin_config.writing import mesh_gin
from switchx.hardware.spec import load_hardware
from switchx.partitioning.rules import SLICED_RULES, Rules
from switchx.pipeline.schedule import ScheduleSpec
from switchx.planner.layout import Layout
from switchx.planner.search import explain, predict
from tests.planner.workloads import DENSE, make_workload

V5E = load_hardware("v5e")


def text_of(layout: Layout, model=None) -> str:
    workload = make_workload(*([model] if model else []))
    plan = predict(workload, layout, V5E)
    return mesh_gin(plan, explain(plan, V5E, plan), "switchx plan")


def test_every_axis_and_the_parts_of_exchanges_are_bound():
    text = text_of(Layout(data=2, expert=4, dispatcher="all_to_all", num_microbatches=2))
    for line in (
        "mesh.MeshSpec.pipe = 1",
        "mesh.MeshSpec.data = 2",
        "mesh.MeshSpec.fsdp = 1",
        "mesh.MeshSpec.expert = 4",
        "mesh.MeshSpec.model = 1",
        "NUM_MICROBATCHES = 2",
        'config.SwitchConfig.dispatcher = "all_to_all"',
        "step.StepConfig.bucket_bytes = None",
    ):
        assert line in text.splitlines()
    assert text.startswith("# Made by switchx plan\n")
    assert max(map(len, text.splitlines()[:8])) <= 96
    # A run on configs/meshes/pod.gin has 2, which other dispatchers refuse.
    line = "config.SwitchConfig.exchange_parts = 1"
    assert line in text_of(Layout(model=8, dispatcher="sliced")).splitlines()
    assert line not in text_of(Layout(expert=8, dispatcher="all_to_all")).splitlines()


def test_rules_slices_and_schedules_are_bound_where_they_are_used():
    assert SLICED_RULES.expert_params[-2:] == (("E", ("model",)), ("D", ("fsdp",)))
    text = text_of(Layout(model=8, dispatcher="sliced"))
    table = text.split("rules.Rules.expert_params = ")[1].split("\n)\n")[0]
    assert table.splitlines()[-2:] == ['    ("E", ("model",)),', '    ("D", ("fsdp",)),']
    assert "rules.Rules.optimizer_slices = ()" in text_of(Layout(data=8), DENSE).splitlines()
    text = text_of(Layout(data=8, has_optimizer_slices=True), DENSE)
    assert 'rules.Rules.optimizer_slices = ("data",)' in text.splitlines()
    text = text_of(Layout(data=8), dataclasses.replace(DENSE))
    assert "SwitchConfig" not in text and "models import config" not in text
    text = text_of(Layout(pipe=4, num_microbatches=4), DENSE)
    assert "config.ModelConfig.scan_layers = True" in text.splitlines()
    assert 'schedule.ScheduleSpec.kind = "1f1b"' in text.splitlines()
    assert "scan_layers" not in text_of(Layout(data=8), DENSE)


@pytest.mark.parametrize(
    "value", [Rules(), ScheduleSpec("1f1b")], ids=lambda v: type(v).__name__
)
def test_nothing_is_left_to_what_a_run_bound(value):
    bound = [line.split(" = ")[0] for line in text_of(Layout(data=8), DENSE).splitlines()]
    for field in dataclasses.fields(value):
        assert (
            sum(name.endswith(f".{type(value).__name__}.{field.name}") for name in bound) == 1
        )
