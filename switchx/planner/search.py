# SPDX-License-Identifier: Apache-2.0
"""Every layout of a step over a number of devices: predicted, pruned, ranked and explained.

The meshes of Fedus et al. 2021 (arXiv:2101.03961), Figure 9, with `fsdp`, SE-MoE's `node`
and Pipeline MoE's `pipe`. `explain` says in words where a plan's time goes, how full its memory
is, and why it is slower than the first.
"""

import collections
import dataclasses
import math
from collections.abc import Iterator

from switchx.hardware.spec import Hardware
from switchx.models.config import FLASH_ATTENTION
from switchx.models.stored_experts import TEACHER_IN_STORAGE
from switchx.partitioning.collectives import RAGGED_PLATFORMS
from switchx.partitioning.mesh import AXES
from switchx.partitioning.placement import Placement
from switchx.partitioning.rules import BATCH
from switchx.planner.layout import Layout, Workload, own_rows_axes
from switchx.planner.memory import MemoryUse, memory_use
from switchx.planner.step_time import StepTime, step_time
from switchx.planner.storage_tiers import Storage, StorageUse, storage_use, with_storage
from switchx.planner.torus import factorizations

MOST_DEVICES = 2**17
GROUPS_DO_NOT_DIVIDE = "routing groups do not divide over the devices that split the batch"
SHARES_BY_ROWS = "devices would share routing groups by a ragged all-to-all, which GPUs do not"
DOES_NOT_FIT = "needs more memory than a device has"
ON_DEVICE = Storage()


@dataclasses.dataclass(frozen=True)
class Plan:
    """One layout, and what a step on it is predicted to cost."""

    layout: Layout
    time: StepTime
    memory: MemoryUse
    tokens_per_s: float
    storage: StorageUse


@dataclasses.dataclass(frozen=True)
class Search:
    """The layouts that were considered.

    Attributes:
        plans: plans of the layouts that run and fit, fastest first.
        refused: number of the other layouts, by reason.
        smallest: the plan with the least device memory among the plans that do not fit, or
            None.
    """

    plans: tuple[Plan, ...]
    refused: dict[str, int]
    smallest: Plan | None

    @property
    def looked_at(self) -> int:
        return len(self.plans) + sum(self.refused.values())


def search(
    workload: Workload, hardware: Hardware, devices: int, storage: Storage = ON_DEVICE
) -> Search:
    """Predicts every layout over `devices` and ranks those that fit by time.

    A layout takes the fastest number of microbatches among those that fit. The optimizer state
    is whole in every replica if that fits, and in slices if it does not (ZeRO-1): equally many
    bytes travel either way.

    Args:
        storage: storage of the experts.
    """
    plans, refused, smallest = [], collections.Counter(), None
    for layout in layouts(workload, hardware, devices, refused):
        best = None
        for microbatches in _microbatches(workload, layout):
            candidate = dataclasses.replace(layout, num_microbatches=microbatches)
            if problem := refusal_of(workload, candidate, hardware):
                break
            try:
                plan = predict(workload, candidate, hardware, storage)
                may_slice = layout.data > 1 and storage.tier == "device"
                if may_slice and does_not_fit(plan, hardware):
                    candidate = dataclasses.replace(candidate, has_optimizer_slices=True)
                    if problem := refusal_of(workload, candidate, hardware):
                        break
                    plan = predict(workload, candidate, hardware, storage)
            except ValueError as error:
                problem = str(error).split(";")[0]
                break
            if problem := does_not_fit(plan, hardware):
                if smallest is None or plan.memory.total < smallest.memory.total:
                    smallest = plan
                continue
            if best is None or plan.time.step_s < best.time.step_s:
                best = plan
            if layout.pipe == 1:
                break  # more microbatches only gather weights more often
        if best is not None:
            plans.append(best)
        else:
            refused[problem or "no number of microbatches divides the rows"] += 1
    plans.sort(key=lambda plan: (plan.time.step_s, plan.memory.total))
    return Search(tuple(plans), dict(refused), smallest)


def predict(
    workload: Workload, layout: Layout, hardware: Hardware, storage: Storage = ON_DEVICE
) -> Plan:
    """Predicts time and memory of one layout.

    Raises:
        ValueError: the layout does not divide a parameter, a formula is missing, or experts
            cannot be where `storage` has them.
    """
    if workload.teacher is not None and storage.tier != "device":
        raise ValueError(f"{TEACHER_IN_STORAGE}; use --storage=device, or DISTILLATION=None")
    use = storage_use(workload, layout, storage, hardware)
    if storage.tier != "device":
        # The backward pass recomputes each period from its input, whatever the model says.
        again = dataclasses.replace(workload.model, remat="full")
        workload = dataclasses.replace(workload, model=again)
    time = step_time(workload, layout, hardware)
    time, memory = with_storage(workload, layout, use, time, memory_use(workload, layout))
    return Plan(layout, time, memory, workload.tokens / time.step_s, use)


def does_not_fit(plan: Plan, hardware: Hardware) -> str | None:
    """Which memory or disk is too small for a plan, in short; or None."""
    if plan.memory.total > hardware.memory.usable_bytes:
        return DOES_NOT_FIT
    short = shortage(plan.storage, plan.layout, hardware)
    return None if short is None else short.reason


@dataclasses.dataclass(frozen=True)
class Shortage:
    """A host's memory or disk too small for the experts of its `sharing` devices, in bytes."""

    reason: str
    sharing: int
    needed: float
    usable: float


def shortage(use: StorageUse, layout: Layout, hardware: Hardware) -> Shortage | None:
    """The host's memory or its disks, if they are too small; otherwise None."""
    if use.tier == "device":
        return None
    host, disk = hardware.host, hardware.disk
    sharing = min(layout.size, host.devices)
    needed, usable = use.bytes.host * sharing, host.num_bytes * host.usable
    if needed > usable:
        return Shortage("needs more memory than a host has", sharing, needed, usable)
    if use.tier == "host":
        return None
    needed, usable = use.bytes.disk * sharing, disk.num_bytes * disk.usable
    if needed > usable:
        return Shortage("needs more room than a host's disks have", sharing, needed, usable)
    return None


def layouts(
    workload: Workload, hardware: Hardware, devices: int, refused: collections.Counter
) -> Iterator[Layout]:
    """Every mesh and dispatcher that divides model and batch, with one microbatch per stage.

    Args:
        refused: counter of reasons, to which those of other meshes are added.
    """
    for sizes in factorizations(devices, len(AXES)):
        mesh = Layout(**dict(zip(AXES, sizes, strict=True)), num_microbatches=sizes[0])
        if problem := _indivisible(workload, hardware, mesh):
            refused[problem] += 1
            continue
        if not (problem := _undivided_experts(workload, hardware, mesh)):
            for name in _dispatchers(workload, hardware, mesh):
                yield dataclasses.replace(mesh, dispatcher=name)
        if spread := _spread(workload, mesh):
            yield spread
        elif problem:
            refused[problem] += 1


def _indivisible(workload: Workload, hardware: Hardware, mesh: Layout) -> str | None:
    """The reason why a mesh cannot run the step, whatever the dispatcher; or None."""
    model, switch = workload.model, workload.model.switch
    if switch is None and mesh.node * mesh.expert > 1:
        return "node x expert does not divide the experts"
    per_node, is_cut = hardware.devices_per_node, False
    if mesh.size > per_node and not hardware.inside.torus_dims:
        is_cut = per_node % mesh.model > 0  # a group of some node's last devices
    if mesh.model > per_node or is_cut:
        return "the model axis would leave its node"
    if model.num_heads % mesh.model or model.d_ff % mesh.model:
        return "model does not divide heads or d_ff"
    if model.d_model % mesh.fsdp:
        return "fsdp does not divide d_model"
    if any(workload.num_layers(each) // model.period % mesh.pipe for each in workload.stacks):
        return "pipe does not divide a stack's blocks"
    if mesh.pipe > 1 and workload.teacher is not None:
        return "a teacher reads the batch beside a step without stages"
    if mesh.pipe > 1 and workload.writes_texts:
        return "a text evaluation decodes without stages"
    if mesh.pipe > 1 and not model.scan_layers:
        return "a pipeline needs ModelConfig.scan_layers=True"
    if workload.batch_size % (math.prod(map(mesh.shape.get, BATCH)) * mesh.num_microbatches):
        return "the batch does not divide over the devices that split it"
    if mesh.num_microbatches > 1 and switch and switch.router.counts_first:
        return "balance_scope='batch' counts first where there are microbatches: not planned"
    return None


def _undivided_experts(workload: Workload, hardware: Hardware, mesh: Layout) -> str | None:
    """The reason why experts are not only on `node` and `expert`; or None."""
    if mesh.node * mesh.expert == 1:
        return None
    if workload.model.switch.num_experts % (mesh.node * mesh.expert):
        return "node x expert does not divide the experts"
    is_node = mesh.expert * mesh.model == hardware.devices_per_node
    if mesh.node > 1 and not (is_node or (hardware.inside.torus_dims and mesh.expert > 1)):
        return "node x expert does not follow the nodes there are"
    return None


def _spread(workload: Workload, mesh: Layout) -> Layout | None:
    """The layout with experts also on `fsdp`, if they and D divide; or None."""
    switch, parts = workload.model.switch, mesh.fsdp * mesh.node
    if switch is None or parts == 1 or mesh.pipe > 1:
        return None
    if switch.num_experts % (parts * mesh.expert) or workload.model.d_model % parts:
        return None
    return dataclasses.replace(mesh, dispatcher="all_to_all", is_spread=True)


def _dispatchers(workload: Workload, hardware: Hardware, mesh: Layout) -> list[str | None]:
    """The dispatchers worth predicting on a mesh."""
    switch = workload.model.switch
    if switch is None:
        return [None]
    if mesh.node * mesh.expert > 1:
        if mesh.node > 1:
            return ["all_to_all", *([] if hardware.inside.torus_dims else ["hierarchical"])]
        is_ragged = hardware.platform in RAGGED_PLATFORMS
        return ["all_to_all", *(["ragged_all_to_all"] if is_ragged else [])]
    sliced = mesh.model > 1 and switch.num_experts % mesh.model == 0
    return ["gather", "dropless", *(["sliced", "sliced_scatter"] if sliced else [])]


def _microbatches(workload: Workload, layout: Layout) -> Iterator[int]:
    """Numbers of microbatches: that of stages, doubled while each device still has rows."""
    switch = workload.model.switch
    number = layout.num_microbatches
    parts = math.prod(map(layout.shape.get, BATCH))
    while workload.batch_size % (number * parts) == 0:
        yield number
        if switch is not None and switch.router.counts_first:
            return
        number *= 2


def refusal_of(workload: Workload, layout: Layout, hardware: Hardware) -> str | None:
    """The reason why the layout's dispatcher or its attention cannot run, or should not, in
    short; or None."""
    attention = workload.model.training_attention
    is_manual = layout.pipe > 1 or own_rows_axes(workload, layout)
    if attention in FLASH_ATTENTION and is_manual:
        return f"training_attention={attention!r} runs neither in stages nor on replicas' rows"
    if layout.dispatcher is None:
        return None
    rows = workload.batch_size // layout.num_microbatches
    is_shared, overflow = False, workload.model.switch.router.overflow
    for stack in workload.stacks:
        if workload.model.num_sparse_layers_of(stack):
            groups, tokens, _ = workload.routing(rows, workload.length(stack))
            if layout.dispatcher == overflow == "dropless":  # `SwitchConfig.dispatches_rows`
                groups = rows
            shared = Placement.on(layout, layout.rules).shared_by(groups)
            if shared is None or (shared and layout.dispatcher != "all_to_all"):
                return GROUPS_DO_NOT_DIVIDE
            is_shared = is_shared or bool(shared)
            if reason := workload.refusal(layout, groups, tokens):
                return reason.split(";")[0].split(",")[0]
    if is_shared and hardware.platform not in RAGGED_PLATFORMS:
        return SHARES_BY_ROWS
    if layout.node > 1 and layout.dispatcher == "all_to_all" and not is_shared:
        same = "fsdp" if layout.is_spread else "expert"
        return f"a flat all-to-all over node x expert is one over {same}"
    return None


WHAT = {
    "layers": "tensor-parallel sums of activations",
    "exchange": "tokens going to experts and back",
    "weights": "gradients and gathered weights",
    "embedding": "the embedding and the logits",
    "pipeline": "activations between stages",
}
ROLES = {
    "pipe": "pipeline stages",
    "data": "replicas",
    "fsdp": "slices of the parameters",
    "node": "outer parts of the experts",
    "expert": "parts of the experts",
    "model": "parts of every layer",
}
CONTENTS = {
    "params": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "working": "one block's buffers",
    "logits": "logits",
    "gathered": "gathered weights",
    "slots": "slots for experts",
    "teacher": "a teacher",
}


def explain(plan: Plan, hardware: Hardware, first: Plan) -> str:
    """Explains a plan in two to four sentences.

    Args:
        first: the fastest plan, with which `plan` is compared unless they are the same.
    """
    layout, time, memory = plan.layout, plan.time, plan.memory
    axes = [f"{size} {ROLES[axis]}" for axis, size in layout.shape.items() if size > 1]
    text = ", ".join(axes) or "One device"
    if layout.dispatcher:
        text += f", Switch layers by {layout.dispatcher}"
    if layout.is_spread:
        text += ", experts spread over slices and outer parts, too"
    if layout.has_optimizer_slices:
        text += ", the optimizer's state in slices over replicas"
    if layout.num_microbatches > 1:
        text += f", {layout.num_microbatches} microbatches"
    text += (
        f". Of a step of {seconds(time.step_s)} products take {_share(time.compute_s, time)}"
    )
    parts = sorted(time.collectives_s.items(), key=lambda item: -item[1])
    if parts and parts[0][1] > 0:
        name, longest = parts[0]
        text += (
            f", communication {_share(time.communication_s, time)}, most of it "
            f"{WHAT[name]} ({_share(longest, time)})"
        )
        if time.between_s:
            text += f"; {_share(time.between_s, time)} leaves a node"
    if time.bubble_s:
        text += f"; stages wait {_share(time.bubble_s, time)}"
    if time.storage_s:
        text += f"; copies of experts that do not hide take {_share(time.storage_s, time)}"
    usable = hardware.memory.usable_bytes
    largest = max(CONTENTS, key=lambda name: getattr(memory, name))
    text += (
        f". A device holds {num_bytes(memory.total)} of {num_bytes(usable)}, most of it "
        f"{CONTENTS[largest]} ({num_bytes(getattr(memory, largest))})."
    )
    return text + _difference(plan, first)


def _difference(plan: Plan, first: Plan) -> str:
    """The sentence that says what makes a plan slower than the first."""
    if plan is first:
        return ""
    mine, best = plan.time, first.time
    deltas = {
        "products": mine.compute_s - best.compute_s,
        "the update": mine.update_s - best.update_s,
        "waiting stages": mine.bubble_s - best.bubble_s,
        "copies of experts": mine.storage_s - best.storage_s,
    }
    for part in mine.collectives_s.keys() | best.collectives_s.keys():
        best_s = best.collectives_s.get(part, 0.0)
        deltas[WHAT[part]] = mine.collectives_s.get(part, 0.0) - best_s
    name, most = max(deltas.items(), key=lambda item: item[1])
    slower = mine.step_s / best.step_s - 1
    if most <= 0:
        return " As fast as the first."
    return f" {slower:.1%} slower than the first, most of it by {name} (+{seconds(most)})."


def _share(spent: float, time: StepTime) -> str:
    return f"{spent / time.step_s:.0%}"


def seconds(number: float) -> str:
    """`1.23 s` or `4.56 ms`."""
    return f"{number:.3g} s" if number >= 1 else f"{1e3 * number:.3g} ms"


def num_bytes(number: float) -> str:
    """`1.23 GB`."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number / 1e3:.3g} kB"
