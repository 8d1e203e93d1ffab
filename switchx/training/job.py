# SPDX-License-Identifier: Apache-2.0
"""A training job: everything a run is made of, as one frozen description.

Gin builds it at the edge; Python can build it directly.
"""

import dataclasses
import types
from collections.abc import Mapping, Sequence
from typing import Literal

import optax

from switchx.checkpoint.retention import Retention
from switchx.data.features import DecoderOnlyFeatures, EncoderDecoderFeatures, Features
from switchx.data.loader import BatchConfig, Prefetch, Shard, TrainLoader
from switchx.data.mixtures import Mixture, as_mixture, evaluated_tasks
from switchx.data.tasks import Task
from switchx.data.tokenizers import Vocabulary
from switchx.fields import (
    at_resume,
    require,
    require_at_least,
    require_pairs,
    require_patterns,
)
from switchx.models.adapters import LoRASpec
from switchx.models.config import ModelConfig
from switchx.models.stored_experts import storage_refusal
from switchx.moe.capacity import rows_of_groups
from switchx.moe.dispatchers import suited_dispatcher
from switchx.optim.multipliers import with_multipliers
from switchx.optim.protocol import Optimizer
from switchx.optim.schedules import Schedule
from switchx.partitioning.compiler_options import CompilerOptions
from switchx.partitioning.mesh import MeshSpec
from switchx.pipeline.schedule import ScheduleSpec
from switchx.training.distillation.soft_loss import Distillation
from switchx.training.losses import LossConfig
from switchx.training.offload.exclusions import exclusion_of
from switchx.training.offload.storage_spec import StorageSpec
from switchx.training.step import StepConfig
from switchx.training.telemetry.metric_writers import Writer, checked_writers
from switchx.training.telemetry.metrics import TOKEN_METRICS
from switchx.training.telemetry.routing_alarms import RoutingAlarms
from switchx.training.text_evaluation import TextEvaluation


@dataclasses.dataclass(frozen=True)
class InitConfig:
    """The items that a new run takes from `TrainingJob.init_from` (`training/initialize.py`).

    Attributes:
        step: the checkpoint's step; None is the newest complete one, "best" the one with the
            best score.
        rules: pairs of a regular expression and a replacement, as in T5X's `assignment_map`:
            the first that matches a parameter's whole path says from which path of the source
            it is taken; None draws it afresh.
        drop: regular expressions of paths of the source that may be left over; if a rule
            decides for a path, the source's parameter at that path may be left over, too.
        optimizer: whether the optimizer's state is taken too, counts included, so that
            schedules continue; otherwise it is fresh.
    """

    step: int | Literal["best"] | None = None
    rules: tuple[tuple[str, str | None], ...] = ()
    drop: tuple[str, ...] = ()
    optimizer: bool = False

    def __post_init__(self):
        require(
            self.step in (None, "best") or (type(self.step) is int and self.step >= 0),
            f"InitConfig.step={self.step!r}; use the number of a step, 'best', or None for the "
            "newest",
        )
        require_patterns("InitConfig.drop", self.drop)
        require_pairs("InitConfig.rules", self.rules, (str, type(None)))
        object.__setattr__(self, "rules", tuple(map(tuple, self.rules)))
        object.__setattr__(self, "drop", tuple(self.drop))


@dataclasses.dataclass(frozen=True)
class TrainingJob:
    """The model, data, optimizer and schedule of training, and what is written during it.

    Attributes:
        model: configuration of the model.
        source: the task or the mixture of tasks to learn.
        optimizer: optimizer of the parameters.
        schedule: learning rate by step.
        inputs_length, targets_length: tokens of a row, for the encoder and the decoder; a
            decoder-only model has rows of `inputs_length + targets_length`.
        packed: whether a row has several examples.
        train_steps: step at which training ends.
        batch_size: rows of the global batch, over all processes.
        seed: seed of the parameters, of dropout and jitter, and of the order of the data.
        log_every, eval_every, checkpoint_every: steps between lines of the metrics,
            evaluations and checkpoints.
        eval_batches: number of batches of each task in an evaluation; None is the whole split.
        eval_at_start: whether there is an evaluation before the first step.
        retention: policy for keeping checkpoints: the newest ones, and the best by validation.
        max_skipped_in_a_row: non-finite steps in a row after which training stops.
        loss: terms of the loss.
        step: settings of a step: microbatches, clipping, averages and rates by parameter.
        mesh: mesh of the devices.
        prefetch: batches that are made ahead of the step that reads them.
        init_from: run folder whose parameters training starts from (fine-tuning); read only at
            step 0.
        init: which checkpoint of `init_from` is read, and which parts of it.
        pipeline: schedule of the microbatches of `step` through the stages, where the mesh has
            an axis `pipe`.
        data_dir: folder of the corpora; None takes SWITCHX_DATA_DIR or, without it, the cache.
        compiler: XLA options of the steps.
        storage: storage of the experts.
        text_evaluation: settings for generating texts in evaluations, for the tasks' metrics;
            None generates none.
        metric_writers: writers of the metrics besides the run folder.
        alarms: conditions of the routing that raise an alarm; None raises none.
        distillation: the teacher that the model learns from besides the text; None for none.
        lora: low-rank adapters that are trained in place of the parameters, and the base that
            they are added to; None trains the parameters.
    """

    model: ModelConfig
    source: Task | Mixture
    optimizer: Optimizer
    schedule: Schedule
    loss: LossConfig
    inputs_length: int
    targets_length: int
    train_steps: int = at_resume()
    batch_size: int
    seed: int
    log_every: int = at_resume()
    eval_every: int = at_resume()
    checkpoint_every: int = at_resume()
    eval_batches: int | None = at_resume(20)
    eval_at_start: bool = at_resume(True)
    packed: bool = True
    retention: Retention = at_resume(Retention())
    max_skipped_in_a_row: int = at_resume(10)
    init_from: str | None = at_resume(None)
    init: InitConfig = at_resume(InitConfig())
    data_dir: str | None = at_resume(None)
    mesh: MeshSpec = at_resume(MeshSpec())
    step: StepConfig = StepConfig()
    pipeline: ScheduleSpec = at_resume(ScheduleSpec())
    prefetch: Prefetch = at_resume(Prefetch())
    compiler: CompilerOptions = at_resume(CompilerOptions())
    storage: StorageSpec = at_resume(StorageSpec())
    text_evaluation: TextEvaluation | None = at_resume(None)
    metric_writers: tuple[Writer, ...] = at_resume(())
    alarms: RoutingAlarms | None = at_resume(RoutingAlarms())
    distillation: Distillation | None = None
    lora: LoRASpec | None = None

    def __post_init__(self):
        object.__setattr__(self, "metric_writers", checked_writers(self.metric_writers))
        object.__setattr__(self, "model", with_suited_dispatcher(self.model, self.mesh))
        require_at_least(self, 1, "inputs_length", "targets_length", "batch_size", "log_every")
        require_at_least(self, 1, "eval_every", "checkpoint_every", "eval_batches")
        require_at_least(self, 1, "max_skipped_in_a_row")
        require(
            self.init_from is not None or self.init == InitConfig(),
            f"TrainingJob.init={self.init} without init_from: nothing would be taken; give "
            "INIT_FROM, or leave it out",
        )
        require_at_least(self, 0, "train_steps", "seed")
        require(self.seed < 2**32, f"TrainingJob.seed={self.seed}; use one below 2**32")
        if self.batch_size % self.step.num_microbatches:
            raise ValueError(
                f"batch_size={self.batch_size} is not divisible by num_microbatches="
                f"{self.step.num_microbatches}; use a multiple of it, or a number of "
                f"microbatches that divides {self.batch_size}"
            )
        switch, parts = self.model.switch, self.step.num_microbatches
        if switch is not None and switch.router.counts_first and parts > 1:
            require(
                self.mesh.pipe == 1 and self.storage.experts == "device",
                f"RouterConfig.balance_scope='batch' with num_microbatches={parts}, "
                f"MeshSpec.pipe={self.mesh.pipe} and StorageSpec.experts="
                f"{self.storage.experts!r}: the load of all is counted by a first forward pass "
                "of the whole model; use "
                "balance_load='previous_step' (an approximation), one microbatch, or "
                "balance_scope='group', which is exact under any split",
            )
        self._check_tasks()
        require(
            self.init_from is None
            or self.distillation is None
            or not self.distillation.starts_from_teacher,
            f"init_from={str(self.init_from)!r} with Distillation.starts_from_teacher=True: "
            "both say what the student begins with; use starts_from_teacher=False, or leave "
            "init_from out",
        )
        require(
            self.model.training_attention != "splash"
            or not _have_bidirectional_inputs(as_mixture(self.source).tasks),
            "ModelConfig.training_attention='splash' with a task whose inputs attend to all "
            "inputs: its mask is causal; use is_prefix_bidirectional=False of the objective, "
            "or training_attention='einsum' or 'auto'",
        )
        longest = max(self.sequence_lengths)
        if self.model.max_length is not None and longest > self.model.max_length:
            raise ValueError(
                f"rows of {longest} tokens do not fit the model's max_length="
                f"{self.model.max_length} positions; use shorter rows or a larger "
                "max_length"
            )

    def check_pipeline(self) -> None:
        """Raises ValueError if there is a schedule but there are no stages."""
        require(
            self.mesh.pipe > 1 or self.pipeline == ScheduleSpec(),
            f"TrainingJob.pipeline={self.pipeline} on a mesh of one stage: nothing would "
            "follow it; use MeshSpec.pipe above 1, or leave the schedule out",
        )

    def _check_tasks(self) -> None:
        if self.model.switch is None or self.model.switch.router.kind != "task":
            return
        mixture = as_mixture(self.source)
        tasks = self.model.switch.router.num_tasks
        require(
            mixture.rows is not None and len(mixture.tasks) == tasks,
            f"RouterConfig.kind='task' with num_tasks={tasks}, and a source of "
            f"{len(mixture.tasks)} tasks with rows={mixture.rows}; use a Mixture of {tasks} "
            "tasks with Mixture.rows, whose sum is the batch size",
        )

    @property
    def transformation(self) -> optax.GradientTransformationExtraArgs:
        """The optimizer with its schedule, and learning rates by pattern."""
        built = self.optimizer.build(self.schedule)
        return with_multipliers(built, self.step.rate_multipliers, self.model.scanned_period)

    def require_storage(self, sizes: Mapping[str, int]) -> None:
        """Checks that experts can be stored as `storage` says.

        Args:
            sizes: sizes of the mesh's axes, by name.

        Raises:
            ValueError: the experts cannot be there; the message says why, and the way out.
        """
        reason = self.storage_refusal(self.storage.experts, sizes)
        require(reason is None, reason)

    def storage_refusal(self, tier: str, sizes: Mapping[str, int]) -> str | None:
        """Why experts cannot be in a tier, with the way out; or None.

        Args:
            sizes: sizes of the mesh's axes, by name; an empty mapping gives the reasons that
                hold on every mesh.
        """
        if tier == "device":
            return None
        slots, bucket_bytes = self.storage.slots, self.step.bucket_bytes
        return exclusion_of(self, tier) or storage_refusal(
            self.model, tier, slots, sizes, bucket_bytes=bucket_bytes
        )

    @property
    def unused_storage(self) -> tuple[str, ...]:
        """Fields of `storage` that are set and have no effect there, as `name=value`.

        They are not an error: configs/storage/host.gin and what `switchx plan` writes are read
        after a file that may set them, and gin keeps what that one bound.
        """
        of_disk, default = ("host_bytes", "path", "policy"), StorageSpec()
        unused = {"disk": (), "host": of_disk, "device": ("slots", *of_disk)}
        values = {name: getattr(self.storage, name) for name in unused[self.storage.experts]}
        return tuple(
            f"StorageSpec.{name}={value!r}"
            for name, value in values.items()
            if value != getattr(default, name)
        )

    @property
    def vocabulary(self) -> Vocabulary:
        return as_mixture(self.source).tasks[0].vocabulary

    @property
    def features(self) -> Features:
        return self._features_of(as_mixture(self.source).tasks)

    def _features_of(self, tasks: Sequence[Task]) -> Features:
        if self.model.is_encoder_decoder:
            return EncoderDecoderFeatures(self.inputs_length, self.targets_length)
        is_causal = self.model.may_skip_scores and not _have_bidirectional_inputs(tasks)
        length = self.inputs_length + self.targets_length
        return DecoderOnlyFeatures(length, has_prefix=not is_causal)

    @property
    def batches(self) -> BatchConfig:
        return BatchConfig(self.features, self.batch_size, self.packed)

    @property
    def evaluated_batches(self) -> BatchConfig:
        """Batches of evaluations, whose tasks may have bidirectional inputs even if no task
        that is learnt has."""
        features = self._features_of(evaluated_tasks(self.source))
        return BatchConfig(features, self.batch_size, self.packed)

    def loader(self, shard: Shard) -> TrainLoader:
        """A process's part of the batches, from the first on."""
        return TrainLoader(
            self.source,
            self.batches,
            seed=self.seed,
            data_dir=self.data_dir,
            shard=shard,
            prefetch=self.prefetch,
        )

    @property
    def sequence_lengths(self) -> tuple[int, int]:
        """Encoder and decoder tokens of a row, as `flops.train_flops` counts them."""
        if self.model.is_encoder_decoder:
            return self.inputs_length, self.targets_length
        return 0, self.inputs_length + self.targets_length

    @property
    def sparse_lengths(self) -> list[int]:
        """Tokens of a row, in each stack that has Switch layers."""
        stacks = zip(("encoder", "decoder"), self.sequence_lengths, strict=True)
        return [length for stack, length in stacks if self.model.num_sparse_layers_of(stack)]

    def keeps_groups(self, num_microbatches: int) -> bool:
        """Whether this number of microbatches routes in the groups of the whole batch."""
        switch, lengths = self.model.switch, self.sparse_lengths
        return not lengths or (
            rows_of_groups(switch, self.batch_size, lengths, num_microbatches) is not None
        )

    def check_vocabulary(self) -> None:
        """Checks that the model has an embedding for every token id, and the decoder a start.

        Raises:
            ValueError: the embedding has too few rows, or a decoder after an encoder has no
                token to begin with.
        """
        if self.vocabulary.size > self.model.vocab_size:
            raise ValueError(
                f"the vocabulary has {self.vocabulary.size} ids, but the model's vocab_size is "
                f"{self.model.vocab_size}; use a vocab_size of at least "
                f"{self.vocabulary.size} (VOCAB_SIZE in the shipped configurations)"
            )
        require(
            self.vocabulary.start_id is not None or not self.model.is_encoder_decoder,
            "the vocabulary has no start_id, and the decoder of an encoder-decoder begins with "
            "a token; use ModelConfig.architecture='decoder_only', or another vocabulary",
        )

    @property
    def evaluated_metrics(self) -> tuple[str, ...]:
        """The metrics of an evaluation, by the names that `Retention.best_metric` takes."""
        of_tokens = (*TOKEN_METRICS, *(["dropped_fraction"] if self.sparse_lengths else []))
        tasks = evaluated_tasks(self.source)
        is_asked = self.text_evaluation is not None
        of_each = [f"tasks/{task.name}/{name}" for task in tasks for name in of_tokens]
        return (
            *of_tokens,
            *(of_each if len(tasks) > 1 else ()),
            *(self._metrics_of_texts if is_asked else ()),
        )

    @property
    def _metrics_of_texts(self) -> list[str]:
        return [
            f"{task.name}/{name}"
            for task in evaluated_tasks(self.source)
            for metric in task.metrics
            for name in metric.names
        ]

    def check_best_metric(self) -> None:
        """Checks that evaluations have the metric of the best checkpoint.

        Raises:
            ValueError: evaluations have no such metric; the message names their metrics.
        """
        best, known = self.retention.best_metric, self.evaluated_metrics
        way_out = (
            "it is one of texts, which are generated with TEXT_EVALUATION="
            "@text_evaluation.TextEvaluation()"
            if best in self._metrics_of_texts
            else "use one of them (BEST_METRIC in the shipped configurations)"
        )
        require(
            best in known,
            f"Retention.best_metric={best!r} is not among the metrics of this run's "
            f"evaluations: {', '.join(known)}; {way_out}",
        )


def require_job(job, name: str) -> None:
    """Raises ValueError if the function `switchx.NAME` was not given a `TrainingJob`."""
    require(
        isinstance(job, TrainingJob),
        f"switchx.{name} takes a TrainingJob, and got {job!r:.60}; "
        'switchx.job_from_gin("configs/runs/...") makes one of gin files',
    )


def with_suited_dispatcher(model: ModelConfig, mesh: MeshSpec) -> ModelConfig:
    """The model with the dispatcher that `auto` means on a mesh; itself if it names one."""
    if model.switch is None or model.switch.dispatcher != "auto":
        return model
    # `data` may have several devices where it takes the rest.
    several = types.SimpleNamespace(shape=mesh.sizes(2 * mesh.num_devices(1)))
    name = suited_dispatcher(model, several, mesh.rules)
    return dataclasses.replace(model, switch=model.switch.with_dispatcher(name))


def _have_bidirectional_inputs(tasks: Sequence[Task]) -> bool:
    return any(task.objective.is_prefix_bidirectional for task in tasks)
