# SPDX-License-Identifier: Apache-2.0
"""The programs of a job: its steps, jitted over its mesh, and the shardings of its arrays.

`compiled/workload.py` describes the same step to the planner, by shapes only.
Dims: N sparse layers, E experts
"""

import contextlib
import functools
import math
import os
from collections.abc import Iterator

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from switchx import tree
from switchx.axes import dims_of
from switchx.checkpoint.checkpointer import Experts
from switchx.checkpoint.run_folder import RunFolder
from switchx.data.features import Batch
from switchx.data.loader import Shard
from switchx.data.mixtures import as_mixture
from switchx.fields import require
from switchx.moe.capacity import slot_notes
from switchx.moe.replay import check_replay
from switchx.optim.protocol import has_letters, param_of
from switchx.partitioning.constrain import use_mesh
from switchx.partitioning.mesh import (
    HOST,
    batch_axes,
    batch_parts,
    device_kind_of,
    platform_of,
)
from switchx.partitioning.optimizer_slices import optimizer_slices, whole_notes, with_slice
from switchx.partitioning.replicas import replica_axes
from switchx.partitioning.rules import param_shardings, param_spec
from switchx.training.evaluate import eval_step
from switchx.training.fused_loss import check_fused
from switchx.training.job import TrainingJob
from switchx.training.microbatches import has_whole_groups
from switchx.training.resume import read_otherwise, task_names
from switchx.training.step import TrainState, init_state, train_step


class TrainingProgram:
    """A job's optimizer, its jitted train and eval steps, and the shardings of their arguments.

    Special tiers are subclasses, which replace `_steps`; `programs.compiled_program` picks one.

    Attributes:
        abstract_state: the training state as shape structs with `shardings`, into which a
            checkpoint is read.
        experts: the experts that are in storage and not in the state; None if all are in the
            state.
        teacher_parameters: number of parameters of a teacher that is evaluated in the step; 0
            without one.
        notes: sentences for the user, shown once per run.
    """

    experts: Experts | None = None
    teacher_parameters = 0

    def __init__(self, job: TrainingJob, devices=None):
        """Traces nothing yet; see `train_step` and `eval_step`.

        Args:
            devices: devices of the mesh, None for all; or an `AbstractMesh` with the job's
                axes, whose steps can be traced and lowered but not run.

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
        job.check_pipeline()
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
        self.train_step, self.eval_step = self._steps()

    def _steps(self):
        """The jitted steps of training and of evaluation."""
        job = self.job
        train = functools.partial(train_step, job.model, job.loss, job.step, self.optimizer)
        return self._jitted(train, functools.partial(eval_step, job.model))

    def _jitted(self, train, evaluate, *beside, beside_evaluation=()):
        """Jits `train(state, batch, *beside)` and `evaluate(params, batch, ...)`.

        Args:
            train: function that returns the next state and the step's metrics.
            evaluate: function that returns sums over the batch.
            beside, beside_evaluation: shardings of the arguments that `train` and `evaluate`
                take after the batch.
        """
        whole = NamedSharding(self.mesh, PartitionSpec())
        jitted_train = jax.jit(
            train,
            in_shardings=(self.shardings, self.batch_sharding, *beside),
            out_shardings=(self.shardings, whole),
            donate_argnums=0,
            compiler_options=self.compiler_options,
        )
        jitted_eval = jax.jit(
            evaluate,
            in_shardings=(self.shardings.params, self.batch_sharding, *beside_evaluation),
            out_shardings=whole,
            compiler_options=self.compiler_options,
        )
        return jitted_train, jitted_eval

    @functools.cached_property
    def shard(self) -> Shard:
        """The parts of each batch that this process's devices hold, which it has to read.

        The parts need not be adjacent (an axis over machines that is inside of `data`). Other
        processes may hold the same parts (an axis over machines along which rows are
        replicated).
        """
        parts = batch_parts(self.mesh, self.job.mesh.rules)
        held = self.batch_sharding.addressable_devices_indices_map((parts,)).values()
        return Shard(tuple(sorted({index[0].indices(parts)[0] for index in held})), parts)

    def write_records(self, run: RunFolder, *, is_new: bool) -> None:
        """Writes what only a special tier knows into the run folder, in one process.

        Args:
            is_new: whether there was no checkpoint when the run was opened.
        """

    def scope(self):
        """The context in which the steps must be called: it sets the mesh and its rules."""
        return use_mesh(self.mesh, self.job.mesh.rules)

    @property
    def notes(self) -> tuple[str, ...]:
        experts = self.job.storage.experts
        unused = ", ".join(self.job.unused_storage)
        note = f"{unused}: without effect with StorageSpec.experts={experts!r}"
        return (
            *((note,) if unused else ()),
            *slot_notes(self.job.model.switch),
            *self._norm_notes(),
            *self._replica_notes(),
            *self._prompt_notes(),
            *whole_notes(self.job.mesh.rules, self.mesh, self.abstract_state.params),
        )

    def _prompt_notes(self) -> Iterator[str]:
        """Notes on inputs that the models that the run begins with read differently."""
        job, mixture = self.job, as_mixture(self.job.source)
        if job.model.is_encoder_decoder:
            return
        tasks = (*mixture.tasks, *(mixture.evaluation or ()))
        for name, folder in (
            ("init_from", job.init_from),
            ("lora.base", job.lora and job.lora.base),
            ("distillation.teacher", job.distillation and job.distillation.teacher),
        ):
            if folder is None or not (run := RunFolder(folder)).config.is_file():
                continue
            whole = ()
            with contextlib.suppress(ValueError):  # a user's objective that is not imported
                whole, _ = read_otherwise(tasks, run)
            if whole:
                objective = type(whole[0].objective).__name__
                yield (
                    f"{name}={str(folder)!r} reads prompts causally, and inputs of "
                    f"{task_names(whole)} see themselves whole here, in training and "
                    "afterwards; to read them causally, use "
                    f"--gin.{objective}.is_prefix_bidirectional=False"
                )

    def _norm_notes(self) -> tuple[str, ...]:
        """Notes on settings that a new model should avoid; runs that have them continue."""
        model = self.job.model
        if model.qk_norm == "none" or model.scale_attention or model.build is not None:
            return ()
        return (
            f"ModelConfig.qk_norm={model.qk_norm!r} with scale_attention=False: 1 / sqrt(K) is "
            "in the query's initialization then, and the norm behind it takes it away, so that "
            "scores begin sqrt(K) too large; use scale_attention=True in a new run",
        )

    def _replica_notes(self) -> tuple[str, ...]:
        job, axes = self.job, replica_axes(self.mesh, self.job.mesh.rules)
        rows = job.batch_size // job.step.num_microbatches
        M = job.step.num_microbatches
        parts = math.prod(self.mesh.shape[axis] for axis in axes)
        is_summed_apart = M > 1 or job.mesh.rules.optimizer_slices
        has_whole = has_whole_groups(job.model, rows, job.sparse_lengths, parts)
        if not is_summed_apart or has_whole:
            return ()
        why = f"some routing group of their {rows} rows is on several of {parts} replicas"
        way_out = "a smaller SwitchConfig.group_size"
        if job.model.switch.router.counts_first:
            why = "RouterConfig.balance_scope='batch' counts the load of the whole batch first"
            way_out = "balance_load='previous_step', or balance_scope='group',"
        on = "*".join(axes)
        summed = f"summed over {on} in each of {M} microbatches"
        then = "summed once a step"
        if M == 1:
            summed = f"summed whole on all of {on}"
            then = "scattered to its slices"
        return (f"gradients are {summed}: {why}; with {way_out} they are {then}",)

    def require_memory(self) -> None:
        """Checks that the state fits into memory; too large an allocation may hang, not fail.

        Raises:
            ValueError: the state does not fit; the message says how much memory there is.
        """
        device = self.mesh.local_devices[0]
        needed = self.state_bytes(is_on_host=False)
        if device.platform == "cpu":  # its simulated devices share the machine's memory
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
        """Bytes of one device's part of the state and of the parameters beside it, in its own
        memory or in the host's."""
        return sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            for leaf in jax.tree.leaves((self.abstract_state, self.abstract_beside))
            if leaf.sharding is not None and (leaf.sharding.memory_kind == HOST) == is_on_host
        )

    def placed(self, params):
        """Shape structs of parameters, with the shardings that the rules give them."""
        at = param_shardings(self.job.mesh.rules, self.mesh, params)
        return jax.tree.map(
            lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at),
            params,
            at,
        )

    @property
    def beside(self) -> tuple:
        """The arguments that `train_step` takes after the batch: none."""
        return ()

    @property
    def abstract_beside(self) -> tuple:
        """Shape structs of `beside`."""
        return ()

    def balance(self, load_NE) -> None:
        """Called with the load of the experts after an evaluation; does nothing here.

        Args:
            load_NE: number or share of the tokens that asked for each expert.
        """

    def whole_params(self, params):
        """The model's parameters, given the trained ones: the same."""
        return params

    def trace_step(self, batch: dict) -> jax.stages.Traced:
        """Traces the training step, without allocating an array.

        Args:
            batch: shape structs, as `abstract_batch` returns them.
        """
        return self.train_step.trace(self.abstract_state, batch, *self.abstract_beside)

    def abstract_batch(self, batch: dict) -> dict:
        """The shape structs of a batch after `place_for_training`, from those before it."""
        return batch

    @property
    def abstract_params(self):
        """Shape structs of all parameters, with the shardings for reading another run's."""
        return self.abstract_state.params

    def init_state(self, params=None) -> TrainState:
        """The state at step 0.

        Args:
            params: parameters to start from, which are donated so that no device holds them
                twice; None lets each device draw its own part.
        """
        return self._jitted_init(params)

    def trace_init(self) -> jax.stages.Traced:
        """Traces `init_state()`, without allocating an array."""
        return self._jitted_init.trace(None)

    @property
    def _jitted_init(self):
        return jax.jit(self._init, out_shardings=self.shardings, donate_argnums=0)

    def _init(self, params=None) -> TrainState:
        job = self.job
        return init_state(job.model, self.optimizer, job.seed, params, job.step.has_average)

    def _abstract_state(self) -> TrainState:
        """Shape structs of the state, with shardings.

        Parameters are sharded by the rules for the dimension letters of their names. So are the
        optimizer's statistics whose names end in letters; these may be sliced further
        (`Rules.optimizer_slices`). All other arrays are replicated.
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
        """The rows of this process's `shard` as part of the global batch on the devices.

        Raises:
            ValueError: the batch has choices to replay that no model has (`moe/replay.py`).
        """
        check_replay(self.job.model, batch)

        def as_global(rows):
            shape = (self.job.batch_size, *rows.shape[1:])
            return jax.make_array_from_process_local_data(self.batch_sharding, rows, shape)

        return {name: as_global(rows) for name, rows in batch.items()}

    def place_for_training(self, batch: Batch) -> dict:
        """Places a training batch as `place` does; subclasses add the teacher's logits."""
        return self.place(batch)


def state_letters(state: TrainState) -> dict[str, str]:
    """Dimension letters of the parameters and of the optimizer's statistics that have any."""
    shapes = {path: leaf.shape for path, leaf in tree.named_leaves(state.params).items()}
    letters = {}
    for name, leaf in tree.named_leaves(state).items():
        kind, _, path = name.partition("/")
        if kind in ("params", "opt_state", "average") and has_letters(path, leaf.shape, shapes):
            letters[name] = dims_of(path.rpartition("/")[2], len(leaf.shape))
    return letters
