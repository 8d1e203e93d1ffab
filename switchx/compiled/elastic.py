# SPDX-License-Identifier: Apache-2.0
"""A job on the available devices: elastic training goes on with fewer devices, or with more.

Shen et al. 2022 (SE-MoE, arXiv:2205.10034), section 4.1. A run that lost devices is started
again; the planner chooses mesh, dispatcher and microbatches for those that are left, and the
checkpoint is read into them. Global batch, data order and routing groups stay the same, and so
do losses. Recovery is a restart: nothing is repaired inside a live process.
"""

import collections
import dataclasses
from collections.abc import Iterator, Sequence

import jax

from switchx.compiled.workload import planned_storage, workload_of
from switchx.fields import require
from switchx.hardware.spec import Hardware
from switchx.partitioning.mesh import AXES, MeshSpec
from switchx.pipeline.schedule import ScheduleSpec
from switchx.planner.layout import Layout
from switchx.planner.search import Plan, search
from switchx.training.job import TrainingJob


@dataclasses.dataclass(frozen=True)
class ElasticJob:
    """A job, and the devices for it.

    Attributes:
        job: the job with the plan's mesh, dispatcher and microbatches.
        devices: devices of its mesh, equally many from each process.
        num_idle: devices that no mesh could use.
        plan: plan of the planner.
    """

    job: TrainingJob
    devices: tuple[jax.Device, ...]
    num_idle: int
    plan: Plan


def job_for_devices(
    job: TrainingJob, hardware: Hardware, devices: Sequence[jax.Device] | None = None
) -> ElasticJob:
    """The job on the most devices that some mesh can use, on the fastest of their meshes.

    Experts stay where `job.storage` has them. If they are divided among tasks, it is the
    fastest mesh on which a device has the experts of its own rows' tasks, if there is one.

    Args:
        hardware: hardware spec of the devices.
        devices: devices to choose from; None is all devices of all processes.

    Raises:
        ValueError: the job has what is not planned here (buckets) or what no mesh can fix
            (`TrainingJob.storage_refusal`), or fits on no number of the devices.
    """
    bucket_bytes, storage = job.step.bucket_bytes, planned_storage(job)
    reason = job.storage_refusal(storage.tier, {})
    require(reason is None, reason)
    require(
        bucket_bytes is None,
        f"a mesh for the devices there are, with StepConfig.bucket_bytes={bucket_bytes}: "
        "--mesh=auto does not plan buckets; leave them out, or name the mesh "
        "(configs/meshes)",
    )
    require(
        job.lora is None,
        "--mesh=auto does not plan adapters (TrainingJob.lora); name the mesh (configs/meshes)",
    )
    devices = list(jax.devices() if devices is None else devices)
    workload, reasons = workload_of(job), collections.Counter()
    for used in _device_sets(devices):
        if hardware.is_whole(len(used)):
            found = search(workload, hardware, len(used), storage)
            kept = [plan for plan in found.plans if _keeps_groups(job, plan.layout)]
            if kept:
                plan = next((p for p in kept if workload.task_slots(p.layout)), kept[0])
                idle = len(devices) - len(used)
                return ElasticJob(_with_layout(job, plan.layout), tuple(used), idle, plan)
            reasons.update(found.refused)
    most = "; ".join(f"{reason} ({count})" for reason, count in reasons.most_common(3))
    raise ValueError(
        f"no mesh of up to {len(devices)} devices of {hardware.name} runs this job with its "
        f"{job.batch_size} rows: {most or 'routing groups would change'}; use more devices, "
        "ModelConfig.remat='full', or a batch with more factors"
    )


def _device_sets(devices: Sequence[jax.Device]) -> Iterator[list[jax.Device]]:
    """The devices to use, most first: equally many from each process, as all take part."""
    of_process: dict[int, list[jax.Device]] = {}
    for device in devices:
        of_process.setdefault(device.process_index, []).append(device)
    for count in range(min(map(len, of_process.values())), 0, -1):
        yield [device for own in of_process.values() for device in own[:count]]


def _keeps_groups(job: TrainingJob, layout: Layout) -> bool:
    """Whether routing groups (so capacity, balance loss) are those of the job's own steps."""
    numbers = {job.step.num_microbatches, layout.num_microbatches}
    return len(numbers) == 1 or all(map(job.keeps_groups, numbers))


def _with_layout(job: TrainingJob, layout: Layout) -> TrainingJob:
    model = job.model
    if layout.dispatcher is not None:
        switch = model.switch.with_dispatcher(layout.dispatcher)
        model = dataclasses.replace(model, switch=switch)
    sizes = {axis: getattr(layout, axis) for axis in AXES}
    return dataclasses.replace(
        job,
        model=model,
        mesh=MeshSpec(**sizes, rules=layout.rules),
        step=dataclasses.replace(job.step, num_microbatches=layout.num_microbatches),
        pipeline=ScheduleSpec("1f1b"),
    )
