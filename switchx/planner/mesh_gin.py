# SPDX-License-Identifier: Apache-2.0
"""A plan as the gin file that `switchx train` reads after a run's own files."""

import dataclasses

from switchx.partitioning.mesh import AXES
from switchx.partitioning.rules import Rules
from switchx.partitioning.schedule import ScheduleSpec
from switchx.planner.explain import explain
from switchx.planner.hardware import Hardware
from switchx.planner.search import Plan

IMPORTS = """\
from __gin__ import dynamic_registration
from switchx.models import config
from switchx.partitioning import mesh
from switchx.partitioning import rules
from switchx.partitioning import schedule
from switchx.training import job"""


def mesh_gin(plan: Plan, hardware: Hardware, command: str) -> str:
    """The plan's mesh, rules, schedule and dispatcher, to be read after a run's own files.

    gin keeps what an earlier file bound, so every axis, every field of `Rules` and the
    pipeline's schedule are written, defaults too: a run's own rules (configs/meshes/pod.gin)
    are not what was predicted.

    Args:
        command: that made the plan, for the file's head.
    """
    layout = plan.layout
    bound = {f"mesh.MeshSpec.{axis}": getattr(layout, axis) for axis in AXES}
    bound |= _fields("rules.Rules", layout.rules, Rules)
    # What the planner takes the bubble and the activations in flight of.
    bound |= _fields("schedule.ScheduleSpec", ScheduleSpec("1f1b"), ScheduleSpec)
    bound["NUM_MICROBATCHES"] = layout.num_microbatches
    if layout.pipe > 1:
        bound["config.ModelConfig.scan_layers"] = True
    if layout.dispatcher is not None:
        bound["config.SwitchConfig.dispatcher"] = layout.dispatcher
    imports = IMPORTS
    if not any(name.startswith("config.") for name in bound):
        imports = imports.replace("from switchx.models import config\n", "")
    return "\n".join(
        [
            f"# Made by {command}",
            "#",
            *_wrapped(explain(plan, hardware, plan)),
            "",
            imports,
            "",
            "MESH = @mesh.MeshSpec()",
            "mesh.MeshSpec.rules = @rules.Rules()",
            "job.TrainingJob.pipeline = @schedule.ScheduleSpec()",
            *(f"{name} = {_literal(value)}" for name, value in bound.items()),
            "",
        ]
    )


def _fields(name: str, value, kind: type) -> dict:
    return {
        f"{name}.{field.name}": getattr(value, field.name) for field in dataclasses.fields(kind)
    }


def _literal(value) -> str:
    """As the configs have it: double quotes, a table of rules with one a line."""
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return "\n".join(["(", *(f"    {_literal(rule)}," for rule in value), ")"])
    return repr(value).replace("'", '"')


def _wrapped(text: str, width: int = 93) -> list[str]:
    lines, line = [], "#"
    for word in text.split():
        if len(line) + 1 + len(word) > width:
            lines.append(line)
            line = "#"
        line += f" {word}"
    return [*lines, line]
