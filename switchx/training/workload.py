# SPDX-License-Identifier: Apache-2.0
"""A training job as the planner sees it: shapes, never arrays."""

import dataclasses
import functools

import jax

from switchx import tree
from switchx.axes import dims_of
from switchx.models.config import require_our_blocks
from switchx.moe.capacity import layer_groups, layer_shape
from switchx.moe.dispatchers import refusal
from switchx.optim.protocol import has_letters
from switchx.planner.layout import Layout, StateArray, Workload
from switchx.training.job import TrainingJob
from switchx.training.state import init_state


def workload_of(job: TrainingJob) -> Workload:
    """What one step of `job` has to do, its mesh and dispatcher apart."""
    require_our_blocks(job.model, "the planner")
    encoder_length, decoder_length = job.sequence_lengths
    switch = job.model.switch

    def refused(layout: Layout, num_groups: int, tokens_per_group: int) -> str | None:
        return refusal(
            layout.dispatcher,
            layout,
            layout.rules,
            num_groups=num_groups,
            tokens_per_group=tokens_per_group,
        )

    return Workload(
        model=job.model,
        encoder_length=encoder_length,
        decoder_length=decoder_length,
        batch_size=job.batch_size,
        state=state_arrays(job),
        routing=functools.partial(layer_shape, switch),
        refusal=refused,
    )


def fitting_group_size(job: TrainingJob, parts: int) -> int | None:
    """The largest `SwitchConfig.group_size` whose groups divide over `parts` devices.

    None where there is none, or where the model has no groups of a size.
    """
    switch = job.model.switch
    if switch is None or switch.expert_capacity is not None:
        return None
    lengths = [
        length
        for stack, length in zip(("encoder", "decoder"), job.sequence_lengths, strict=True)
        if job.model.num_sparse_layers_of(stack)
    ]
    for size in range(switch.group_size, 0, -1):
        smaller = dataclasses.replace(switch, group_size=size)
        groups = (layer_groups(smaller, job.batch_size, length)[0] for length in lengths)
        if all(number % parts == 0 for number in groups):
            return size
    return None


def state_arrays(job: TrainingJob) -> tuple[StateArray, ...]:
    """Every array of the parameters and the optimizer's state; scalars are not worth it."""
    optimizer = job.optimizer.build(job.schedule)
    state = jax.eval_shape(lambda: init_state(job.model, optimizer, job.seed, None))
    shapes = {path: leaf.shape for path, leaf in tree.named_leaves(state.params).items()}
    found = []

    def add(name, leaf):
        kind, _, rest = name.partition("/")
        if kind in ("params", "opt_state") and leaf.shape:
            is_split = has_letters(rest, leaf.shape, shapes)
            dims = dims_of(rest.rpartition("/")[2], len(leaf.shape)) if is_split else ""
            kind = "params" if kind == "params" else "optimizer"
            found.append(StateArray(rest, dims, leaf.shape, leaf.dtype.itemsize, kind))

    tree.map_named(add, state)
    return tuple(found)
