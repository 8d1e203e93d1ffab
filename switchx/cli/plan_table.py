# SPDX-License-Identifier: Apache-2.0
"""What `switchx plan` shows: a row a plan, the first three in words, what was refused.

A plan as the gin file that `switchx train` reads after a run's own files.
"""

import dataclasses
from typing import Any

from rich.console import Console
from rich.table import Table

from switchx.partitioning.mesh import AXES
from switchx.partitioning.rules import Rules
from switchx.partitioning.schedule import ScheduleSpec
from switchx.planner.hardware import Hardware
from switchx.planner.layout import Workload
from switchx.planner.search import Plan, Search, explain, num_bytes, seconds
from switchx.planner.step_comm import step_collectives

COLUMNS = ("", "mesh", "step", "tokens/s", "products", "collectives", "bubble", "memory")
MEMORY_PARTS = ("state", "gradients", "activations", "working", "logits", "gathered")


def row(rank: int, plan: Plan, workload: Workload) -> dict[str, Any]:
    """A plan as one JSON object; units are in the names."""
    time, memory = plan.time, plan.memory
    kinds: dict[str, float] = {}
    for each in step_collectives(workload, plan.layout):
        kinds[each.kind] = kinds.get(each.kind, 0.0) + each.total_bytes
    return {
        "rank": rank,
        **plan.layout.shape,
        "dispatcher": plan.layout.dispatcher,
        "microbatches": plan.layout.num_microbatches,
        "step_s": time.step_s,
        "overlapped_step_s": time.overlapped_s,
        "tokens_per_s": plan.tokens_per_s,
        "compute_s": time.compute_s,
        "communication_s": time.communication_s,
        "communication_between_nodes_s": time.between_s,
        "update_s": time.update_s,
        "bubble_s": time.bubble_s,
        "bubble_fraction": time.bubble,
        "memory_bytes": memory.total,
        **{f"memory_{part}_bytes": getattr(memory, part) for part in MEMORY_PARTS},
        "collective_bytes": kinds,
    }


def print_search(found: Search, hardware: Hardware, devices: int, top: int) -> None:
    """The ranked plans for people, on standard output."""
    console = Console(highlight=False, soft_wrap=True)
    plans = found.plans
    console.print(
        f"{devices} devices of {hardware.name} ({hardware.description}): "
        f"{found.looked_at:,} layouts, {len(plans):,} fit"
    )
    table = Table(box=None)
    for column in COLUMNS:
        is_mesh = column == "mesh"
        justify = "left" if is_mesh else "right"
        table.add_column(column, justify=justify, no_wrap=not is_mesh, overflow="fold")
    for i, plan in enumerate(plans[:top], 1):
        table.add_row(
            str(i),
            plan.layout.name,
            seconds(plan.time.step_s),
            f"{plan.tokens_per_s:,.0f}",
            seconds(plan.time.compute_s),
            seconds(plan.time.communication_s),
            f"{plan.time.bubble:.0%}",
            num_bytes(plan.memory.total),
        )
    console.print(table)
    for i, plan in enumerate(plans[:3], 1):
        console.print(f"\n{i}. {explain(plan, hardware, plans[0])}")
    if found.refused:
        console.print("\nRefused:")
        for reason, count in sorted(found.refused.items(), key=lambda item: -item[1]):
            console.print(f"  {count:6,}  {reason}")


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
