# SPDX-License-Identifier: Apache-2.0
"""A job's step for the planner: shapes and bytes, without the mesh and dispatcher.

The model is not run. `program.py` runs the same step.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax

from switchx import tree
from switchx.fields import require
from switchx.models.config import require_our_blocks
from switchx.models.params import abstract_params
from switchx.moe.capacity import layer_groups, layer_shape
from switchx.moe.copy_placement import slots_refusal
from switchx.moe.dispatchers import refusal
from switchx.optim.protocol import param_of
from switchx.partitioning.mesh import PIPE
from switchx.partitioning.placement import Placement
from switchx.partitioning.rules import OPTIMIZER_SLICES
from switchx.planner.layout import Layout, StateArray, Workload
from switchx.planner.serving import weights_of
from switchx.planner.step_time import executed_flops
from switchx.planner.storage_tiers import Storage
from switchx.training.distillation.student import teacher_config
from switchx.training.distillation.written_teacher import has_logits
from switchx.training.expert_copies_program import copies_refusal, task_tables
from switchx.training.job import TrainingJob
from switchx.training.program import state_letters
from switchx.training.step import init_state


def workload_of(job: TrainingJob) -> Workload:
    """The workload of one step of `job`, apart from its mesh and dispatcher.

    Raises:
        ValueError: the model or its teacher is not made of our blocks, the teacher does not
            exist, or the job trains adapters.
    """
    require_all_trained(job)
    require_our_blocks(job.model, "the planner")
    encoder_length, decoder_length = job.sequence_lengths

    def refused(layout: Layout, num_groups: int, tokens_per_group: int) -> str | None:
        sizes = dict(num_groups=num_groups, tokens_per_group=tokens_per_group)
        switch, place = job.model.switch, Placement.on(layout, layout.rules)
        if switch.num_replicas and layout.pipe > 1:
            return copies_refusal(switch, f"mesh axis {PIPE!r} of size {layout.pipe}")
        return refusal(layout.dispatcher, layout, layout.rules, **sizes) or slots_refusal(
            switch.num_experts, switch.num_replicas, place.size(place.experts)
        )

    def task_slots(layout: Layout) -> int | None:
        if job.model.switch is None or job.model.switch.router.kind != "task":
            return None
        tables = task_tables(job, layout, layout.rules, layout.num_microbatches)
        return tables[0].shape[1] if tables else None

    return Workload(
        model=job.model,
        encoder_length=encoder_length,
        decoder_length=decoder_length,
        batch_size=job.batch_size,
        state=state_arrays(job),
        routing=functools.partial(layer_shape, job.model.switch),
        refusal=refused,
        task_slots=task_slots,
        teacher=_teacher_of(job),
        has_whole_logits=job.distillation is not None,
        writes_texts=job.text_evaluation is not None,
    )


def require_all_trained(job: TrainingJob) -> None:
    """Raises ValueError if a job trains only adapters."""
    require(
        job.lora is None,
        "TrainingJob.lora: plan and compile know steps that train all parameters, which need "
        "more memory than adapters do; use LORA=None, or train",
    )


def planned_flops(job: TrainingJob, num_devices: int) -> float:
    """FLOPs of one device in a step of `job`, as the planner counts them."""
    return executed_flops(workload_of(job), layout_of(job, job.mesh.sizes(num_devices)))


def planned_storage(job: TrainingJob) -> Storage:
    """The storage of a job's experts, as the planner reads it."""
    spec = job.storage
    every = job.checkpoint_every
    return Storage(spec.experts, spec.slots, spec.host_bytes, checkpoint_every=every)


def layout_of(job: TrainingJob, sizes: Mapping[str, int]) -> Layout:
    """The job's mesh, dispatcher, microbatches and schedule as the planner has them.

    Args:
        sizes: devices along each axis of the mesh, once built.
    """
    rules, switch = job.mesh.rules, job.model.switch
    return Layout(
        **sizes,
        dispatcher=None if switch is None else switch.dispatcher,
        num_microbatches=job.step.num_microbatches,
        is_spread="fsdp" in dict(rules.expert_params).get("E", ()),
        has_optimizer_slices=rules.optimizer_slices == OPTIMIZER_SLICES,
        schedule=job.pipeline,
    )


def has_rules_of(job: TrainingJob, layout: Layout) -> bool:
    """Whether the layout's rules place activations and state as the job's own do."""
    own, mesh = job.mesh.rules, layout.stage
    if own.optimizer_slices not in ((), OPTIMIZER_SLICES):
        return False
    if own.activations != layout.rules.activations:
        return False
    return all(
        own.spec(*array, mesh, table=table) == layout.rules.spec(*array, mesh, table=table)
        for array, table in {((a.dims, a.shape), a.table) for a in state_arrays(job) if a.dims}
    )


def _teacher_of(job: TrainingJob) -> Workload | None:
    """A teacher as it reads the job's batches; also None if its logits are on a disk."""
    if job.distillation is None or has_logits(job.distillation.teacher):
        return None
    model = teacher_config(job)
    require_our_blocks(model, "the planner")
    if model.switch is not None:
        # Evaluated: the slots are those of its own capacity.
        factor = model.switch.eval_capacity_factor
        switch = dataclasses.replace(model.switch, capacity_factor=factor)
        model = dataclasses.replace(model, switch=switch)
    model = dataclasses.replace(model, remat="full")  # a forward pass keeps nothing
    encoder_length, decoder_length = job.sequence_lengths
    return Workload(
        model=model,
        encoder_length=encoder_length,
        decoder_length=decoder_length,
        batch_size=job.batch_size,
        state=weights_of(abstract_params(model)),
        routing=functools.partial(layer_shape, model.switch),
        refusal=lambda *_: None,
    )


def fitting_group_size(job: TrainingJob, parts: int) -> int | None:
    """The largest `SwitchConfig.group_size` whose groups divide over `parts` devices.

    None if there is none, or if the model has no groups of a fixed size.
    """
    switch = job.model.switch
    if switch is None or switch.expert_capacity is not None:
        return None
    for size in range(switch.group_size, 0, -1):
        smaller = dataclasses.replace(switch, group_size=size)
        groups = (
            layer_groups(smaller, job.batch_size, length)[0] for length in job.sparse_lengths
        )
        if all(number % parts == 0 for number in groups):
            return size
    return None


def state_arrays(job: TrainingJob) -> tuple[StateArray, ...]:
    """Every array of the parameters and the optimizer's state; scalars are left out."""
    of_state = job.model, job.transformation, job.seed, None, job.step.has_average
    state = jax.eval_shape(lambda: init_state(*of_state))
    letters = state_letters(state)
    params = tree.named_leaves(state.params)
    found = []
    for name, leaf in tree.named_leaves(state).items():
        kind, _, path = name.partition("/")
        if kind in ("params", "opt_state", "average") and leaf.shape:
            kind = "params" if kind == "params" else "optimizer"
            dims, param = letters.get(name, ""), None
            if kind == "optimizer" and (owner := param_of(path, params)) is not None:
                param = letters[f"params/{owner}"], params[owner].shape
            found.append(StateArray(path, dims, leaf.shape, leaf.dtype.itemsize, kind, param))
    return tuple(found)
