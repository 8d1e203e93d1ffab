# SPDX-License-Identifier: Apache-2.0
"""Bytes of one device's memory in a training step.

Parameters, gradients and the optimizer's state are counted array by array; activations by
what the backward pass keeps under each remat policy (Korthikanti et al. 2022,
arXiv:2205.05198, section 4, counts them likewise); a pipeline keeps the inputs of the
microbatches in flight (Chen et al. 2023, arXiv:2304.11414, section 3.3.5).
Dims: B rows of a batch, L tokens of a row, M tokens that attention reads, D model, H heads,
K head size, F feed-forward, V vocabulary, E experts, C slots of an expert
"""

import dataclasses
import functools
import math

from switchx.models.config import FLASH_ATTENTION
from switchx.planner.layout import Layout, StateArray, Workload, local_bytes
from switchx.planner.sparse_comm import bank_collectives
from switchx.planner.step_comm import activation_bytes, rows_on_device, sparse_layer

LOGIT_BYTES = 4
# Arrays of V that are alive at once: logits of the tokens read at a time, and their gradient.
LOGIT_COPIES = 2
# A teacher's logits, its probabilities, and the student's at their temperature.
TEACHER_LOGIT_COPIES = 3
# Arrays `[tokens, F]` that the derivative of an activation function keeps besides the values
# before and after it, as counted in programs compiled without remat. Relu has a mask.
# Those of gelu_exact and geglu_exact were not counted, and are taken from the tanh form.
ACTIVATION_RESIDUALS = dict(relu=0, gelu=5, geglu=5, swiglu=2, gelu_exact=5, geglu_exact=5)


@dataclasses.dataclass(frozen=True)
class MemoryUse:
    """Bytes on one device of the stage that needs the most memory.

    Attributes:
        gradients: bytes of gradients, twice the parameters' if microbatches are accumulated.
        activations: activations kept from forward to backward, of all microbatches in flight.
        working: buffers of the block being computed, including its Switch layer's.
        logits: logits of the tokens that the loss reads at a time, and their gradient.
        gathered: parameters gathered whole if devices keep slices, copies of the slices in
            the products' dtype, and experts on their way to the slots of a bank and in them.
        slots: experts from other tiers (storage_tiers.py) while they are on the device.
        teacher: a teacher's parameters and logits, and what a block of its forward pass needs
            beyond `working`.
    """

    params: float
    gradients: float
    optimizer: float
    activations: float
    working: float
    logits: float
    gathered: float
    slots: float = 0.0
    teacher: float = 0.0

    @property
    def state(self) -> float:
        """The training state: what stays from step to step, without a teacher."""
        return self.params + self.optimizer

    @property
    def total(self) -> float:
        return sum(dataclasses.astuple(self))


def memory_use(workload: Workload, layout: Layout) -> MemoryUse:
    """Predicts a step's memory on the fullest device.

    Raises:
        ValueError: the layout does not divide a parameter.
    """
    params = state_bytes(workload, layout, "params")
    stacks = workload.stacks
    kept = sum(_kept(workload, layout, stack) * workload.num_layers(stack) for stack in stacks)
    if layout.pipe > 1:
        # A tick takes one microbatch through a stage, which keeps the inputs of the others.
        kept /= layout.pipe
        for number, stack in zip(in_flight(layout, len(stacks)), stacks, strict=True):
            # A decoder's message includes the encoder's output.
            parts = stacks if stack == "decoder" else (stack,)
            kept += number * sum(activation_bytes(workload, layout, each) for each in parts)
    working = max(_block(workload, layout, stack, "none") for stack in stacks)
    # Values and their gradients; for unrolled blocks that are not recomputed, the values are
    # among those that are kept.
    model = workload.model
    working *= 2 if model.scan_layers or model.remat != "none" or layout.pipe > 1 else 1
    # Each stage has a share of the targets.
    length = math.ceil(workload.decoder_length / layout.pipe)
    targets = rows_on_device(workload, layout) * length
    if not workload.has_whole_logits:
        targets /= workload.model.num_logit_parts(math.ceil(targets))
    logits = targets * workload.model.vocab_size / vocabulary_parts(workload, layout)
    return MemoryUse(
        params=params,
        gradients=params * (2 if layout.num_microbatches > 1 else 1),
        optimizer=state_bytes(workload, layout, "optimizer"),
        activations=kept,
        working=working,
        logits=LOGIT_COPIES * LOGIT_BYTES * logits,
        gathered=sum(part(workload, layout) for part in (_gathered, _rounded, _copies)),
        teacher=_teacher(workload, layout, working),
    )


def _teacher(workload: Workload, layout: Layout, working: float) -> float:
    """Bytes of a teacher that reads a microbatch beside the model; 0 without one.

    Args:
        working: bytes that the model's blocks work in. They are computed at a different time
            than the teacher's, so only what the teacher's blocks need beyond that counts.
    """
    if (teacher := workload.taught_by) is None:
        return 0.0
    layout = layout.of_teacher(teacher)
    targets = rows_on_device(teacher, layout) * teacher.decoder_length
    logits = targets * teacher.model.vocab_size / vocabulary_parts(teacher, layout)
    block = max(_block(teacher, layout, stack, "none") for stack in teacher.stacks)
    return (
        state_bytes(teacher, layout, "params")
        + max(0.0, block - working)
        + TEACHER_LOGIT_COPIES * LOGIT_BYTES * logits
        + _gathered(teacher, layout)
    )


@functools.cache
def in_flight(layout: Layout, num_stacks: int = 1) -> tuple[int, ...]:
    """The number of microbatches whose inputs a stage keeps, per stack, by the schedule."""
    schedule = layout.schedule.build(layout.pipe, layout.num_microbatches, num_stacks)
    return schedule.num_slots


def state_bytes(workload: Workload, layout: Layout, kind: str) -> float:
    """Bytes of the parameters (`params`) or of the optimizer's state on one device.

    In a pipeline they are the bytes on the first stage: its share of the blocks, and all arrays
    that are in no block.
    """
    arrays = (array for array in workload.state if array.kind == kind)
    return sum(_stage_bytes(array, layout) for array in arrays)


def updated_bytes(workload: Workload, layout: Layout) -> float:
    """Bytes of the parameters that one device updates: its slices, if there are any."""
    arrays = (array for array in workload.state if array.kind == "params")
    return sum(
        _stage_bytes(dataclasses.replace(array, param=(array.dims, array.shape)), layout)
        for array in arrays
    )


def _stage_bytes(array: StateArray, layout: Layout) -> float:
    return local_bytes(array, layout) / (layout.pipe if array.is_in_blocks else 1)


def _kept(workload: Workload, layout: Layout, stack: str) -> float:
    """Bytes that a block keeps for its backward pass, the mean over dense and sparse ones."""
    model = workload.model
    kept = _block(workload, layout, stack, model.remat)
    if model.remat == "none":
        sparse = model.num_sparse_layers_of(stack) / workload.num_layers(stack)
        tokens = rows_on_device(workload, layout) * workload.length(stack)
        hidden = tokens * _dense_d_ff(workload, layout, sparse)
        if sparse:
            slots = _slot_rows(workload, layout, stack)
            hidden += sparse * slots * _expert_d_ff(workload, layout)
        kept += ACTIVATION_RESIDUALS[model.activation] * hidden * workload.activation_bytes
    return kept


def _block(workload: Workload, layout: Layout, stack: str, remat: str) -> float:
    """Bytes of a block's values that a backward pass reads, under a remat policy."""
    model, width = workload.model, workload.activation_bytes
    rows, length = rows_on_device(workload, layout), workload.length(stack)
    tokens = rows * length
    if remat == "full":
        return tokens * model.d_model * width
    layers = workload.num_layers(stack)
    sparse = model.num_sparse_layers_of(stack) / layers
    elements = rows * _attention(workload, layout, length, length, remat)
    if stack == "decoder" and model.is_encoder_decoder:
        elements += rows * _attention(workload, layout, length, workload.encoder_length, remat)
    # A dense FFN keeps residual, norm and hidden values.
    hidden = (2 if model.is_gated else 1) + (1 if remat == "none" else 0)
    whole = 2 * model.d_model if remat == "none" else model.d_model
    dense_d_ff = _dense_d_ff(workload, layout, sparse)
    elements += tokens * ((1 - sparse) * whole + hidden * dense_d_ff)
    if sparse:
        # A Switch layer keeps its slots' inputs, hidden values and outputs, and probabilities.
        per_row = 2 * model.d_model + hidden * _expert_d_ff(workload, layout)
        probabilities = tokens * model.switch.num_experts * 4 / width
        slots = _slot_rows(workload, layout, stack)
        elements += sparse * (slots * per_row + probabilities)
    dropout = 0.0
    if remat == "none" and model.dropout_rate:
        dropout = tokens * (2 * model.d_model + model.d_ff / layout.parts_of("F"))
    return elements * width + dropout


def _attention(
    workload: Workload, layout: Layout, length: int, memory_length: int, remat: str
) -> float:
    """Elements that a row keeps for one attention: residual, norm, q, weights and output at its
    tokens, k and v at those that are read.

    Flash attention keeps no weights.
    """
    model, heads = workload.model, layout.parts_of("H")
    # Queries and keys are also kept before their norms.
    again = remat == "none" and model.qk_norm != "none"
    queries = (2 + again) * model.num_heads / heads * model.d_head
    keys = (2 + again) * layout.kv_heads(model) * model.d_head
    is_flash = model.training_attention in FLASH_ATTENTION
    weights = 0 if is_flash else model.num_heads * memory_length / heads
    whole = 2 * model.d_model if remat == "none" else model.d_model
    return length * (whole + queries + weights) + memory_length * keys


def _slot_rows(workload: Workload, layout: Layout, stack: str) -> float:
    """Rows that a device's experts have memory for in one layer: slots, or every choice."""
    layer = sparse_layer(workload, layout, stack)
    groups = layer.num_groups / layout.parts_of("G", "activations")
    if layout.has_equal_blocks:
        slots = layer if layer.is_local else layer.over_slots
        return groups * slots.num_experts * layer.capacity
    return groups * layer.tokens_per_group * layer.num_choices


def _dense_d_ff(workload: Workload, layout: Layout, sparse: float) -> float:
    """F of what every token passes through on one device: dense FFNs, and shared experts of
    Switch layers, which are the share `sparse` of the blocks."""
    model = workload.model
    shared = (model.switch and model.switch.shared_d_ff) or 0
    return ((1 - sparse) * model.d_ff + sparse * shared) / layout.parts_of("F")


def _expert_d_ff(workload: Workload, layout: Layout) -> float:
    """F of an expert on one device."""
    d_ff = workload.model.switch.d_ff or workload.model.d_ff
    return d_ff / layout.parts_of("F", "expert_params")


def vocabulary_parts(workload: Workload, layout: Layout) -> int:
    """The number of parts that the logits' V is split into: 1 if it does not divide."""
    parts = layout.parts_of("V")
    return parts if workload.model.vocab_size % parts == 0 else 1


def _gathered(workload: Workload, layout: Layout) -> float:
    """Bytes of whole parameters if devices keep slices; under scan or remat, of only a few."""
    total = largest = 0.0
    for array in workload.state:
        axes = layout.rules.axes("D", layout, table=array.table)
        if array.kind == "params" and "D" in array.dims and axes:
            stacked = array.shape[0] if array.dims.startswith("N") else 1
            whole = local_bytes(array, layout) * layout.parts(axes)
            total += whole / (layout.pipe if array.is_in_blocks else 1)
            largest = max(largest, whole / stacked)
    model = workload.model
    if not (model.scan_layers or model.remat != "none"):
        return total
    # The largest array, the one that is gathered ahead, and its gradient.
    return min(total, 3 * largest)


# How many times what a layer sends, and its slots, a compiled step of a v5e holds at once: on
# the way there and, as gradients, back.
_SENT_AT_ONCE, _SLOTS_AT_ONCE = 3, 4


def _copies(workload: Workload, layout: Layout) -> float:
    """Bytes of the slots for copies, or for experts of a device's tasks.

    They are kept for the backward pass in the products' dtype; one layer's are in transit.
    """
    kept = on_their_way = 0.0
    for stack in workload.stacks:
        layers = workload.model.num_sparse_layers_of(stack) / layout.pipe
        layer = layers and sparse_layer(workload, layout, stack)
        travelling = bank_collectives(layer, layout, layout.rules) if layers else []
        sent, slots = (
            sum(each.num_bytes for each in travelling if each.phase == phase)
            for phase in ("forward", "backward")
        )
        kept += layers * slots * workload.activation_bytes / workload.param_bytes
        on_their_way = max(on_their_way, _SENT_AT_ONCE * sent + _SLOTS_AT_ONCE * slots)
    return kept + on_their_way


def _rounded(workload: Workload, layout: Layout) -> float:
    """Bytes of the copies in the products' dtype that a loop over blocks has of their slices.

    The compiler makes them for all blocks at once, which it may because copies travel and not
    parameters (`DEFAULT_OPTIONS` of partitioning/compiler_options.py).
    """
    if not (workload.model.scan_layers and layout.rules.has_slices_of_weights(layout)):
        return 0.0
    return sum(
        _stage_bytes(array, layout) * workload.activation_bytes / array.itemsize
        for array in workload.state
        if array.kind == "params"
        and array.is_in_blocks
        and array.itemsize > workload.activation_bytes
    )
