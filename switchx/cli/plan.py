# SPDX-License-Identifier: Apache-2.0
"""`switchx plan`: the mesh and the dispatcher to run a job on, before devices are rented."""

import argparse
import dataclasses
import functools
import pathlib
from typing import Any

from switchx.cli import arguments as shared

COLUMNS = ("", "mesh", "step", "tokens/s", "products", "collectives", "bubble", "memory")
LAYOUT_FIELDS = ("dispatcher", "is_spread", "has_optimizer_slices")
MEMORY_PARTS = "state gradients activations working logits gathered slots teacher".split()

DESCRIPTION = """\
Predicts a training step on every mesh and dispatcher that divides the model and the batch:
its time, its memory on the fullest device, the bytes of its collectives and its bubble. Plans
that do not fit are counted by reason; the rest are ranked, and the first three explained.

  switchx plan --gin_file=configs/runs/pretrain_switch_base.gin --hardware=h200x8x16
  switchx plan --gin_file=configs/runs/pretrain_tiny.gin --hardware=v5e --devices=8 \\
      --output=mesh.gin
  switchx train --gin_file=configs/runs/pretrain_tiny.gin --gin_file=mesh.gin --model_dir=DIR

With --storage, experts may be elsewhere than on the device (docs/storage.md): `host` and `disk`
are planned as training keeps them there, `auto` takes the first of device, host and disk that
fits. A table has the bytes of each tier, what a step moves, whether that hides behind products,
and for a disk the bytes written per day against its endurance.

  switchx plan --gin_file=configs/runs/pretrain_switch_base.gin --hardware=v5e --devices=16 \\
      --storage=auto

Hardware is one of the shipped specs (v4, v5e, v5p, v6e, tpu7x, h100, h200, b200, and the
papers' v100 and a100), for GPUs with the number of nodes (h200x8x16 is 16 nodes of 8), or a
file of your own (docs/planner.md). The model is not run, and no device is needed.
"""


FLAGS = {
    "--hardware=NAME|FILE": "v5p, h200x8x16 (16 nodes of 8), or a spec file FILE.toml",
    "--devices=N": "number of devices; default: all that a name such as h200x8x16 has",
    "--top=N": "number of plans to list",
    "--storage=device|host|disk|auto": "where experts are; auto: the first of these that fits; "
    "default: as in the gin files",
    "--touched=X": "share of the experts that a step uses, as in metrics.jsonl of a run with "
    "experts on a disk; default: that of uniform routing",
    "--load_of=DIR": "run folder whose last logged routing says how uneven experts' loads are; "
    "default: loads are taken to be even",
    "--record=FILE": "record of the model's routing (docs/records.md): also predict the "
    "choices that each plan's groups drop",
}


def add_command(commands) -> None:
    parser = shared.add_command(
        commands, "plan", run, "predict the fastest mesh for a cluster", DESCRIPTION
    )
    shared.add_gin_arguments(parser)
    shared.add_flags(parser, FLAGS, required="hardware", top=10)
    shared.add_output(parser, "write the first plan's mesh as a gin file")
    shared.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from switchx.compiled.workload import fitting_group_size, workload_of
    from switchx.files import write_atomically
    from switchx.gin_config import building
    from switchx.gin_config.writing import mesh_gin
    from switchx.hardware.spec import load_hardware
    from switchx.planner.search import GROUPS_DO_NOT_DIVIDE, explain
    from switchx.planner.storage_tiers import TIERS
    from switchx.planner.suggestions import no_plan_message
    from switchx.results import Check, Report

    hardware = load_hardware(arguments.hardware)
    devices = _devices(hardware, arguments.devices)
    job = building.parse_job(*shared.gin_of(arguments))
    workload = _with_load(workload_of(job), arguments.load_of)
    drops_of = _drops_of(arguments.record, workload)
    storage, found = _search(arguments, job, workload, hardware, devices)
    others = {}
    if GROUPS_DO_NOT_DIVIDE in found.refused:
        size, switch = fitting_group_size(job, devices), job.model.switch
        # With fewer tokens than experts, most slots of a group would be empty.
        if size and switch.num_experts <= size < switch.group_size:
            smaller = dataclasses.replace(switch, group_size=size)
            model = dataclasses.replace(job.model, switch=smaller)
            other = workload_of(dataclasses.replace(job, model=model))
            others[f"SwitchConfig.group_size={size}"] = other
    fits = Check("fits", len(found.plans[:1]), "==1")
    if not found.plans:
        tiers = [tier for tier in TIERS if job.storage_refusal(tier, {}) is None]
        message = no_plan_message(workload, hardware, devices, found, storage, others, tiers)
        if not arguments.json:
            raise ValueError(message)
        Report("plan", [{"way_out": message}], [fits]).print(as_json=True)
        return 1
    if arguments.output:
        command = f"switchx plan --hardware={arguments.hardware} --devices={devices}"
        best = found.plans[0]
        text = mesh_gin(best, explain(best, hardware, best), command)
        write_atomically(pathlib.Path(arguments.output).expanduser(), text.encode())
    if arguments.json:
        plans = enumerate(found.plans[: arguments.top], 1)
        rows = [
            row(i, plan, workload, hardware) | drops_of(plan.layout)[0] for i, plan in plans
        ]
        if arguments.storage:
            rows += tier_rows(job, found.plans[0].layout, workload, hardware, storage)
        Report("plan", rows, [fits]).print(as_json=True)
    else:
        print_search(found, hardware, devices, arguments.top)
        if workload.model.switch is not None:
            print(f"\nLoad of the experts: {arguments.load_of or 'even'}")
        print(*drops_of(found.plans[0].layout)[1:], sep="\n", end="")
        if workload.teacher is not None:
            _print_teacher(workload.teacher, found.plans[0])
        if arguments.storage:
            tiers = tier_rows(job, found.plans[0].layout, workload, hardware, storage)
            print_tiers(tiers, storage)
        for hint in others:
            print(f"With {hint} routing groups divide over all {devices} devices.")
        if arguments.output:
            print(arguments.output)
    return 0


def _with_load(workload, folder: str | None):
    """The workload with the experts' load that a run had."""
    from switchx.analysis.routing import read_history
    from switchx.checkpoint.run_folder import RunFolder
    from switchx.moe.copy_placement import measured_imbalance

    if folder is None:
        return workload
    switch = workload.model.switch
    history = read_history(RunFolder(folder).metrics)
    if switch is None or switch.num_experts != history.num_experts:
        model = "a dense model" if switch is None else f"a model of {switch.num_experts}"
        raise ValueError(
            f"--load_of={folder}, a run of {history.num_experts} experts a layer, and {model}; "
            "give a run of the same number, or leave it out"
        )
    imbalance = measured_imbalance(history.load[-1], switch.num_replicas)
    return dataclasses.replace(workload, imbalance=imbalance)


def _drops_of(record: str | None, workload):
    """A function of a layout that returns its drops by a record: for JSON, and in words.

    Raises:
        ValueError: the record is of other Switch layers, or cannot be read.
    """
    from switchx.analysis.drops import of_switch, sentence
    from switchx.routing_record import open_record

    if record is None:
        return lambda layout: ({},)
    model = workload.model
    if model.switch is None:
        raise ValueError(
            f"--record={record} with a dense model, which drops nothing; leave it out"
        )
    if model.switch.router.overflow == "dropless" or model.switch.expert_capacity is not None:
        has = "RouterConfig.overflow='dropless', which drops nothing"
        if model.switch.router.overflow != "dropless":
            has = f"SwitchConfig.expert_capacity={model.switch.expert_capacity}, which no "
            has += "capacity factor decides"
        raise ValueError(f"--record={record} with {has}; leave it out")
    opened = open_record(record)

    @functools.cache
    def of_size(group_size: int):
        return of_switch(opened, model.sparse_layer_names, model.switch, group_size)

    def of_layout(layout):
        rows = workload.batch_size // layout.num_microbatches
        stacks = [each for each in workload.stacks if model.num_sparse_layers_of(each)]
        sizes = [workload.routing(rows, workload.length(stack))[1] for stack in stacks]
        drops, factor = of_size(max(sizes)), model.switch.capacity_factor
        return {"dropped_share": drops.share(factor)}, sentence(drops, factor, ()), ""

    return of_layout


def _search(arguments, job, workload, hardware, devices: int):
    """The `Storage` that is planned, and what was found; for `auto`, the first with a plan."""
    from switchx.compiled.workload import planned_storage
    from switchx.planner.search import search
    from switchx.planner.storage_tiers import TIERS

    tier = arguments.storage or job.storage.experts
    if arguments.touched is not None and arguments.storage is None and tier != "disk":
        raise ValueError(
            f"--touched={arguments.touched} with StorageSpec.experts={tier!r}, where a step "
            "moves all experts or none; leave it out, or give --storage=disk or auto"
        )
    storage = dataclasses.replace(planned_storage(job), touched=arguments.touched)
    # What no mesh can change is reported before every mesh is refused for it.
    if tier != "auto" and (reason := job.storage_refusal(tier, {})):
        raise ValueError(reason)
    for each in TIERS if tier == "auto" else [tier]:
        if job.storage_refusal(each, {}):
            continue
        storage = dataclasses.replace(storage, tier=each)
        found = search(workload, hardware, devices, storage)
        if found.plans:
            break
    return storage, found


def _devices(hardware, asked: int | None) -> int:
    from switchx.planner.search import MOST_DEVICES

    most = hardware.max_devices
    if asked is not None and asked > MOST_DEVICES:
        raise ValueError(f"--devices={asked}; give at most {MOST_DEVICES}")
    if asked is None:
        if most is None or hardware.inside.torus_dims:
            raise ValueError(
                f"--hardware={hardware.name} does not say how many devices there are; give "
                "--devices=N"
            )
        return most
    if most is not None and asked > most:
        raise ValueError(
            f"--devices={asked}, but --hardware={hardware.name} has {most}; give at most "
            f"{most}, or more nodes"
        )
    if not hardware.is_whole(asked):
        size = hardware.devices_per_node
        below = asked - asked % size
        raise ValueError(
            f"--devices={asked} of {hardware.name} are no whole nodes of {size}; use "
            f"--devices={below} or --devices={below + size}"
        )
    return asked


def row(rank: int, plan, workload, hardware) -> dict[str, Any]:
    """A plan as one JSON object; units are in the names."""
    from switchx.planner.step_comm import step_collectives

    time, memory = plan.time, plan.memory
    kinds: dict[str, float] = {}
    for each in step_collectives(workload, plan.layout, hardware.compute):
        kinds[each.kind] = kinds.get(each.kind, 0.0) + each.total_bytes
    return {
        "rank": rank,
        **plan.layout.shape,
        **{name: getattr(plan.layout, name) for name in LAYOUT_FIELDS},
        "imbalance": workload.uneven(plan.layout),
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
        "experts": plan.storage.tier,
        "storage_s": time.storage_s,
    }


def tier_rows(job, layout, workload, hardware, storage) -> list[dict[str, Any]]:
    """Experts in each tier on one layout: a row per tier, and one by the paper's formulas.

    Bytes are those of one device, and of its share of its host.
    """
    from switchx.planner.search import does_not_fit, predict
    from switchx.planner.storage_tiers import TIERS, paper_bytes_of

    rows: list[dict[str, Any]] = []
    for tier in TIERS:
        try:
            if reason := job.storage_refusal(tier, {}):
                raise ValueError(reason)
            plan = predict(workload, layout, hardware, dataclasses.replace(storage, tier=tier))
        except ValueError as error:
            rows.append({"experts_in": tier, "fits": False, "reason": str(error)})
            continue
        use = plan.storage
        reason = does_not_fit(plan, hardware)
        found = {
            "experts_in": tier,
            "device_bytes": plan.memory.total,
            "host_bytes": use.bytes.host,
            "disk_bytes": use.bytes.disk,
            "to_device_bytes": use.to_device,
            "from_device_bytes": use.from_device,
            "copies_hide": use.hides(plan.time),
            "step_s": plan.time.step_s,
            "fits": reason is None,
            "reason": reason,
        }
        if tier == "disk":
            found |= _disk_row(plan, hardware)
        rows.append(found)
    if workload.model.switch is not None:
        paper = paper_bytes_of(workload, layout, storage)
        each = {f"{tier}_bytes": getattr(paper, tier) for tier in TIERS}
        rows.append({"experts_in": "paper 2.1"} | each)
    return rows


def _disk_row(plan, hardware) -> dict[str, Any]:
    """The columns on a disk's reads and writes, and on how long it lasts."""
    use, step_s = plan.storage, plan.time.step_s
    sharing = min(plan.layout.size, hardware.host.devices)
    day_written = use.day_written(step_s) * sharing
    allowed = hardware.disk.day_written_bytes
    return {
        "touched": use.touched,
        "disk_read_bytes": use.disk_read,
        "disk_written_bytes": use.disk_written,
        "day_written_bytes": day_written,
        "day_written_vs_endurance": day_written / allowed if allowed else None,
    }


def print_search(found, hardware, devices: int, top: int) -> None:
    """Prints the ranked plans, the first three in words, and what was refused."""
    from rich.console import Console
    from rich.table import Column, Table

    from switchx.planner.search import explain, num_bytes, seconds

    console = Console(markup=False, highlight=False, soft_wrap=True)
    plans = found.plans
    console.print(
        f"{devices} devices of {hardware.name} ({hardware.description}): "
        f"{found.looked_at:,} layouts, {len(plans):,} fit"
    )
    columns = [Column(name, justify="right", no_wrap=True) for name in COLUMNS]
    columns[COLUMNS.index("mesh")] = Column("mesh", overflow="fold")
    table = Table(*columns, box=None, pad_edge=False)
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


def _print_teacher(teacher, plan) -> None:
    """Prints the memory that the teacher takes on the first plan's devices."""
    from switchx.models.flops import count_parameters
    from switchx.planner.search import num_bytes

    number = count_parameters(teacher.model).total
    print(
        f"\nA teacher of {number:,} parameters reads every batch beside the model: "
        f"{num_bytes(plan.memory.teacher)} of the first plan's memory, its logits among them."
    )


def print_tiers(rows: list[dict[str, Any]], storage) -> None:
    """Prints the tiers of the first plan's layout, and in words what has no room in a table."""
    from rich.console import Console
    from rich.table import Column, Table

    from switchx.planner.search import num_bytes, seconds

    console = Console(markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"\nExperts of the first plan by tier ({storage.tier} is planned), bytes of a device "
        "and its share of the host:"
    )
    columns = {
        "device": "device_bytes",
        "host": "host_bytes",
        "disk": "disk_bytes",
        "to device": "to_device_bytes",
        "back": "from_device_bytes",
    }
    names = "experts in", *columns, "hides", "step", "fits"
    table = Table(
        *(Column(name, justify="right", no_wrap=True) for name in names),
        box=None,
        pad_edge=False,
    )
    yes_or_no = {True: "yes", False: "no", None: ""}
    for each in rows:
        cells = [num_bytes(each[key]) if each.get(key) else "" for key in columns.values()]
        hides = each["copies_hide"] if each.get("to_device_bytes") else None
        step = seconds(each["step_s"]) if "step_s" in each else ""
        verdicts = yes_or_no[hides], step, yes_or_no[each.get("fits")]
        table.add_row(each["experts_in"], *cells, *verdicts)
    console.print(table)
    for each in rows:
        if each.get("reason"):
            console.print(f"{each['experts_in']}: {each['reason']}")
    for each in rows:
        if "day_written_bytes" in each:
            share = each["day_written_vs_endurance"]
            console.print(
                f"On a disk a step uses {each['touched']:.0%} of the experts, reads "
                f"{num_bytes(each['disk_read_bytes'])} and writes "
                f"{num_bytes(each['disk_written_bytes'])}; a host's disks are written "
                f"{num_bytes(each['day_written_bytes'])} a day, "
                + (
                    "which has no limit."
                    if share is None
                    else f"{share:.0%} of what they last."
                )
            )
