# SPDX-License-Identifier: Apache-2.0
"""A plan as the gin file that `switchx train` reads after a run's own files."""

import dataclasses
import json

from switchx.partitioning.mesh import MeshSpec
from switchx.planner.explain import explain
from switchx.planner.hardware import Hardware
from switchx.planner.layout import AXES
from switchx.planner.search import Plan

HEADER = """\
from __gin__ import dynamic_registration
from switchx.models import config
from switchx.partitioning import mesh
from switchx.partitioning import rules

"""


def mesh_gin(plan: Plan, hardware: Hardware, command: str) -> str:
    """The mesh, the rules and the dispatcher; every axis is named, so nothing is inherited.

    Args:
        command: that made the plan, for the file's head.

    Raises:
        ValueError: the plan has an axis of several devices that a mesh does not have.
    """
    layout, fields = plan.layout, {each.name for each in dataclasses.fields(MeshSpec)}
    words = explain(plan, hardware, plan)
    lines = [f"# Made by {command}", "#", *_wrapped(words), "", HEADER.rstrip(), ""]
    if layout.dispatcher is None:
        lines.remove(HEADER.rstrip())
        lines.append(HEADER.replace("from switchx.models import config\n", "").rstrip() + "\n")
    lines += ["MESH = @mesh.MeshSpec()"]
    for axis in AXES:
        size = getattr(layout, axis)
        if axis in fields:
            lines.append(f"mesh.MeshSpec.{axis} = {size}")
        elif size > 1:
            raise ValueError(f"a mesh has no axis {axis!r}; plan with has_pipe=False")
    lines += [
        "mesh.MeshSpec.rules = @rules.Rules()",
        f"rules.Rules.expert_params = {_literal(layout.rules.expert_params)}",
        f"NUM_MICROBATCHES = {layout.num_microbatches}",
    ]
    if layout.dispatcher is not None:
        lines.append(f"config.SwitchConfig.dispatcher = {json.dumps(layout.dispatcher)}")
    return "\n".join(lines) + "\n"


def _literal(value) -> str:
    """Nested tuples with double quotes, as the configs have them."""
    return repr(value).replace("'", '"')


def _wrapped(text: str, width: int = 93) -> list[str]:
    lines, line = [], "#"
    for word in text.split():
        if len(line) + 1 + len(word) > width:
            lines.append(line)
            line = "#"
        line += f" {word}"
    return [*lines, line]
