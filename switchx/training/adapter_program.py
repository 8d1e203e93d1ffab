# SPDX-License-Identifier: Apache-2.0
"""A job with `lora` as programs: adapters are trained beside a base that stays as it is.

Hu et al. 2021 (LoRA, arXiv:2106.09685). The training state has only the adapters, and so do
gradients, the optimizer's state and checkpoints. The base is an argument of the
step, split over the mesh by the rules of all parameters.
"""

import dataclasses
import functools

import jax

from switchx import tree
from switchx.checkpoint.adapter_run import AdapterRecord, require_merged
from switchx.checkpoint.restore import (
    checkpoint_fingerprint,
    checkpoint_paths,
    choose_step,
    require_base,
    restore_params,
)
from switchx.checkpoint.run_folder import RunFolder
from switchx.data.vocabularies import load_vocabulary
from switchx.fields import require
from switchx.models.adapters import (
    LoRASpec,
    init_adapters,
    merged,
    quantized_base,
    with_adapters,
)
from switchx.models.params import abstract_params
from switchx.partitioning.mesh import PIPE, platform_of
from switchx.training.evaluate import eval_step
from switchx.training.expert_copies_program import has_copies, task_notes
from switchx.training.job import TrainingJob
from switchx.training.losses import batch_loss
from switchx.training.program import TrainingProgram
from switchx.training.resume import check_same_model, require_vocabulary_of
from switchx.training.step import Seam, TrainState, gradients, init_key, init_state, train_step


class AdapterProgram(TrainingProgram):
    """The programs of a job with `lora`.

    Attributes:
        record: the base and the adapters, as recorded in the run's `adapter.json`.
    """

    def __init__(self, job: TrainingJob, run: RunFolder, devices=None):
        """Reads the base's configuration and the bytes of its checkpoint's manifest.

        Raises:
            ValueError: there is no such base, it is another model than the job's or not the one
                that the run began with, a target matches nothing, or the job has settings that
                adapters exclude; and as in `TrainingProgram`.
        """
        require_beside_base(job)
        self.record = _record_of(job, run)
        super().__init__(job, devices)

    def write_records(self, run: RunFolder, *, is_new: bool) -> None:
        self.record.write(run)  # also for a resumed run: the base may be elsewhere now

    def _steps(self):
        job, spec = self.job, self.record.spec
        platform = platform_of(self.mesh)
        self._quantized = functools.partial(quantized_base, spec=spec, platform=platform)
        base = jax.eval_shape(self._quantized, abstract_params(job.model))
        self._abstract_base = self.placed(base)
        at = jax.tree.map(lambda leaf: leaf.sharding, self._abstract_base)

        def train(state, batch, base):
            compute = functools.partial(
                gradients, job.model, job.loss, job.step, seam=adapted_by(base, spec)
            )
            return train_step(
                job.model, job.loss, job.step, self.optimizer, state, batch, compute=compute
            )

        def evaluate(adapters, batch, base):
            return eval_step(job.model, with_adapters(base, adapters, spec), batch)

        jitted_train, jitted_eval = self._jitted(train, evaluate, at, beside_evaluation=(at,))
        return jitted_train, lambda params, batch: jitted_eval(params, batch, self.base_params)

    def _init(self, params=None) -> TrainState:
        job = self.job
        if params is None:
            params = init_adapters(job.model, self.record.spec, init_key(job.seed))
        return init_state(job.model, self.optimizer, job.seed, params, job.step.has_average)

    @functools.cached_property
    def base_params(self) -> tree.Tree:
        """The base's parameters, read when first needed, each device its part."""
        if self.record.spec.bits is None:
            return self._read()
        at = jax.tree.map(lambda leaf: leaf.sharding, self._abstract_base)
        return jax.jit(self._quantized, out_shardings=at)(self._read())

    def _read(self) -> tree.Tree:
        spec, model = self.record.spec, self.job.model
        target = self.placed(abstract_params(model))
        return restore_params(spec.base, spec.step, target, model=model)

    def whole_params(self, params) -> tree.Tree:
        """The base's parameters with the adapters merged into them."""
        base = self.base_params if self.record.spec.bits is None else self._read()
        return merged(base, params, self.record.spec)

    @property
    def beside(self) -> tuple:
        """The base's parameters."""
        return (self.base_params,)

    @property
    def abstract_beside(self) -> tuple:
        """Shape structs of `beside`; the base's checkpoint is not read."""
        return (self._abstract_base,)

    @property
    def notes(self) -> tuple[str, ...]:
        spec = self.record.spec
        trained = tree.num_elements(self.abstract_state.params)
        whole = tree.num_elements(abstract_params(self.job.model))
        bits = "" if spec.bits is None else f", its experts in int{spec.bits}"
        router = None if self.job.model.switch is None else self.job.model.switch.router
        if router is not None and (router.has_bias or router.keeps_load):
            bits += ", its routers' selection biases and last loads, too,"
        note = (
            f"adapters: {trained:,} parameters of rank {spec.rank} are trained; the {whole:,} "
            f"of checkpoint {spec.step} of {spec.base}{bits} stay as they are"
        )
        return (*super().notes, *task_notes(self.job, self.mesh), note)


def adapted_by(base, spec: LoRASpec) -> Seam:
    """The seam of a step whose parameters are adapters of `base`."""

    def loss_of(config, loss, adapters, batch, *, key, **arguments):
        params = with_adapters(base, adapters, spec, key)
        return batch_loss(config, loss, params, batch, key=key, **arguments)

    return Seam(loss_of)


def require_beside_base(job: TrainingJob) -> None:
    """Raises ValueError if a job has settings that adapters exclude."""
    router = None if job.model.switch is None else job.model.switch.router
    counts_first = router is not None and router.counts_first and job.step.num_microbatches > 1
    for name, is_used, reason in (
        (
            "StepConfig.num_microbatches",
            counts_first,
            "RouterConfig.balance_scope='batch' counts the choices of whole models first",
        ),
        (f"MeshSpec.{PIPE}", job.mesh.pipe > 1, "stages are runs of whole parameters"),
        ("StepConfig.bucket_bytes", job.step.bucket_bytes, "buckets are of trained parameters"),
        ("StorageSpec.experts", job.storage.experts != "device", "the base is on the devices"),
        ("SwitchConfig.num_replicas", has_copies(job.model), "copies have no adapters"),
        ("TrainingJob.distillation", job.distillation, "all of a student is trained"),
        ("TrainingJob.init_from", job.init_from, "adapters begin beside LoRASpec.base"),
        ("model", job.model.build is not None, "a module of your own has other names"),
    ):
        require(
            not is_used,
            f"TrainingJob.lora with {name}: {reason}; leave out one of the two",
        )


def _record_of(job: TrainingJob, run: RunFolder) -> AdapterRecord:
    """The base of a new run, or that of a resumed one.

    Raises:
        ValueError: see `AdapterProgram`.
    """
    spec = job.lora
    base = RunFolder(spec.base)
    require_merged(base, "LoRASpec.base")
    require_vocabulary_of(base, job, "LoRASpec.base")
    check_same_model(base, job)
    recorded = AdapterRecord.read(run) if checkpoint_paths(run.checkpoints) else None
    step = choose_step(base, spec.step if recorded is None else recorded.spec.step)
    found = checkpoint_fingerprint(base, step, load_vocabulary(base.root))
    # Absolute: a run is read from other working directories, too.
    spec = dataclasses.replace(spec, base=str(base.where), step=step)
    if recorded is None:
        return AdapterRecord(spec, found)
    record = dataclasses.replace(recorded, spec=spec)
    require_base(run, record)
    return record
