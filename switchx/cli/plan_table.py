# SPDX-License-Identifier: Apache-2.0
"""What `switchx plan` shows: a row a plan, the first three in words, what was refused."""

from typing import Any

from rich.console import Console
from rich.table import Table

from switchx.planner.explain import explain, num_bytes, seconds
from switchx.planner.hardware import Hardware
from switchx.planner.search import Plan, Search
from switchx.planner.step_comm import step_collectives
from switchx.planner.workload import Workload


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
        "memory_state_bytes": memory.state,
        "memory_gradients_bytes": memory.gradients,
        "memory_activations_bytes": memory.activations,
        "memory_working_bytes": memory.working,
        "memory_logits_bytes": memory.logits,
        "memory_gathered_bytes": memory.gathered,
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
    columns = ("", "mesh", "step", "tokens/s", "products", "collectives", "bubble", "memory")
    for column in columns:
        table.add_column(
            column,
            justify="left" if column == "mesh" else "right",
            no_wrap=column != "mesh",
            overflow="fold",
        )
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
