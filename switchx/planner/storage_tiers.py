# SPDX-License-Identifier: Apache-2.0
"""Experts beyond the device's memory: bytes by tier, traffic, how much of it hides, endurance.

SE-MoE (Shen et al. 2022, arXiv:2205.10034), section 2.1, gives the bytes of each tier for Adam
in mixed precision, `paper_bytes`; `storage_use` counts them array by array for the optimizer
and the dtypes of a job, as training moves them:

    host   parameters, gradients and optimizer state of experts in host memory; a step streams
           each period through `slots` on the device, and updates period by period there
    disk   one record per expert (parameters and optimizer state), of which the host's memory
           caches some; a step fetches those that it touches, and updates them on the host

Copies of the forward and backward pass run beside its products, those of the update do not:

    step = max(products + collectives, layers' copies) + max(update, its copies)

where a sweep's copies are its bytes over the bandwidth, separately in each direction; with a
disk also the copies within the host's memory, made by all of a host's processors. With a cache
of c records and a step that touches t, the hit rate is taken to be c / t, which a policy that
knows the order of the sweeps nearly reaches (docs/storage.md).
Symbols: D dense and S sparse parameters, L Switch layers, N devices, a touched share (the
paper's alpha)
"""

import dataclasses
import math

from switchx.hardware.spec import Hardware
from switchx.inference.offload.copy_times import touched_experts
from switchx.models.config import ModelConfig
from switchx.models.stored_experts import Tier, storage_refusal
from switchx.planner.layout import Layout, StateArray, Workload, local_bytes, local_shape
from switchx.planner.memory import MemoryUse
from switchx.planner.step_time import StepTime

TIERS: tuple[Tier, ...] = ("device", "host", "disk")
DAY_S = 86_400
# Sweeps of a step over the records: forward, backward, update.
SWEEPS = 3


@dataclasses.dataclass(frozen=True)
class Storage:
    """The storage tier of the experts in a step to be planned.

    Attributes:
        tier, slots, host_bytes: `experts`, `slots` and `host_bytes` of a `StorageSpec`.
        touched: share of the experts that a step uses; None is the expected share of uniform
            choices.
        checkpoint_every: steps between checkpoints, for which changed records are written.
    """

    tier: Tier = "device"
    slots: int = 2
    host_bytes: int | None = None
    touched: float | None = None
    checkpoint_every: int = 1000


@dataclasses.dataclass(frozen=True)
class TierBytes:
    """Bytes on one device, and in its share of its host's memory and disks."""

    device: float
    host: float
    disk: float


@dataclasses.dataclass(frozen=True)
class StorageUse:
    """Costs of experts in storage in one step; bytes are those of one device's experts.

    Attributes:
        bytes: bytes of the experts' parameters, gradients and optimizer state and of the
            device's slots, by tier.
        touched: share of the experts that a step uses.
        to_device, from_device: bytes over the link per step.
        disk_read, disk_written: bytes per step.
        layers_s: seconds of copies of the forward and backward pass, which run beside products.
        update_s: seconds of the update's copies; with `disk`, of the update itself, on the
            host.
    """

    tier: Tier
    bytes: TierBytes
    touched: float = 1.0
    to_device: float = 0.0
    from_device: float = 0.0
    disk_read: float = 0.0
    disk_written: float = 0.0
    layers_s: float = 0.0
    update_s: float = 0.0

    def hides(self, time: StepTime) -> bool:
        """Whether the copies of forward and backward take no longer than what hides them."""
        return self.layers_s <= _layers_time(time)

    def day_written(self, step_s: float) -> float:
        """Bytes written per day, for one device's experts."""
        return self.disk_written / step_s * DAY_S


def paper_bytes(
    dense: float, sparse: float, layers: int, devices: int, touched: float
) -> TierBytes:
    """Section 2.1's formulas: `16D/N + 4aS/L`, `16aS` and `12S` bytes.

    The device keeps fp16 parameters and gradients and fp32 master weights, momentum and
    variance of its 1/N of the dense parameters, and fp16 parameters and gradients of one
    layer's touched experts; the host's memory all five of touched experts; the SSD the three
    in fp32 of all.

    Args:
        dense: D, the dense parameters of the model.
        sparse: S, the parameters of the experts that one device is responsible for.
        touched: a, the touched share of the experts, from 0 to 1.
    """
    return TierBytes(
        device=16 * dense / devices + 4 * touched * sparse / layers,
        host=16 * touched * sparse,
        disk=12 * sparse,
    )


def paper_bytes_of(workload: Workload, layout: Layout, storage: Storage) -> TierBytes:
    """`paper_bytes` of a workload on a layout, whatever its optimizer and dtypes are."""
    params = [array for array in workload.state if array.kind == "params"]
    sparse = [math.prod(local_shape(a, layout)[0]) for a in params if _is_of_experts(a)]
    dense = [math.prod(a.shape) for a in params if not _is_of_experts(a)]
    layers = workload.model.num_sparse_layers
    touched = touched_share(workload, storage)
    return paper_bytes(sum(dense), sum(sparse), layers, layout.size, touched)


def storage_use(
    workload: Workload, layout: Layout, storage: Storage, hardware: Hardware
) -> StorageUse:
    """The memory and the transfers of experts in storage, on one device.

    Raises:
        ValueError: see `storage_refusal`; the hardware has no such tier, or `host_bytes` holds
            less than the experts of one layer.
    """
    tier, model = storage.tier, workload.model
    if reason := storage_refusal(model, tier, storage.slots, layout.shape):
        raise ValueError(reason)
    params, optimizer = (expert_bytes(workload, layout, k) for k in ("params", "optimizer"))
    if tier == "device":
        held = TierBytes(2 * params + optimizer, 0, 0)
        return StorageUse(tier, held)
    if hardware.host is None or (tier == "disk" and hardware.disk is None):
        table = "host" if hardware.host is None else tier
        raise ValueError(
            f"the spec of {hardware.name} has no [{table}]: nothing says what is there; add "
            "the table, specs/h200.toml is an example"
        )
    if tier == "host":
        return _in_host_memory(workload, layout, storage, hardware)
    period_params, _ = _run_bytes(workload, layout)
    touched, sharing = touched_share(workload, storage), min(layout.size, hardware.host.devices)
    share = _host_share(layout, sharing)
    stored, optimizer = (
        share * expert_bytes(workload, Layout(), k) for k in ("params", "optimizer")
    )
    records = stored + optimizer
    capacity = _cache_bytes(storage, model, records, sharing)
    used = touched * records
    misses = max(0.0, 1 - capacity / used)
    disk, link = hardware.disk, hardware.host.achieved_bytes_per_s
    read, written = SWEEPS * misses * used, misses * used + records / storage.checkpoint_every
    read_s = read / disk.read_bytes_per_s / disk.efficiency * sharing
    written_s = written / disk.write_bytes_per_s / disk.efficiency * sharing
    to_device, from_device = 2 * touched * params, touched * stored
    # In each of two sweeps, banks are made from records and copied to the device; gradients
    # arrive, and are put in order.
    layers_bytes = 4 * touched * stored + to_device + 3 * from_device
    # Each record is copied into the update's loop and changed there; its gradient is read,
    # written, and read twice (lazy_update.py). Adafactor also reads matrices for its means.
    update_bytes = touched * (4 * records + 4 * stored)
    memory_bytes_per_s = hardware.host.memory_bytes_per_s * hardware.host.efficiency / sharing
    return StorageUse(
        tier=tier,
        # Banks, and the gradients of the period that the backward pass has reached.
        bytes=TierBytes(
            device=storage.slots * period_params + period_params,
            host=capacity + touched * stored,
            disk=records,
        ),
        touched=touched,
        to_device=to_device,
        from_device=from_device,
        disk_read=read,
        disk_written=written,
        layers_s=max(
            max(to_device, from_device) / link,
            layers_bytes / memory_bytes_per_s,
            read_s * (SWEEPS - 1) / SWEEPS,
        ),
        update_s=max(update_bytes / memory_bytes_per_s, read_s / SWEEPS, written_s),
    )


def _in_host_memory(
    workload: Workload, layout: Layout, storage: Storage, hardware: Hardware
) -> StorageUse:
    params, optimizer = (expert_bytes(workload, layout, k) for k in ("params", "optimizer"))
    period_params, period_state = _run_bytes(workload, layout)
    parts = layout.num_microbatches
    # Forward and backward stream the weights; microbatches after the first, also their sums.
    layers_in, layers_out = 2 * parts * params + (parts - 1) * params, parts * params
    update_in, update_out = 2 * params + optimizer, params + optimizer
    link = hardware.host.achieved_bytes_per_s
    return StorageUse(
        tier="host",
        bytes=TierBytes(
            # Banks and their gradients; later a period's weights, gradients, statistics, and
            # the new weights beside the old ones.
            device=max(2 * storage.slots * period_params, period_state + 2 * period_params),
            host=2 * params + optimizer,
            disk=0,
        ),
        to_device=layers_in + update_in,
        from_device=layers_out + update_out,
        layers_s=max(layers_in, layers_out) / link,
        update_s=max(update_in, update_out) / link,
    )


def with_storage(
    workload: Workload, layout: Layout, use: StorageUse, time: StepTime, memory: MemoryUse
) -> tuple[StepTime, MemoryUse]:
    """Time and memory of a step with experts in storage, from those with all on the device."""
    if use.tier == "device":
        return time, memory
    params, optimizer = (expert_bytes(workload, layout, k) for k in ("params", "optimizer"))
    gradients = memory.gradients / memory.params * params
    memory = dataclasses.replace(
        memory,
        params=memory.params - params,
        gradients=memory.gradients - gradients,
        optimizer=memory.optimizer - optimizer,
        slots=use.bytes.device,
    )
    waits = max(0.0, use.layers_s - _layers_time(time))
    if use.tier == "host":
        waits += max(0.0, use.update_s - time.update_s)
    else:
        waits += use.update_s
    return dataclasses.replace(time, storage_s=waits), memory


def touched_share(workload: Workload, storage: Storage) -> float:
    """The share of the experts that a step uses, on average over the Switch layers."""
    if storage.touched is not None:
        return storage.touched
    model, E = workload.model, workload.model.switch.num_experts
    shares = 0.0
    for stack in workload.stacks:
        tokens = workload.batch_size * workload.length(stack)
        number = touched_experts(E, tokens * model.switch.router.num_selected)
        shares += model.num_sparse_layers_of(stack) * number / E
    return shares / model.num_sparse_layers


def expert_bytes(workload: Workload, layout: Layout, kind: str) -> float:
    """Bytes of the experts' parameters (`params`) or of the optimizer's state for them, on one
    device."""
    return sum(
        local_bytes(array, layout)
        for array in workload.state
        if array.kind == kind and _is_of_experts(array)
    )


def _is_of_experts(array: StateArray) -> bool:
    return array.table == "expert_params"


def _run_bytes(workload: Workload, layout: Layout) -> tuple[float, float]:
    """Bytes of the experts in one period of the larger stack: parameters, and the
    optimizer's state."""
    largest = (0.0, 0.0)
    for stack in workload.stacks:
        found = {"params": 0.0, "optimizer": 0.0}
        for array in workload.state:
            if _is_of_experts(array) and f"{stack}/" in array.name:
                found[array.kind] += local_bytes(array, layout) / array.shape[0]
        largest = max(largest, (found["params"], found["optimizer"]))
    return largest


def _host_share(layout: Layout, sharing: int) -> float:
    """The part of all experts that a host stores, per device of the host.

    A process, one per host, stores whole experts, those of which its devices have slices; each
    once, however many devices have the same ones.

    Args:
        sharing: number of devices of a host.
    """
    axes = layout.rules.axes("E", layout, table="expert_params")
    here = [axis for axis in axes if axis != "node" or layout.size == sharing]
    parts = sum(device < sharing for device in layout.group(tuple(here)))
    return parts / layout.parts(axes) / sharing


def _cache_bytes(storage: Storage, model: ModelConfig, records: float, sharing: int) -> float:
    """Bytes of records that the host caches, per device of the host."""
    if storage.host_bytes is None:
        return records
    least = records * sharing / model.num_sparse_layers
    if storage.host_bytes < least:
        raise ValueError(
            f"StorageSpec.host_bytes={storage.host_bytes:,}, but the experts of one layer may "
            f"be needed at once; use StorageSpec.host_bytes={math.ceil(least)} or more"
        )
    return min(storage.host_bytes / sharing, records)


def _layers_time(time: StepTime) -> float:
    """Seconds of a step before its update."""
    return time.compute_s + time.communication_s + time.bubble_s
