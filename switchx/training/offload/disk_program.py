# SPDX-License-Identifier: Apache-2.0
"""A job as programs with its experts on a disk: `TrainingProgram`'s methods, period by
period.

SE-MoE (Shen et al. 2022, arXiv:2205.10034), section 2. The training state has all but the
experts; these are records in a store (expert_records.py), of which a step has some in host
memory and those of a few periods on the devices (disk_step.py). Everything else is split over
the mesh as if experts were on the devices.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from switchx import tree
from switchx.checkpoint.checkpointer import SaveError
from switchx.checkpoint.run_folder import RunFolder
from switchx.malloc import return_freed_memory
from switchx.models.params import abstract_params, init_params
from switchx.models.stages import (
    init_period_experts,
    is_of_experts,
    without_experts,
)
from switchx.optim.updates import global_norm
from switchx.partitioning.mesh import cpu_device
from switchx.storage.record import RecordError, StoreError
from switchx.training.evaluate import PLAIN_LOSS, sampled
from switchx.training.expert_copies_program import task_notes
from switchx.training.job import TrainingJob
from switchx.training.offload.disk_periods import joined
from switchx.training.offload.disk_step import LayeredGradients
from switchx.training.offload.expert_records import ExpertRecords
from switchx.training.program import TrainingProgram
from switchx.training.step import TrainState, init_key, init_state, take_step


class LayeredProgram(TrainingProgram):
    """The programs of a job with `storage.experts="disk"`; to be used within `scope`."""

    def __init__(self, job: TrainingJob, run: RunFolder, devices=None):
        """Traces nothing and opens nothing yet.

        Raises:
            ValueError: something in the job cannot be combined with experts on a disk.
        """
        job.require_storage({})
        if job.storage.host_bytes is not None:
            return_freed_memory()
        self._run = run
        super().__init__(job, devices)
        job.require_storage(dict(self.mesh.shape))
        self.experts = ExpertRecords(job, self.mesh)
        self._draw = jax.jit(
            functools.partial(init_period_experts, job.model),
            static_argnames="period",
            out_shardings=self.experts.banks.sharding,
            compiler_options=self.compiler_options,
        )

    def _steps(self):
        job = self.job
        jit = functools.partial(jax.jit, compiler_options=self.compiler_options)
        self._layered = LayeredGradients(
            job.model,
            job.loss,
            job.step.num_microbatches,
            job.storage.slots,
            self.compiler_options,
        )
        whole = NamedSharding(self.mesh, PartitionSpec())
        out_shardings = self.shardings, whole, whole
        self._take = jit(self._take_step, out_shardings=out_shardings, donate_argnums=0)
        self._measure = jit(self._measure_batch, out_shardings=whole)
        return self._train_step, self._eval_step

    @contextlib.contextmanager
    def scope(self):
        """The context in which the steps are to be called; the store is open in it.

        Raises:
            ValueError: another run has the store's folder.
        """
        self.experts.open(self._run.storage / "experts")
        try:
            with super().scope():
                yield
        finally:
            self.experts.close(self._run.storage / "trace.npz")

    @property
    def notes(self) -> tuple[str, ...]:
        return (*super().notes, *task_notes(self.job, self.mesh))

    @property
    def abstract_params(self):
        """Shape structs of all parameters, with those of experts on the host."""
        on_host = SingleDeviceSharding(cpu_device())
        experts = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on_host)
            for name, leaf in tree.named_leaves(abstract_params(self.job.model)).items()
            if is_of_experts(name, leaf)
        }
        return tree.nested(tree.named_leaves(self.abstract_state.params) | experts)

    def init_state(self, params=None) -> TrainState:
        """A state at step 0, and records of the experts; drawn, or from given parameters."""
        key = init_key(self.job.seed)
        state = super().init_state(None if params is None else without_experts(params))
        # NumPy's: arrays of one device cannot be computed with if the mesh has several.
        given = {} if params is None else tree.named_leaves(params)
        leaves = {n: np.asarray(x) for n, x in given.items() if is_of_experts(n, x)}
        # One program for all periods of a stack, which differ only in their number.
        like = {period.stack: period for period in self.experts.periods}

        def draw(period):
            if params is None:
                return self._draw(period=like[period.stack], number=period.number, key=key)
            return {
                name: leaves[name][period.number] for names in period.names for name in names
            }

        self.experts.begin(draw)
        return state

    def _init(self, params=None) -> TrainState:
        job = self.job
        if params is None:
            params = without_experts(init_params(job.model, init_key(job.seed)))
        return init_state(job.model, self.optimizer, job.seed, params)

    def _train_step(self, state: TrainState, batch: dict):
        """See `step.train_step`. The state is donated, the records are updated.

        Raises:
            SaveError: a record could not be written.
        """
        with _stored():
            self.experts.begin_sweeps(is_training=True)
            is_half = self.job.model.precision.compute == "float16"
            grads, results = self._layered.gradients(
                state.params,
                batch,
                self.experts,
                key=state.key,
                loss_scale=state.loss_scale if is_half else 1.0,
            )
            state, metrics, gradient_scale = self._take(state, grads, results)
            if not int(metrics.is_skipped):
                self.experts.update(float(gradient_scale))
            return state, metrics

    def _take_step(self, state, grads, results):
        value, sums, stats, squares = joined(results)
        raw_norm = jnp.sqrt(jnp.square(global_norm(grads)) + squares)
        job = self.job
        return take_step(
            job.model, job.step, self.optimizer, state, grads, raw_norm, value, sums, stats
        )

    def _eval_step(self, params, batch: dict):
        """See `evaluate.eval_step`."""
        with _stored():
            self.experts.settle()
            self.experts.begin_sweeps(is_training=False)
            x_BLD, stats = self._layered.evaluate(params, batch, self.experts)
            return self._measure(params, x_BLD, stats, batch)

    def _measure_batch(self, params, x_BLD, stats, batch):
        sums = self._layered.token_sums(params, x_BLD, batch, PLAIN_LOSS)
        return sampled(self.job.model, sums, stats, batch)


@contextlib.contextmanager
def _stored():
    """Raises SaveError if a record could not be written, or what is read is damaged: training
    goes on from the last checkpoint."""
    try:
        yield
    except StoreError as error:
        raise SaveError(error.strerror or str(error)) from error
    except RecordError as error:
        raise SaveError(str(error)) from error
