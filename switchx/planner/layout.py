# SPDX-License-Identifier: Apache-2.0
"""The planner's input: a training step, and a layout of it over devices.

A `Workload` is a job's step as shapes and bytes (`training/program.py` makes it), a `Layout` is
a mesh with its dispatcher and microbatches.
Dims: G groups, T tokens of a group, C slots of an expert and group; E experts, D model, F ffn
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp

from switchx.fields import require_at_least
from switchx.models.config import ModelConfig
from switchx.moe.dispatcher_traits import DISPATCHERS
from switchx.partitioning.mesh import AXES, named_axes
from switchx.partitioning.optimizer_slices import optimizer_slice, with_slice
from switchx.partitioning.replicas import replica_axes
from switchx.partitioning.rules import (
    OPTIMIZER_SLICES,
    SLICED_RULES,
    SPREAD_RULES,
    MeshAxes,
    Rules,
    param_table,
)
from switchx.pipeline.schedule import ScheduleSpec

STACKS = ("encoder", "decoder")


@dataclasses.dataclass(frozen=True)
class StateArray:
    """One array of the training state.

    Attributes:
        name: name such as `decoder/blocks/1/ffn/w_in_EDF`; a statistic has its parameter's
            name.
        dims: dimension letters of the array; `""` if it is whole on every device.
        itemsize: bytes of an element; one half for int4.
        param: dimension letters and shape of the parameter that a statistic with letters
            belongs to; None otherwise.
    """

    name: str
    dims: str
    shape: tuple[int, ...]
    itemsize: float
    kind: Literal["params", "optimizer"]
    param: tuple[str, tuple[int, ...]] | None = None

    @property
    def table(self) -> str:
        """The table of the rules that says how the array is split."""
        return param_table(self.dims)

    @property
    def is_in_blocks(self) -> bool:
        """Whether it belongs to a block, so that one stage of a pipeline has it."""
        return "/blocks/" in f"/{self.name}"


@dataclasses.dataclass(frozen=True)
class Workload:
    """A training step.

    Attributes:
        encoder_length, decoder_length: number of tokens of a row; `encoder_length` is 0 in a
            decoder-only model.
        batch_size: number of rows of the global batch.
        state: parameters and optimizer state.
        routing: function `(rows, length)` that returns (G, T, C) of a Switch layer in training.
        refusal: function `(layout, G, T)` that returns why the layout's dispatcher cannot run
            there, or None.
        task_slots: function of a layout that returns the slots of all devices for the experts
            of their rows' tasks; None if tokens travel, or experts are not divided among
            tasks.
        teacher: workload of a teacher that only runs a forward pass on the same rows: its
            parameters, no optimizer, the capacity of evaluation; None without a teacher.
        imbalance: function of the number of devices that the experts are split over; it returns
            the largest load of a device over the mean, from measured loads
            (`moe/copy_placement.measured_imbalance`), or 1.
        has_whole_logits: whether the loss reads the logits of all tokens at once, as a
            student's does, and not a part at a time (`ModelConfig.num_logit_parts`).
        writes_texts: whether evaluations generate texts, on the step's mesh.
    """

    model: ModelConfig
    encoder_length: int
    decoder_length: int
    batch_size: int
    state: tuple[StateArray, ...]
    routing: Callable[[int, int], tuple[int, int, int]]
    refusal: Callable[..., str | None]
    task_slots: Callable[["Layout"], int | None] = lambda layout: None
    teacher: "Workload | None" = None
    imbalance: Callable[[int], float] = lambda parts: 1.0
    has_whole_logits: bool = False
    writes_texts: bool = False

    def uneven(self, layout: "Layout") -> float:
        """The work of the busiest device's experts over the mean, if blocks are as large as
        the rows that are sent; 1 if all experts have blocks of equally many rows."""
        if layout.dispatcher is None or layout.has_equal_blocks:
            return 1.0
        return self.imbalance(layout.parts_of("E", "expert_params"))

    @property
    def taught_by(self) -> "Workload | None":
        """`teacher`, with this batch's rows."""
        if self.teacher is None:
            return None
        return dataclasses.replace(self.teacher, batch_size=self.batch_size)

    @property
    def tokens(self) -> int:
        """Number of tokens of a batch, over the rows of both stacks."""
        return self.batch_size * (self.encoder_length + self.decoder_length)

    @property
    def stacks(self) -> tuple[str, ...]:
        """The model's stacks, the encoder first."""
        return STACKS if self.model.is_encoder_decoder else ("decoder",)

    def length(self, stack: str) -> int:
        """Number of tokens of a row in a stack; 0 if the model has no such stack."""
        return self.encoder_length if stack == "encoder" else self.decoder_length

    def num_layers(self, stack: str) -> int:
        """Number of blocks of a stack."""
        return getattr(self.model, f"num_{stack}_layers")

    @functools.cached_property
    def activation_bytes(self) -> int:
        """Bytes of one element of the activations."""
        return jnp.dtype(self.model.precision.compute).itemsize

    @functools.cached_property
    def param_bytes(self) -> int:
        """Bytes of one element of the parameters."""
        return jnp.dtype(self.model.precision.params).itemsize


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh, and the options of the step that runs on it.

    Attributes:
        dispatcher: dispatcher of the Switch layers; None for a dense model.
        num_microbatches: number of parts of a batch that run one after another.
        is_spread: whether experts are also split over `fsdp` (`SPREAD_RULES`).
        has_optimizer_slices: whether the optimizer state is sliced over `data` (ZeRO-1).
        schedule: schedule of the pipeline's stages.
        is_ours: whether steps run as switchx runs them: all stages compute in every tick, with
            or without an op of their own, and compute once more before the backward pass
            (`pipeline/staged.py`); remat leaves out products that XLA finds unused. False is
            for another system, whose stages wait and keep what they need, and whose remat runs
            a whole layer again.
    """

    pipe: int = 1
    data: int = 1
    fsdp: int = 1
    node: int = 1
    expert: int = 1
    model: int = 1
    dispatcher: str | None = None
    num_microbatches: int = 1
    is_spread: bool = False
    has_optimizer_slices: bool = False
    schedule: ScheduleSpec = ScheduleSpec()
    is_ours: bool = True

    def __post_init__(self):
        require_at_least(self, 1, *AXES, "num_microbatches")

    @functools.cached_property
    def shape(self) -> dict[str, int]:
        """Sizes by axis, as a mesh has them."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def stage(self) -> "Layout":
        """The layout of one stage of the pipeline."""
        return dataclasses.replace(self, pipe=1)

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(self.shape.values())

    @functools.cached_property
    def rules(self) -> Rules:
        """Whole experts on `model` if the dispatcher slices; `SPREAD_RULES`; or Switch's."""
        is_sliced = self.dispatcher is not None and DISPATCHERS[self.dispatcher].is_sliced
        rules = SPREAD_RULES if self.is_spread else SLICED_RULES if is_sliced else Rules()
        if not self.has_optimizer_slices:
            return rules
        return dataclasses.replace(rules, optimizer_slices=OPTIMIZER_SLICES)

    def of_teacher(self, teacher: Workload) -> "Layout":
        """The layout of a teacher on the same mesh: its Switch layers run by its dispatcher."""
        if teacher.model.switch is None or DISPATCHERS[self.dispatcher or "gather"].is_sliced:
            return self
        is_split = self.node * self.expert > 1
        name = "gather" if is_split else teacher.model.switch.dispatcher
        return dataclasses.replace(self, dispatcher=name)

    @property
    def rounds(self) -> float:
        """The number of times that a device runs its layers in a step, bubbles included."""
        M, chunks = self.num_microbatches, self.schedule.num_chunks
        is_in_ticks = self.pipe > 1 and self.is_ours
        return M + (self.pipe - 1) / chunks if is_in_ticks else M

    @property
    def forwards(self) -> int:
        """Number of forward passes per round, without remat: a stage keeps only its inputs."""
        return 2 if self.pipe > 1 and self.is_ours else 1

    @property
    def has_equal_blocks(self) -> bool:
        """Whether every expert computes a block of equally many rows, full or empty."""
        return self.dispatcher is not None and DISPATCHERS[self.dispatcher].has_equal_blocks

    def parts(self, axes: MeshAxes) -> int:
        """The number of devices along `axes` together."""
        return math.prod(self.shape[axis] for axis in axes)

    def parts_of(self, letter: str, table: str = "params") -> int:
        """The number of parts that a dimension is split into."""
        return self.parts(self.rules.axes(letter, self, table=table))

    def has_whole_kv_heads(self, model: ModelConfig) -> bool:
        """Whether each device projects all keys and values, whose heads do not divide."""
        return model.kv_heads % self.parts_of("H") != 0

    def kv_heads(self, model: ModelConfig) -> int:
        """Number of key and value heads on one device: all if the axis does not divide them."""
        parts = 1 if self.has_whole_kv_heads(model) else self.parts_of("H")
        return model.kv_heads // parts

    @property
    def batch_axes(self) -> MeshAxes:
        """The axes whose devices have different rows."""
        return self.rules.axes("B", self, table="activations")

    def group(self, axes: MeshAxes) -> tuple[int, ...]:
        """Numbers of the devices that communicate with device 0 over `axes`."""
        strides, stride = {}, 1
        for axis in reversed(AXES):
            strides[axis] = stride
            stride *= self.shape[axis]
        steps = (range(0, self.shape[a] * strides[a], strides[a]) for a in axes)
        return tuple(sorted(map(sum, itertools.product(*steps))))

    @property
    def name(self) -> str:
        """`data=2 expert=4 all_to_all`: axes of more than one device, and the dispatcher."""
        words = [named_axes(self.shape) or "data=1", self.dispatcher]
        words += ["spread"] if self.is_spread else []
        words += ["zero1"] if self.has_optimizer_slices else []
        if self.num_microbatches > 1:
            words.append(f"microbatches={self.num_microbatches}")
        return " ".join(filter(None, words))


def own_rows_axes(workload: Workload, layout: Layout) -> MeshAxes:
    """The axes of replicas, over which microbatches' gradients are summed once per step.

    () for one microbatch without slices of the optimizer's state, and if routing groups are
    on several replicas.
    """
    axes = replica_axes(layout, layout.rules)
    if layout.num_microbatches * layout.pipe == 1 and not layout.has_optimizer_slices:
        return ()
    rows, parts = workload.batch_size // layout.num_microbatches, layout.parts(axes)
    for stack in workload.stacks if workload.model.switch is not None else ():
        length = workload.length(stack)
        (G, T, _), own = workload.routing(rows, length), workload.routing(rows // parts, length)
        is_whole = (own[0] * parts, own[1]) == (G, T) and rows * length == G * T
        if workload.model.num_sparse_layers_of(stack) and not is_whole:
            return ()
    return axes


def local_shape(array: StateArray, layout: Layout) -> tuple[tuple[int, ...], MeshAxes]:
    """A state array's shape on one device, with all of its stage's layers, and its axes.

    Raises:
        ValueError: the layout does not divide it.
    """
    if not array.dims:
        return array.shape, ()
    spec = layout.rules.spec(array.dims, array.shape, layout.stage, table=array.table)
    if array.param is not None:
        own = optimizer_slice(layout.rules, layout.stage, *array.param)
        spec = with_slice(spec, array.dims, own)
    split = [axes_of(entry) for entry in spec]
    shape = tuple(n // layout.parts(a) for n, a in zip(array.shape, split, strict=True))
    return shape, tuple(axis for axes in split for axis in axes)


def local_bytes(array: StateArray, layout: Layout) -> float:
    """A state array's bytes on one device, with all of its stage's layers.

    Raises:
        ValueError: the layout does not divide it.
    """
    return math.prod(local_shape(array, layout)[0]) * array.itemsize


def axes_of(entry) -> MeshAxes:
    """The axes of one entry of a `PartitionSpec`."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())
