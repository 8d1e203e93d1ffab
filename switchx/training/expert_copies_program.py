# SPDX-License-Identifier: Apache-2.0
"""A job as programs in which experts have copies on several devices: by load, or by task.

Shen et al. 2022 (SE-MoE, arXiv:2205.10034), section 4.1. A table that a step takes after the
batch says which expert is in each slot of each layer: another table needs no other program.
Dims: N Switch layers, E experts, R slots for experts, G groups, T tokens of a group
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from switchx import tree
from switchx.data.mixtures import as_mixture
from switchx.fields import require
from switchx.models.config import ModelConfig
from switchx.moe.capacity import layer_groups
from switchx.moe.config import SwitchConfig
from switchx.moe.copy_placement import place_copies, place_tasks
from switchx.moe.experts import CopiedWeight
from switchx.partitioning.mesh import PIPE
from switchx.partitioning.placement import Placement
from switchx.partitioning.rules import Rules
from switchx.training.evaluate import eval_step
from switchx.training.job import TrainingJob
from switchx.training.program import TrainingProgram
from switchx.training.router_bias import layers_of
from switchx.training.step import Seam, gradients, seam_of, train_step


class CopiesProgram(TrainingProgram):
    """The programs of a job whose experts may have copies; without any, those of any job.

    Attributes:
        slot_tables: int32 `[N, R]`, the expert in each slot of every layer; () without copies.
    """

    slot_tables: tuple[np.ndarray, ...] = ()

    def _steps(self):
        self.slot_tables = self._initial_tables()
        evaluate = functools.partial(eval_step, self.job.model)
        return self._jitted(self._train_step, evaluate, *self._table_shardings)

    def _train_step(self, state, batch, *slot_tables, seam: Seam | None = None):
        """See `step.train_step`."""
        job = self.job
        seam = seam or seam_of(job.step)
        for table_NR in slot_tables:
            seam = with_copies(seam, table_NR)
        compute = functools.partial(gradients, job.model, job.loss, job.step, seam=seam)
        return train_step(
            job.model, job.loss, job.step, self.optimizer, state, batch, compute=compute
        )

    @property
    def _table_shardings(self) -> list[NamedSharding]:
        return [NamedSharding(self.mesh, PartitionSpec()) for _ in self.slot_tables]

    @property
    def beside(self) -> tuple:
        """The table of slots."""
        return self.slot_tables

    @property
    def abstract_beside(self) -> tuple:
        """Shape structs of `beside`."""
        return jax.tree.map(
            lambda table: jax.ShapeDtypeStruct(table.shape, table.dtype), self.slot_tables
        )

    @property
    def notes(self) -> tuple[str, ...]:
        travel = () if self.slot_tables else task_notes(self.job, self.mesh)
        return (*super().notes, *travel)

    def balance(self, load_NE) -> None:
        """Chooses anew which experts have copies, and where; the next step uses them."""
        if has_copies(self.job.model):
            self.slot_tables = self._tables(load_NE)

    def _initial_tables(self) -> tuple[np.ndarray, ...]:
        """Copies for an even load, or the experts of each device's tasks.

        Raises:
            ValueError: the copies do not suit the mesh or the step.
        """
        job, switch = self.job, self.job.model.switch
        if is_by_task(job.model):
            return task_tables(job, self.mesh, job.mesh.rules, job.step.num_microbatches)
        if not has_copies(job.model):
            return ()
        require_copies(job)
        return self._tables(np.ones((job.model.num_sparse_layers, switch.num_experts)))

    def _tables(self, load_NE) -> tuple[np.ndarray, ...]:
        place = Placement.on(self.mesh, self.job.mesh.rules)
        copies = self.job.model.switch.num_replicas
        return (place_copies(load_NE, copies, place.size(place.experts)),)


def has_copies(model: ModelConfig) -> bool:
    """Whether some experts of a model have copies."""
    return model.build is None and model.switch is not None and model.switch.num_replicas > 0


def is_by_task(model: ModelConfig) -> bool:
    """Whether the experts of a model are divided among tasks."""
    has_router = model.build is None and model.switch is not None
    return has_router and model.switch.router.kind == "task"


def require_copies(job: TrainingJob) -> None:
    """Checks that experts of a job can have the copies that it asks for.

    Raises:
        ValueError: the mesh has stages, or the step buckets or experts in storage.
    """
    if not has_copies(job.model):
        return
    for name, is_used in (
        (f"mesh axis {PIPE!r} of size {job.mesh.pipe}", job.mesh.pipe > 1),
        ("StepConfig.bucket_bytes", job.step.bucket_bytes is not None),
        (f"StorageSpec.experts={job.storage.experts!r}", job.storage.experts != "device"),
    ):
        require(not is_used, copies_refusal(job.model.switch, name))


def with_copies(seam: Seam, expert_of_slot_NR) -> Seam:
    """The seam of a step whose layers have the experts of a table; no number changes."""

    def loss_of(config, loss, params, batch, **arguments):
        params = _with_tables(params, expert_of_slot_NR)
        return seam.loss_of(config, loss, params, batch, **arguments)

    def summed(gradient_of, config, params, batch, key, num_microbatches):
        if num_microbatches == 1:  # the slots of tasks are the whole mesh's
            return gradient_of(params, batch, key)
        return seam.summed(gradient_of, config, params, batch, key, num_microbatches)

    return Seam(loss_of, summed)


def _with_tables(params, expert_of_slot_NR):
    """`params`, with each layer's row of the table beside its experts."""
    rows = layers_of(params, "w_in_EDF")

    def put(name, leaf):
        if name not in rows:
            return leaf
        table_NR = jnp.asarray(expert_of_slot_NR)[jnp.asarray(rows[name])]
        return CopiedWeight(leaf, table_NR if leaf.ndim > 3 else table_NR[0])

    return tree.map_named(put, params)


def task_tables(
    job: TrainingJob, mesh, rules: Rules, num_microbatches: int
) -> tuple[np.ndarray, ...]:
    """Every layer's slots by task, if devices with experts have rows of their own.

    () otherwise, in a pipeline, in microbatches, with groups that do not divide a device's rows
    and with experts in storage: the configured dispatcher then runs.

    Args:
        job: job with a router by task; its own mesh and microbatches are not used.
        mesh: a mesh, or any object with a `shape` like a mesh's.
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
    num_experts = job.model.switch.num_experts
    devices = place.size(place.experts)
    table_R = place_tasks(rows, num_experts, parts, devices)
    return (np.tile(table_R, (job.model.num_sparse_layers, 1)),)


def task_notes(job: TrainingJob, mesh) -> tuple[str, ...]:
    """Notes for the user about tasks whose tokens travel to their experts."""
    if not (is_by_task(job.model) and Placement.on(mesh, job.mesh.rules).experts):
        return ()
    dispatcher = job.model.switch.dispatcher
    note = f"tokens travel to their tasks' experts, by dispatcher={dispatcher!r}"
    if job.lora is not None:
        return (note,)
    return (
        f"{note}: for experts to travel instead, use one microbatch, no stages, buckets or "
        "storage, and a SwitchConfig.group_size that cuts each device's rows into whole groups",
    )


def copies_refusal(switch: SwitchConfig, name: str) -> str:
    """Why experts have no copies if `name` is used."""
    return (
        f"SwitchConfig.num_replicas={switch.num_replicas} with {name}: experts have no "
        "copies there; use num_replicas=0, or leave the other out"
    )
