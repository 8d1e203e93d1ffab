# SPDX-License-Identifier: Apache-2.0
"""A job as programs with blocks split over the stages of a pipeline, and its evaluation.

Evaluation gives the same sums and the same routing sample as `training/evaluate.py`, in the
microbatches of training. No stage holds more than its own blocks.
Dims: B batch, b rows of a microbatch, M microbatches, N layers
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from switchx.models.config import ModelConfig
from switchx.models.stages import Chunk, link_stacks, split_blocks
from switchx.moe.stats import RoutingStats, join_stacks
from switchx.partitioning.mesh import PIPE
from switchx.pipeline.schedule import Schedule
from switchx.pipeline.staged_forward import run_forward
from switchx.pipeline.ticks import Lane, Objective, Op
from switchx.training.evaluate import PLAIN_LOSS, sampled, sampled_rows
from switchx.training.expert_copies_program import task_notes
from switchx.training.job import TrainingJob
from switchx.training.microbatches import (
    from_microbatches,
    into_microbatches,
    rows_kept_together,
)
from switchx.training.pipelined import (
    build_schedule,
    microbatch_of,
    no_sums,
    pipelined_gradients,
    stack_lanes,
    sums_of_part,
)
from switchx.training.program import TrainingProgram
from switchx.training.step import train_step


class PipelinedProgram(TrainingProgram):
    """The programs of a job on a mesh with stages.

    Attributes:
        pipeline: the schedule by which the microbatches go through the stages.
    """

    @functools.cached_property
    def pipeline(self) -> Schedule:
        """Raises ValueError if blocks or microbatches do not divide, or the rules do not split
        blocks."""
        return _schedule(self.job, self.mesh)

    def _abstract_state(self):
        _ = self.pipeline  # before what does not divide is refused parameter by parameter
        return super()._abstract_state()

    def _steps(self):
        job = self.job
        compute = functools.partial(pipelined_gradients, job.model, job.loss, self.pipeline)
        train = functools.partial(
            train_step, job.model, job.loss, job.step, self.optimizer, compute=compute
        )
        evaluate = functools.partial(pipelined_eval_step, job.model, self.pipeline)
        return self._jitted(train, evaluate)

    @property
    def notes(self) -> tuple[str, ...]:
        return (*super().notes, *task_notes(self.job, self.mesh))


def _schedule(job: TrainingJob, mesh) -> Schedule:
    num_stages = mesh.shape[PIPE]
    for table in ("params", "expert_params"):
        if job.mesh.rules.axes("N", mesh, table=table) != (PIPE,):
            raise ValueError(
                f"mesh axis {PIPE!r} of size {num_stages}, but Rules.{table} does not "
                f'split the stacked blocks over it; add ("N", ("{PIPE}",)) to it'
            )
    return build_schedule(job.model, job.pipeline, num_stages, job.step.num_microbatches)


def pipelined_eval_step(config: ModelConfig, schedule: Schedule, params, batch: dict):
    """The results of `evaluate.eval_step`, computed by the forward ops of `schedule`.

    Routing groups are those of the whole batch if `into_microbatches` keeps them.
    """
    M = schedule.num_microbatches
    rows = into_microbatches(config, batch, M)
    together = rows_kept_together(config, batch, M)
    # Choices are kept for so many rows of each microbatch: the batch's first ones.
    kept = together * -(-sampled_rows(config, batch) // (M * together)) if config.switch else 0
    blocks, shared = split_blocks(config, params)
    lane = functools.partial(eval_lane, config, M, kept)
    lanes = stack_lanes(config, schedule, blocks, rows, lane)
    link = link_stacks(lanes[-1].message) if len(lanes) > 1 else None
    result = run_forward(schedule, lanes, link, blocks, shared, {"rows": rows, "keys": None})
    whole = [_with_rows(stats, together) for stats in result.measured]
    stats = join_stacks(whole[0] if len(lanes) > 1 else None, whole[-1])
    return sampled(config, result.total, stats, batch)


def _with_rows(stats: RoutingStats | None, together: int) -> RoutingStats | None:
    """The statistics, with choices `[N, b, M, ...]` as `[N, b M, ...]` in the batch's order."""
    if stats is None:
        return None
    whole = jax.vmap(functools.partial(from_microbatches, rows=together))
    return dataclasses.replace(stats, choices=jax.tree.map(whole, stats.choices))


def eval_lane(
    config: ModelConfig, num_microbatches: int, kept: int, name: str, num_periods: int, message
) -> Lane:
    """A stack's chunks in evaluation; their `inputs` are as in `stack_lane`.

    Measurements have the choices of the first `kept` rows of each microbatch, as
    `[N, kept, M, ...]`: those of other microbatches are zeros.
    """
    chunk = Chunk(config, name, num_periods, is_training=False)

    def objective(blocks, shared, inputs, message, op: Op):
        batch, _ = microbatch_of(inputs, op)
        message, stats = chunk(blocks, shared, batch, message, op)
        if stats is not None:

            def place(x):
                x = x[:, :kept]
                zeros = jnp.zeros((*x.shape[:2], num_microbatches, *x.shape[2:]), x.dtype)
                return zeros.at[:, :, op.microbatch].set(x)

            stats = dataclasses.replace(stats, choices=jax.tree.map(place, stats.choices))
        return Objective(message, jnp.zeros(()), stats, no_sums())

    def head(shared, x_BLD, inputs, op: Op, first):
        sums = sums_of_part(chunk, PLAIN_LOSS, shared, x_BLD, inputs, op, first)
        return sums.loss, sums

    has_head = head if name == "decoder" else None
    return Lane(lambda *arguments: objective(*arguments).message, objective, message, has_head)
