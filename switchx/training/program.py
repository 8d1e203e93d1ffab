# SPDX-License-Identifier: Apache-2.0
"""A job as programs: its steps jitted over its mesh, and where its arrays live.

`workload.py` describes the same step to the planner, by shapes alone.
Dims: N sparse layers, E experts, R slots for experts, G groups, T tokens of a group
"""

import functools
import math
import os

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from switchx import tree
from switchx.axes import dims_of
from switchx.data.features import Batch
from switchx.data.loader import Shard
from switchx.data.mixtures import as_mixture
from switchx.fields import require
from switchx.moe.capacity import drops_of_dropless, layer_groups
from switchx.moe.config import SwitchConfig
from switchx.optim.protocol import has_letters, param_of
from switchx.partitioning.constrain import use_mesh
from switchx.partitioning.host_stack import HOST
from switchx.partitioning.mesh import batch_axes, batch_parts, device_kind_of, platform_of
from switchx.partitioning.optimizer_slices import optimizer_slices, whole_notes, with_slice
from switchx.partitioning.placement import Placement
from switchx.partitioning.replicas import replica_axes
from switchx.partitioning.rules import Rules, param_spec
from switchx.partitioning.schedule import Schedule, ScheduleSpec
from switchx.partitioning.ticks import PIPE
from switchx.planner.replica_placement import place_replicas, place_tasks
from switchx.training.evaluate import eval_step
from switchx.training.expert_records import ExpertRecords
from switchx.training.fused_loss import check_fused
from switchx.training.job import TrainingJob
from switchx.training.losses import has_whole_groups
from switchx.training.pipelined import build_schedule
from switchx.training.pipelined_eval import pipelined_eval_step
from switchx.training.step import TrainState, init_state, train_step


class TrainingProgram:
    """A job's optimizer, its jitted train and eval steps, and the shardings around them.

    Attributes:
        abstract_state: the training state as shape structs with `shardings`, for a checkpoint
            to be read into.
        experts: those that are not in the state but in storage; None, all are in the state.
        slot_tables: what `train_step` takes after the batch: nothing, or which expert is in
            which slot of every layer, where experts have replicas or are of tasks.
        notes: what a user should be told once a run.
    """

    experts: ExpertRecords | None = None

    def __init__(self, job: TrainingJob, devices=None):
        """Traces nothing yet; see `train_step` and `eval_step`.

        Args:
            devices: None is all there are; or an `AbstractMesh` of the job's axes, whose steps
                can be traced and lowered alone.

        Raises:
            ValueError: the mesh does not fit the devices, the batch or a parameter.
        """
        self.job = job
        self.mesh = devices if isinstance(devices, AbstractMesh) else job.mesh.build(devices)
        rows = job.batch_size // job.step.num_microbatches
        parts = batch_parts(self.mesh, job.mesh.rules)
        if rows % parts:
            raise ValueError(
                f"batch_size={job.batch_size} in {job.step.num_microbatches} microbatches is "
                f"not divisible by the {parts} devices that the mesh splits rows over; use a "
                f"multiple of {parts * job.step.num_microbatches}, fewer microbatches "
                "(NUM_MICROBATCHES), or a smaller mesh"
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
        self.optimizer = job.transformation
        self.abstract_state = self._abstract_state()
        self.shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)
        rows_sharding = PartitionSpec(batch_axes(self.mesh, job.mesh.rules))
        self.batch_sharding = NamedSharding(self.mesh, rows_sharding)
        rules, kind = job.mesh.rules, device_kind_of(self.mesh)
        self.compiler_options = job.compiler.of(
            platform_of(self.mesh),
            kind,
            gathers_weights=rules.has_slices_of_weights(self.mesh),
        )
        self.slot_tables = self._initial_slot_tables()
        self.train_step, self.eval_step = self._steps()

    def _steps(self):
        """The steps of training and evaluation, jitted."""
        job = self.job
        train = functools.partial(
            train_step, job.model, job.loss, job.step, self.optimizer, pipeline=self.pipeline
        )
        evaluate = functools.partial(eval_step, job.model)
        if self.pipeline is not None:
            evaluate = functools.partial(pipelined_eval_step, job.model, self.pipeline)
        return self._jitted(train, evaluate)

    def _jitted(self, train, evaluate, *more):
        """Steps (state, batch, more) -> (state, metrics), (params, batch) -> sums, compiled."""
        whole = NamedSharding(self.mesh, PartitionSpec())
        tables = (whole for _ in self.slot_tables)
        jitted_train = jax.jit(
            train,
            in_shardings=(self.shardings, self.batch_sharding, *more, *tables),
            out_shardings=(self.shardings, whole),
            donate_argnums=0,
            compiler_options=self.compiler_options,
        )
        jitted_eval = jax.jit(
            evaluate,
            in_shardings=(self.shardings.params, self.batch_sharding),
            out_shardings=whole,
            compiler_options=self.compiler_options,
        )
        return jitted_train, jitted_eval

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

    def _initial_slot_tables(self) -> tuple[np.ndarray, ...]:
        """Replicas as of an even load, or the experts of each device's tasks.

        Raises:
            ValueError: they do not go with the mesh or the step.
        """
        job, switch = self.job, self.job.model.switch
        if switch is None or job.model.build is not None:
            return ()
        if switch.router.kind == "task":
            return task_tables(job, self.mesh, job.mesh.rules, job.step.num_microbatches)
        if not switch.num_replicas:
            return ()
        for name, is_used in (
            (f"mesh axis {PIPE!r} of size {self.mesh.shape[PIPE]}", self.pipeline is not None),
            ("StepConfig.bucket_bytes", job.step.bucket_bytes is not None),
            (f"StorageSpec.experts={job.storage.experts!r}", job.storage.experts != "device"),
        ):
            require(not is_used, replicas_refusal(switch, name))
        return self._tables(np.ones((job.model.num_sparse_layers, switch.num_experts)))

    @property
    def notes(self) -> tuple[str, ...]:
        experts, unused = self.job.storage.experts, ", ".join(self.job.unused_storage)
        said = f"{unused}: without effect with StorageSpec.experts={experts!r}"
        return (
            *((said,) if unused else ()),
            *drops_of_dropless(self.job.model.switch),
            *self._task_notes(),
            *self._replica_notes(),
            *whole_notes(self.job.mesh.rules, self.mesh, self.abstract_state.params),
        )

    def _replica_notes(self) -> tuple[str, ...]:
        job, axes = self.job, replica_axes(self.mesh, self.job.mesh.rules)
        rows, M = job.batch_size // job.step.num_microbatches, job.step.num_microbatches
        parts = math.prod(self.mesh.shape[axis] for axis in axes)
        if M == 1 or has_whole_groups(job.model, rows, job.sparse_lengths, parts):
            return ()
        return (
            f"gradients are summed over {'*'.join(axes)} in each of {M} microbatches: some "
            f"routing group of their {rows} rows is on several of {parts} replicas; with a "
            "smaller SwitchConfig.group_size they are summed once a step",
        )

    def _task_notes(self) -> tuple[str, ...]:
        switch, place = self.job.model.switch, Placement.on(self.mesh, self.job.mesh.rules)
        is_by_task = switch is not None and switch.router.kind == "task"
        if not (is_by_task and place.experts) or self.slot_tables:
            return ()
        return (
            f"tokens travel to their tasks' experts, by dispatcher={switch.dispatcher!r}: for "
            "experts to travel instead, use one microbatch, no stages, buckets or storage, and "
            "a SwitchConfig.group_size that cuts each device's rows into whole groups",
        )

    def place_replicas(self, load_NE) -> None:
        """Chooses again which experts have replicas, and where; the next step takes it.

        Args:
            load_NE: tokens, or shares of them, that asked for each expert.
        """
        if self.job.model.switch is not None and self.job.model.switch.num_replicas:
            self.slot_tables = self._tables(load_NE)

    def _tables(self, load_NE) -> tuple[np.ndarray, ...]:
        place = Placement.on(self.mesh, self.job.mesh.rules)
        replicas = self.job.model.switch.num_replicas
        return (place_replicas(load_NE, replicas, place.size(place.experts)),)

    def require_memory(self) -> None:
        """Checks that the state alone fits: too large an allocation may hang, and not fail.

        Raises:
            ValueError: it does not; says how much there is.
        """
        device = self.mesh.local_devices[0]
        needed = self.state_bytes(is_on_host=False)
        if device.platform == "cpu":  # whose simulated devices share the machine's memory
            needed *= len(self.mesh.local_devices)
            limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        else:
            limit = (device.memory_stats() or {}).get("bytes_limit", math.inf)
        require(
            needed <= limit,
            f"parameters and optimizer need {needed / 2**30:,.1f} GiB, and a {device.platform} "
            f"device has {limit / 2**30:,.1f} GiB; use more devices that split them "
            "(configs/meshes/fsdp.gin), or a smaller model",
        )

    def state_bytes(self, *, is_on_host: bool) -> int:
        """Bytes of one device's part of the state, in its own memory or in the host's."""
        return sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(self.abstract_state)
            if (leaf.sharding.memory_kind == HOST) == is_on_host
        )

    @property
    def abstract_beside(self) -> tuple:
        """Shape structs of what a step takes after the batch, and that stays: nothing."""
        return ()

    def trace_step(self, batch: dict) -> jax.stages.Traced:
        """The step of training, traced: no array is there.

        Args:
            batch: shape structs as `abstract_batch` gives them.
        """
        return self.train_step.trace(self.abstract_state, batch, *self.slot_tables)

    def abstract_batch(self, batch: dict) -> dict:
        """What `place_for_training` gives, of the shape structs of a batch."""
        return batch

    @property
    def abstract_params(self):
        """All parameters as shape structs that say where to read those of another run."""
        return self.abstract_state.params

    def init_state(self, params=None) -> TrainState:
        """A state at step 0, each device drawing its own part; or of given parameters.

        Given ones are donated, so that no device has them twice.
        """
        return self._jitted_init(params)

    def trace_init(self) -> jax.stages.Traced:
        """`init_state()`, traced: no array is there."""
        return self._jitted_init.trace(None)

    @property
    def _jitted_init(self):
        return jax.jit(self._init, out_shardings=self.shardings, donate_argnums=0)

    def _init(self, params=None) -> TrainState:
        job = self.job
        return init_state(job.model, self.optimizer, job.seed, params, job.step.has_average)

    def _abstract_state(self) -> TrainState:
        """Shape structs with shardings.

        Parameters follow the rules by their names' dimension letters; so do the optimizer's
        statistics whose names end in letters too, and these may be sliced further
        (`Rules.optimizer_slices`). Everything else is whole everywhere.
        """
        state, rules = jax.eval_shape(self._init), self.job.mesh.rules
        letters = state_letters(state)
        slices = optimizer_slices(rules, self.mesh, state.params)

        def with_sharding(name, leaf):
            spec = PartitionSpec()
            if name in letters:
                spec = param_spec(rules, self.mesh, name, leaf.shape)
            if name in letters and not name.startswith("params/"):
                own = slices.get(param_of(name, slices))
                spec = with_slice(spec, letters[name], own)
            sharding = NamedSharding(self.mesh, spec)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return tree.map_named(with_sharding, state)

    def place(self, batch: Batch) -> dict:
        """The rows of this process' `shard` as part of the global batch on the devices."""

        def as_global(rows):
            shape = (self.job.batch_size, *rows.shape[1:])
            return jax.make_array_from_process_local_data(self.batch_sharding, rows, shape)

        return {name: as_global(rows) for name, rows in batch.items()}

    def place_for_training(self, batch: Batch) -> dict:
        """The same of a batch that is trained on."""
        return self.place(batch)


def task_tables(
    job: TrainingJob, mesh, rules: Rules, num_microbatches: int
) -> tuple[np.ndarray, ...]:
    """Every layer's slots by task, where devices with experts have rows of their own.

    Nothing elsewhere, in a pipeline, in microbatches, with groups that do not divide a device's
    rows and with experts in storage: there the configured dispatcher runs.

    Args:
        job: with a router by task; its own mesh and microbatches do not count.
        mesh: or anything with a `shape` like one's.
    """
    place = Placement.on(mesh, rules)
    is_whole = num_microbatches == 1 and job.step.bucket_bytes is None
    is_whole &= job.storage.experts == "device" and mesh.shape[PIPE] == 1
    has_rows = place.experts and place.batch[-len(place.experts) :] == place.experts
    if not (is_whole and has_rows):
        return ()
    rows, parts = as_mixture(job.source).rows, place.size(place.batch)
    for length in job.sparse_lengths:
        G, T = layer_groups(job.model.switch, job.batch_size, length)
        # A padded last group moves those before it into the next device's rows.
        if G % parts or job.batch_size * length != G * T:
            return ()
    num_experts, devices = job.model.switch.num_experts, place.size(place.experts)
    table_R = place_tasks(rows, num_experts, parts, devices)
    return (np.tile(table_R, (job.model.num_sparse_layers, 1)),)


def replicas_refusal(switch: SwitchConfig, name: str) -> str:
    """Why experts have no replicas where `name` is used."""
    return (
        f"SwitchConfig.num_replicas={switch.num_replicas} with {name}: experts have no "
        "replicas there; use num_replicas=0, or leave the other out"
    )


def state_letters(state: TrainState) -> dict[str, str]:
    """Dimension letters of the parameters and of the optimizer's statistics that have any."""
    shapes = {path: leaf.shape for path, leaf in tree.named_leaves(state.params).items()}
    letters = {}
    for name, leaf in tree.named_leaves(state).items():
        kind, _, path = name.partition("/")
        if kind in ("params", "opt_state", "average") and has_letters(path, leaf.shape, shapes):
            letters[name] = dims_of(path.rpartition("/")[2], len(leaf.shape))
    return letters
