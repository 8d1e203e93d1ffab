# SPDX-License-Identifier: Apache-2.0
"""A job as programs with its experts in host memory: `TrainingProgram`'s methods.

SE-MoE (Shen et al. 2022, arXiv:2205.10034), section 2. Experts, and what the optimizer keeps
for them, are arrays of the training state like all others, but in the host's memory. A step is
one program, for any mesh without stages (host_step.py).
"""

import functools
import os

import jax
from jax.sharding import AbstractMesh

from switchx import tree
from switchx.axes import dims_of
from switchx.fields import require
from switchx.models.layer_loop import use_layer_loop
from switchx.models.params import init_params
from switchx.models.stages import (
    init_period_experts,
    model_periods,
    without_experts,
)
from switchx.partitioning.mesh import HOST, platform_of
from switchx.partitioning.rules import param_table
from switchx.training.evaluate import eval_step
from switchx.training.expert_copies_program import task_notes
from switchx.training.job import TrainingJob
from switchx.training.offload.host_ring import require_sound_ring
from switchx.training.offload.host_stack import empty, to_device, to_host
from switchx.training.offload.host_step import (
    LAYERS_FROM_HOST,
    SlicedState,
    host_train_step,
    join_state,
    with_host_stacks,
)
from switchx.training.program import TrainingProgram
from switchx.training.step import TrainState, init_key, init_state


class HostProgram(TrainingProgram):
    """The programs of a job with `storage.experts="host"`.

    Attributes:
        notes: sentences for the user, shown once per run.
    """

    def __init__(self, job: TrainingJob, devices=None):
        """Traces nothing yet.

        Raises:
            ValueError: something in the job cannot be combined with experts in host memory, or
                the devices cannot reach it.
        """
        job.require_storage({"pipe": job.mesh.pipe})
        super().__init__(job, devices)

    @property
    def notes(self) -> tuple[str, ...]:
        notes = (*super().notes, *task_notes(self.job, self.mesh))
        if platform_of(self.mesh) != "cpu":
            return notes
        return (
            *notes,
            "StorageSpec.experts='host' on CPU: its devices have the host's memory, so the "
            "step is computed as on an accelerator and no memory is saved",
        )

    def require_memory(self) -> None:
        """Checks that devices and host hold the state, and on GPUs that rings are sound.

        Raises:
            ValueError: the state does not fit; the message says how much memory there is.
            RuntimeError: this JAX computes wrong gradients (`require_sound_ring`).
        """
        super().require_memory()
        device = self.mesh.local_devices[0]
        needed = self.state_bytes(is_on_host=True) * len(self.mesh.local_devices)
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        require(
            needed <= limit,
            f"experts and their optimizer need {needed / 2**30:,.1f} GiB of host memory, and "
            f"this host has {limit / 2**30:,.1f} GiB; use more hosts, or "
            "StorageSpec.experts='disk'",
        )
        if needs_sound_ring(device):
            require_sound_ring(device)

    def _steps(self):
        job, slots = self.job, self.job.storage.slots
        train = functools.partial(
            host_train_step, job.model, job.loss, job.step, self.optimizer, slots
        )

        def evaluate(params, batch):
            with use_layer_loop(LAYERS_FROM_HOST):
                return eval_step(job.model, with_host_stacks(params, slots), batch)

        return self._jitted(train, evaluate)

    def _abstract_state(self) -> TrainState:
        require_host_memory(self.mesh)

        def place(name, leaf):
            if not (leaf.ndim and _is_experts(name, leaf)):
                return leaf
            sharding = leaf.sharding.with_memory_kind(HOST)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return tree.map_named(place, super()._abstract_state())

    def _init(self, params=None) -> TrainState:
        """A state at step 0; experts are drawn, or taken from `params`, a layer at a time."""
        job, key = self.job, init_key(self.job.seed)
        like = jax.eval_shape(super()._init)
        given = {} if params is None else tree.named_leaves(params)
        dense = without_experts(init_params(job.model, key) if params is None else params)
        experts = {}
        for period in model_periods(job.model):
            for name in (name for names in period.names for name in names):
                if name in experts:  # of all periods of the stack
                    continue
                if params is None:
                    draw = functools.partial(_drawn, job.model, period, name, key=key)
                else:
                    draw = functools.partial(to_device, given[name])
                num_layers = tree.named_leaves(like.params)[name].shape[0]
                experts[name] = self._init_stack(name, num_layers, draw)
        state = init_state(job.model, self.optimizer, job.seed, dense)
        return join_state(like, SlicedState(state, experts))

    def _init_stack(self, name: str, num_layers: int, draw):
        """One parameter of all layers and what the optimizer keeps for it.

        Args:
            draw: function from the number of a layer to the parameter's slice.
        """

        space = jax.memory.Space.Host

        def layer(n):
            params = tree.nested({name: draw(n)[None]})
            return params, self.optimizer.init(params)

        def stacked(path, leaf):
            if not leaf.ndim:
                return leaf
            shape = jax.ShapeDtypeStruct((num_layers, *leaf.shape[1:]), leaf.dtype)
            return empty(shape, dims_of(path.rpartition("/")[2], leaf.ndim), space)

        def write(n, arrays):
            return jax.tree.map(
                lambda array, one: to_host(array, one[0], n) if array.ndim else one,
                arrays,
                layer(n),
            )

        first = tree.map_named(stacked, jax.eval_shape(layer, 0))
        scalars = layer(0)
        first = jax.tree.map(lambda a, b: a if a.ndim else b, first, scalars)
        return jax.lax.fori_loop(0, num_layers, write, first)


def needs_sound_ring(device) -> bool:
    """Whether some releases of JAX are known to be wrong on such a device."""
    return device.platform == "gpu"


def require_host_memory(mesh) -> None:
    """Raises ValueError unless programs of a mesh's devices reach the host's memory.

    Nothing is known of an abstract mesh: programs for it can be lowered, and none is refused.
    """
    if isinstance(mesh, AbstractMesh):
        return
    device = mesh.devices.flat[0]
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    require(
        HOST in kinds or device.platform == "cpu",
        f"StorageSpec.experts='host' on {device.device_kind}: its programs reach the memories "
        f"{', '.join(kinds) or 'of the device alone'}, and need {HOST!r}; use experts='device' "
        "or 'disk', or a JAX whose back end has it",
    )


def _is_experts(name: str, leaf) -> bool:
    kind, _, path = name.partition("/")
    if kind not in ("params", "opt_state") or "/blocks/" not in path:
        return False
    return param_table(dims_of(path.rpartition("/")[2], leaf.ndim)) == "expert_params"


def _drawn(config, period, name: str, n, *, key):
    return init_period_experts(config, period, n, key)[name]
