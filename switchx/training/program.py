# SPDX-License-Identifier: Apache-2.0
"""The compiled programs of a job: its steps jitted over its mesh, and where arrays live."""

import functools

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from switchx import tree
from switchx.data.features import Batch
from switchx.data.loader import Shard
from switchx.optim.protocol import has_letters
from switchx.partitioning.constrain import use_mesh
from switchx.partitioning.mesh import batch_axes, batch_parts
from switchx.partitioning.pipeline import PIPE
from switchx.partitioning.rules import Rules, param_sharding
from switchx.partitioning.schedule import Schedule, ScheduleSpec
from switchx.training.evaluate import eval_step
from switchx.training.fused_loss import check_fused
from switchx.training.job import TrainingJob
from switchx.training.pipelined import build_schedule
from switchx.training.state import TrainState, init_state
from switchx.training.step import train_step


def state_shardings(rules: Rules, mesh: Mesh, state) -> TrainState:
    """Shardings of a (shape struct of a) training state.

    Parameters follow the rules by their names' dimension letters; so do the optimizer's
    statistics whose names end in letters too. Everything else is whole everywhere.
    """
    whole = NamedSharding(mesh, PartitionSpec())
    shapes = {path: leaf.shape for path, leaf in tree.named_leaves(state.params).items()}

    def sharding(name, leaf):
        kind, _, path = name.partition("/")
        is_split = kind in ("params", "opt_state") and has_letters(path, leaf.shape, shapes)
        return param_sharding(rules, mesh, name, leaf) if is_split else whole

    return tree.map_named(sharding, state)


class TrainingProgram:
    """A job's optimizer, its jitted train and eval steps, and the shardings around them."""

    def __init__(self, job: TrainingJob, devices=None):
        """Traces nothing yet; see `train_step` and `eval_step`.

        Raises:
            ValueError: the mesh does not fit the devices, or does not divide the batch or a
                parameter.
        """
        self.job = job
        self.mesh = job.mesh.build(devices)
        rows = job.batch_size // job.step.num_microbatches
        parts = batch_parts(self.mesh, job.mesh.rules)
        if rows % parts:
            raise ValueError(
                f"batch_size={job.batch_size} in {job.step.num_microbatches} microbatches is "
                f"not divisible by the {parts} devices that the mesh splits rows over; use a "
                f"multiple of {parts * job.step.num_microbatches}, or a smaller mesh"
            )
        self.pipeline = self._pipeline()
        if job.step.bucket_bytes is not None:
            check_fused(
                job.model,
                self.mesh,
                job.mesh.rules,
                bucket_bytes=job.step.bucket_bytes,
                rows=rows,
                lengths=tuple(length for length in job.sequence_lengths if length),
            )
        self.optimizer = job.optimizer.build(job.schedule)
        self.abstract_state = jax.eval_shape(self._init)
        self.shardings = state_shardings(job.mesh.rules, self.mesh, self.abstract_state)
        rows_sharding = PartitionSpec(batch_axes(self.mesh, job.mesh.rules))
        self.batch_sharding = NamedSharding(self.mesh, rows_sharding)
        compiler_options = job.compiler.of(self.mesh.devices.flat[0].platform)
        self.train_step = jax.jit(
            functools.partial(
                train_step,
                job.model,
                job.loss,
                job.step,
                self.optimizer,
                pipeline=self.pipeline,
            ),
            in_shardings=(self.shardings, self.batch_sharding),
            out_shardings=(self.shardings, NamedSharding(self.mesh, PartitionSpec())),
            donate_argnums=0,
            compiler_options=compiler_options,
        )
        self.eval_step = jax.jit(
            functools.partial(eval_step, job.model),
            in_shardings=(self.shardings.params, self.batch_sharding),
            out_shardings=NamedSharding(self.mesh, PartitionSpec()),
            compiler_options=compiler_options,
        )

    @functools.cached_property
    def shard(self) -> Shard:
        """The parts of each batch that this process' devices hold, which it has to read.

        They need not be neighbours (an axis over machines that is inside of `data`), nor
        this process' alone (an axis over machines along which rows are whole).
        """
        parts = batch_parts(self.mesh, self.job.mesh.rules)
        held = self.batch_sharding.addressable_devices_indices_map((parts,)).values()
        return Shard(tuple(sorted({index[0].indices(parts)[0] for index in held})), parts)

    def _pipeline(self) -> Schedule | None:
        """The schedule of the stages, or None where the mesh has one.

        Raises:
            ValueError: blocks or microbatches do not divide, or the rules do not split blocks.
        """
        job, num_stages = self.job, self.mesh.shape[PIPE]
        if num_stages == 1:
            if job.pipeline != ScheduleSpec():
                raise ValueError(
                    f"TrainingJob.pipeline={job.pipeline} on a mesh of one stage: nothing "
                    f"would follow it; use MeshSpec.{PIPE} above 1, or leave the schedule out"
                )
            return None
        for table in ("params", "expert_params"):
            if job.mesh.rules.axes("N", self.mesh, table=table) != (PIPE,):
                raise ValueError(
                    f"mesh axis {PIPE!r} of size {num_stages}, but Rules.{table} does not "
                    f'split the stacked blocks over it; add ("N", ("{PIPE}",)) to it'
                )
        return build_schedule(job.model, job.pipeline, num_stages, job.step.num_microbatches)

    def scope(self):
        """The context in which the steps are to be called: the mesh and its rules."""
        return use_mesh(self.mesh, self.job.mesh.rules)

    def init_state(self, params=None) -> TrainState:
        """A state at step 0, each device drawing its own part; or around given parameters."""
        return jax.jit(self._init, out_shardings=self.shardings)(params)

    def _init(self, params=None) -> TrainState:
        return init_state(self.job.model, self.optimizer, self.job.seed, params)

    def restore_target(self):
        """Shape structs with shardings, for a checkpoint to be read into."""
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=sharding
            ),
            self.abstract_state,
            self.shardings,
        )

    def place(self, batch: Batch) -> dict:
        """The rows of this process' `shard` as part of the global batch on the devices."""

        def as_global(rows):
            shape = (self.job.batch_size, *rows.shape[1:])
            return jax.make_array_from_process_local_data(self.batch_sharding, rows, shape)

        return {name: as_global(rows) for name, rows in batch.items()}
