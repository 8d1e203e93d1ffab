# SPDX-License-Identifier: Apache-2.0
"""`switchx compile`: what a compiled training step takes, as a row and checks.

docs/compiled.md reports the four Switch models on pods this way (`experiments/scale.py`).
Memory and collectives are those of the program that a pod would run. Nothing is run, so there
are no times.
"""

import collections
import math
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from switchx.compiled.training_step import CompiledStep, HostMemory
from switchx.compiled.workload import (
    has_rules_of,
    layout_of,
    planned_storage,
    workload_of,
)
from switchx.hardware.spec import load_hardware
from switchx.models.flops import count_parameters, slots_of_sequence
from switchx.partitioning.topology import GENERATIONS, Topology
from switchx.planner.search import predict
from switchx.planner.step_comm import step_collectives
from switchx.planner.step_time import executed_flops
from switchx.results import Check, Report
from switchx.training.job import TrainingJob

# Parts of a row that are in no table of names and values.
SHOWN_APART = ("collectives", "planned_bytes_per_device", "way_out")
# Limit of slots over those that the configuration asks for, as rounding may add some.
MOST_PADDING = 1.25


def report_of(step: CompiledStep, job: TrainingJob, topology: Topology, name: str) -> Report:
    """The report of a compiled step: a row that holds its collectives, and the checks.

    Args:
        name: name of the job, for the row.
    """
    memory = step.memory
    others = {f"{kind}_bytes_per_device": other.needed for kind, other in step.others.items()}
    row = {
        "run": name,
        "topology": str(topology),
        "devices": step.devices,
        "parameters": step.parameters,
        **({"teacher_parameters": step.teacher_parameters} if step.teacher_parameters else {}),
        "tokens_per_batch": step.tokens_per_batch,
        "target_tokens_per_batch": step.target_tokens_per_batch,
        "slots_per_token": step.slots_per_token,
        "argument_bytes_per_device": memory.arguments,
        "temporary_bytes_per_device": memory.temporaries,
        "needed_bytes_per_device": memory.needed,
        "hbm_bytes_per_device": memory.limit,
        "excess_bytes_per_device": memory.excess,
        **others,
        "matrix_flops_per_device": step.flops,
        "collectives": step.collectives
        and {
            kind: {"count_per_step": count, "bytes_per_device": size}
            for kind, (count, size) in step.collectives.items()
        },
        **(planned := planned_step(job, topology)),
        "compile_s": round(step.seconds, 1),
    }
    if step.overlapped_exchanges is not None:
        row["overlapped_exchanges"] = step.overlapped_exchanges
    if step.host is not None:
        row |= {
            "host_bytes_per_device": step.host.needed,
            "argument_bytes_without_storage": step.host.without.arguments,
            "needed_bytes_without_storage": step.host.without.needed,
        }
    arguments = planned.get("planned_argument_bytes_per_device", 0)
    if temporaries := planned.get("planned_temporary_bytes_per_device"):
        row["temporaries_vs_planned"] = round(memory.temporaries / temporaries, 3)
    if memory.excess:
        row["way_out"] = way_out(step)
    counted = step.parameters  # a user's own model has no formula
    if job.model.build is None:
        counted = count_parameters(job.model).total
    encoder, decoder = job.sequence_lengths
    tokens = job.batch_size * (encoder or decoder)  # the latter in a decoder-only model
    checks = [
        Check("fits", int(memory.fits), "==1"),
        *(Check(f"{kind}_fits", int(one.fits), "==1") for kind, one in step.others.items()),
        Check("parameters", step.parameters, f"=={counted}"),
        Check("devices", step.devices, f"=={topology.num_devices}"),
        Check("tokens_per_batch", step.tokens_per_batch, f"=={tokens}"),
    ]
    if arguments and step.host is None and not step.teacher_parameters:
        error = abs(memory.arguments - step.batch_bytes - arguments) / arguments
        checks.append(Check("argument_error_vs_planned", error, "<=0.01"))
    if step.slots_per_token is not None:
        wanted = slots_of_sequence(job.model, encoder, decoder)
        bound = f"<={MOST_PADDING * wanted:g}"
        checks.append(Check("slots_per_token", step.slots_per_token, bound))
    is_in_parts = job.model.switch is not None and job.model.switch.exchange_parts > 1
    if is_in_parts and step.overlapped_exchanges is not None:
        checks.append(Check("overlapped_exchanges", step.overlapped_exchanges, ">=1"))
    return Report("compile", [row], checks + _storage_checks(step.host))


def planned_step(job: TrainingJob, topology: Topology) -> dict[str, Any]:
    """The step as the planner predicts it: seconds by its spec file's constants, with an even
    load of the experts and no communication behind products; FLOPs, and bytes by collective.

    The result is empty if there is no formula for the job, or it has its own rules.
    """
    layout = layout_of(job, job.mesh.sizes(topology.num_devices))
    try:
        if not has_rules_of(job, layout):
            return {}
        hardware, workload = load_hardware(topology.kind), workload_of(job)
        plan = predict(workload, layout, hardware, planned_storage(job))
        collectives = step_collectives(workload, layout, hardware.compute)
    except ValueError:
        return {}
    sizes, arguments = collections.Counter(), plan.memory.state
    for each in collectives:
        sizes[each.kind] += each.total_bytes
    return {
        "planned_step_s": plan.time.step_s,
        "planned_parameters": sum(
            math.prod(each.shape) for each in workload.state if each.kind == "params"
        ),
        "planned_argument_bytes_per_device": round(arguments),
        "planned_temporary_bytes_per_device": round(plan.memory.total - arguments),
        "planned_matrix_flops_per_device": round(executed_flops(workload, layout)),
        "planned_bytes_per_device": {kind: round(sizes[kind]) for kind in sorted(sizes)},
    }


def _storage_checks(host: HostMemory | None) -> list[Check]:
    """The checks of a step with experts in host memory; none for any other step."""
    if host is None:
        return []
    checks = [Check("fits_without_storage", int(host.without.fits), "==0")]
    if host.needed is not None:
        checks += [
            Check("host_bytes_vs_formula", host.needed / host.formula, "<=1.01"),
            Check("copies_overlapped", host.copies_overlapped, ">=0.8"),
            Check("reversed_strides_wrong", sum(each < 0 for each in host.strides), "==0"),
        ]
    return checks


def way_out(step: CompiledStep) -> str:
    """Says where a step that does not fit could fit, by the size of its arguments."""
    total = step.memory.arguments * step.devices
    over = f"too large by {in_gib(step.memory.excess)} GiB a device"
    if step.memory.arguments <= step.memory.limit:
        return (
            f"{over}, of temporaries: use ModelConfig.remat='full', more microbatches, or more "
            "devices"
        )
    fitting = [
        f"{kind} from {needed} devices"
        for kind, one in GENERATIONS.items()
        # Gradients are as large as the parameters: half of the memory is for the arguments.
        if (needed := -(-2 * total // one.hbm_bytes)) <= one.most_chips * one.devices_per_chip
    ]
    if not fitting:
        return (
            f"{over}, of arguments alone: {in_gib(total)} GiB of arguments fit no slice there "
            "is; use fewer experts, or split what this mesh replicates"
        )
    return f"{over}, of arguments alone: split them over more devices ({', '.join(fitting)})"


def print_tables(report: Report) -> None:
    """Prints the row from top to bottom, its collectives, and the checks."""
    console = Console(markup=False, highlight=False)
    for row in report.results:
        table = Table(
            title=f"switchx compile, {row['topology']}", title_justify="left", box=None
        )
        table.add_column()
        table.add_column(justify="right")
        for name, value in row.items():
            if name not in SHOWN_APART and value is not None:
                table.add_row(name.replace("_", " "), _shown(name, value))
        console.print(table)
        if row["collectives"]:
            names = "times a step", "GiB a device", "planned"
            right = (Column(name, justify="right") for name in names)
            table = Table("collective", *right, box=None)
            planned = row.get("planned_bytes_per_device", {})
            for kind, one in row["collectives"].items():
                sizes = one["bytes_per_device"], planned.get(kind)
                table.add_row(kind, f"{one['count_per_step']:,}", *map(in_gib, sizes))
            console.print(table)
        if "way_out" in row:
            console.print(row["way_out"])
    for check in report.checks:
        console.print(f"{check.name} {check.value:,.6g} {check.bound}: {check.verdict}")
    console.print("Compiled, not run.")


def _shown(name: str, value) -> str:
    if "bytes" in name:
        return f"{in_gib(value)} GiB"
    return f"{value:,}" if isinstance(value, int) else str(value)


def in_gib(num_bytes: int | None) -> str:
    """Bytes in GiB, with two decimals; "" for None."""
    return "" if num_bytes is None else f"{num_bytes / (1 << 30):,.2f}"
