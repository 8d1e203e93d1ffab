# SPDX-License-Identifier: Apache-2.0
"""The collectives that a whole training step runs on a layout, and their bytes.

Dense layers are counted as the compiler partitions them by the rules (Shoeybi et al. 2019,
arXiv:1909.08053, section 3, for `model`; Rajbhandari et al. 2020, arXiv:1910.02054, for
`fsdp`), sparse ones as in `sparse_comm`, a pipeline as in Chen et al. 2023 (Pipeline MoE,
arXiv:2304.11414), section 3.3.5.
Dims: B rows of a batch, L tokens of a row, D model, H heads, F feed-forward, V vocabulary,
N layers
"""

import dataclasses
import functools
import math

from switchx.hardware.spec import Compute
from switchx.moe.dispatcher_traits import DISPATCHERS
from switchx.pipeline.chunks import moved_share
from switchx.planner.layout import (
    Layout,
    StateArray,
    Workload,
    axes_of,
    local_bytes,
    own_rows_axes,
)
from switchx.planner.sparse_comm import (
    SparseLayer,
    gather_forward_collectives,
    sparse_layer_collectives,
)
from switchx.planner.weight_comm import (
    AS_WRITTEN,
    FLOAT32_BYTES,
    TOKEN_TABLE,
    StepCollective,
    gradient_sums,
    into_slices,
    weight_collectives,
)

ID_BYTES = SUM_BYTES = 4
# Reductions over the vocabulary per token in cross-entropy: a maximum, a denominator, the
# target's logit.
SOFTMAX_SUMS = 3


def step_collectives(
    workload: Workload, layout: Layout, compute: Compute = AS_WRITTEN
) -> list[StepCollective]:
    """Everything that one device communicates in a step, with batches split into microbatches.

    Args:
        compute: compute rates of the target device.

    Raises:
        ValueError: the layout does not divide a parameter, or a formula is missing.
    """
    found = []
    for stack in workload.stacks:
        found += _attention(workload, layout, stack)
        found += _relative_bias(workload, layout, stack)
        found += _dense_ffn(workload, layout, stack)
        found += _sparse(workload, layout, stack, compute)
    found += _embedding(workload, layout)
    found += weight_collectives(workload, layout, compute)
    found += _pipeline(workload, layout)
    found = into_slices(found, workload, layout)
    if (teacher := workload.taught_by) is not None:
        found += forward_collectives(teacher, layout.of_teacher(teacher), compute)
    return [each for each in found if each.axes and each.count and each.num_bytes]


def forward_collectives(
    workload: Workload, layout: Layout, compute: Compute = AS_WRITTEN
) -> list[StepCollective]:
    """Collectives of a teacher's forward pass, whose Switch layers run by `gather`.

    Args:
        compute: compute rates of the target device.

    Raises:
        ValueError: the layout does not divide a parameter, or a formula is missing.
    """
    found = _embedding(workload, layout) + weight_collectives(workload, layout, compute)
    for stack in workload.stacks:
        found += _attention(workload, layout, stack)
        found += _dense_ffn(workload, layout, stack)
        found += _gathered(workload, layout, stack)
    return [dataclasses.replace(each, count=each.forward) for each in found]


def rows_on_device(workload: Workload, layout: Layout) -> int:
    """Rows of one microbatch on one device."""
    return workload.batch_size // layout.num_microbatches // layout.parts(layout.batch_axes)


def activation_bytes(workload: Workload, layout: Layout, stack: str) -> int:
    """Bytes of one microbatch's `[B, L, D]` on one device."""
    tokens = rows_on_device(workload, layout) * workload.length(stack)
    return tokens * workload.model.d_model * workload.activation_bytes


def sparse_layer(workload: Workload, layout: Layout, stack: str) -> SparseLayer:
    """A Switch layer of a stack, for one microbatch."""
    model, switch = workload.model, workload.model.switch
    rows = workload.batch_size // layout.num_microbatches
    groups, tokens, capacity = workload.routing(rows, workload.length(stack))
    own = workload.task_slots(layout)
    with_copies = switch.num_experts + switch.num_replicas if switch.num_replicas else None
    return SparseLayer(
        num_groups=groups,
        tokens_per_group=tokens,
        num_choices=switch.router.num_selected,
        capacity=capacity,
        num_experts=switch.num_experts,
        d_model=model.d_model,
        d_ff=switch.d_ff or model.d_ff,
        is_gated=model.is_gated,
        has_bias=switch.expert_bias,
        activation_bytes=workload.activation_bytes,
        param_bytes=workload.param_bytes,
        num_slots=own or with_copies,
        is_local=own is not None,
    )


def _passes(layout: Layout, layers: float) -> float:
    """The number of passes through all of these layers on one device in a step."""
    return layers * layout.rounds / layout.pipe


def _attention(workload: Workload, layout: Layout, stack: str) -> list[StepCollective]:
    """A sum after the heads; before them, one of the gradients by queries, keys and values.

    If each device projects all keys and values, the gradients of these are summed instead.
    """
    model = workload.model
    axes = layout.rules.axes("H", layout, table="params")
    count = _passes(layout, workload.num_layers(stack))
    again = count * (layout.forwards + (model.remat == "full"))
    own = activation_bytes(workload, layout, stack)

    def summed(what, num_bytes, times, terms=1, forward=0.0):
        return StepCollective(
            "all-reduce", what, axes, num_bytes, times, "layers", terms, forward=forward
        )

    def keys_and_values(num_bytes):
        """Gradients of keys and values, which devices have for the heads their queries read."""
        num_bytes *= 2 * model.kv_heads * model.d_head / model.d_model
        heads = math.gcd(model.kv_heads, layout.parts_of("H"))
        what = "gradients of keys and values"
        found = [summed(what, num_bytes / heads, count)]
        if heads > 1:
            found += [StepCollective("all-gather", what, axes, num_bytes, count, "layers")]
        return found

    is_whole = layout.has_whole_kv_heads(model)
    terms = 1 if is_whole else 3
    found = [
        summed("attention outputs", own, again, forward=count),
        summed("gradients of attention inputs", own, count, terms=terms),
        *(keys_and_values(own) if is_whole else ()),
    ]
    if stack == "decoder" and model.is_encoder_decoder:
        memory = activation_bytes(workload, layout, "encoder")
        found += [
            summed("cross-attention outputs", own, again, forward=count),
            summed("gradients of queries", own, count),
        ]
        if is_whole:
            found += keys_and_values(memory)
        else:
            found += [summed("gradients of the memory", memory, count, terms=2)]
    return found


def _relative_bias(workload: Workload, layout: Layout, stack: str) -> list[StepCollective]:
    """The bias's gradient `[H, L, L]`, summed over the batch before it is over buckets."""
    if not workload.model.has_relative_bias:
        return []
    heads = workload.model.num_heads // layout.parts_of("H")
    num_bytes = heads * workload.length(stack) ** 2 * SUM_BYTES
    what, own = "gradient of the relative bias", own_rows_axes(workload, layout)
    axes = tuple(axis for axis in layout.batch_axes if axis not in own)
    count = _passes(layout, workload.num_layers(stack))
    return [StepCollective("all-reduce", what, axes, num_bytes, count, "weights")]


def _dense_ffn(workload: Workload, layout: Layout, stack: str) -> list[StepCollective]:
    """One sum forward and one backward, as after attention; shared experts are dense FFNs."""
    model = workload.model
    axes = layout.rules.axes("F", layout, table="params")
    sparse = model.num_sparse_layers_of(stack) if model.switch and model.switch.has_ffn else 0
    dense = workload.num_layers(stack) - sparse
    if model.switch is not None and model.switch.shared_d_ff is not None:
        dense += sparse
    count = _passes(layout, dense)
    own = activation_bytes(workload, layout, stack)
    summed = functools.partial(StepCollective, "all-reduce", axes=axes, num_bytes=own)
    gradients, terms = "gradients of FFN inputs", 2 if model.is_gated else 1
    # The sum of which it is a term is kept: remat does not need it again.
    times = count * layout.forwards
    return [
        summed("FFN outputs", count=times, part="layers", forward=count),
        summed(gradients, count=count, part="layers", terms=terms),
    ]


def _sparse(
    workload: Workload, layout: Layout, stack: str, compute: Compute
) -> list[StepCollective]:
    """Collectives of the Switch layers (`sparse_comm`), remat's recomputation included."""
    model = workload.model
    layers = model.num_sparse_layers_of(stack)
    if not layers:
        return []
    if model.switch.has_attention:
        raise ValueError(
            f"SwitchConfig.sublayers={model.switch.sublayers!r}: what experts in attention "
            "communicate is left to the compiler and has no formula; plan sublayers='ffn'"
        )
    dispatcher = layout.dispatcher
    if DISPATCHERS[dispatcher].is_automatic and layout.node == layout.expert == 1:
        dispatcher = "dropless"  # all experts are on every device: only weights travel
    layer, own_axes = sparse_layer(workload, layout, stack), own_rows_axes(workload, layout)
    count, found = _passes(layout, layers), []
    # Kernels, which multiply blocks of unequal sizes, read the model's compute dtype.
    operand_bytes = compute.operand_bytes
    if not DISPATCHERS[dispatcher].has_equal_blocks and operand_bytes < FLOAT32_BYTES:
        operand_bytes = workload.activation_bytes
    for each in sparse_layer_collectives(dispatcher, layer, layout, layout.rules):
        is_weight = "w_" in each.what
        is_again = each.phase == "forward" and (
            model.remat != "none" or (is_weight and model.scan_layers)
        )
        # The layer's output is a term of a sum whose other term is kept, so not needed again.
        is_again = is_again and each.what != "outputs"
        times = 1 if each.phase == "backward" else layout.forwards + is_again
        if is_weight and each.kind == "all-reduce":
            times = layers / layout.pipe, layout.rounds
            found += gradient_sums(each.what, each.axes, own_axes, each.num_bytes, *times)
            continue
        part = "weights" if is_weight else "exchange"
        own = workload.param_bytes if is_weight else workload.activation_bytes
        share = min(1, operand_bytes / own) if each.is_operand else 1
        same = functools.partial(
            StepCollective,
            axes=each.axes,
            num_bytes=each.num_bytes * share,
            count=count * times,
        )
        found.append(same(each.kind, each.what, part=part))
        if each.kind == "reduce-scatter" and not is_weight:  # other layers need it whole
            found.append(same("all-gather", f"whole {each.what}", part=part))
    return found


def _gathered(workload: Workload, layout: Layout, stack: str) -> list[StepCollective]:
    """Switch layers of a forward pass by `gather`."""
    layers = workload.model.num_sparse_layers_of(stack)
    if not layers:
        return []
    count, layer = _passes(layout, layers), sparse_layer(workload, layout, stack)
    return [
        StepCollective(
            each.kind,
            each.what,
            each.axes,
            each.num_bytes,
            count,
            "weights" if "w_" in each.what else "exchange",
            forward=count,
        )
        for each in gather_forward_collectives(layer, layout, layout.rules)
    ]


def _embedding(workload: Workload, layout: Layout) -> list[StepCollective]:
    """Lookups and logits, if the table's rows or columns are on several devices."""
    model, steps = workload.model, layout.num_microbatches
    table = _token_table(workload)
    rows, columns = map(
        axes_of, layout.rules.spec(table.dims, table.shape, layout, table="params")
    )
    found = []
    collective = functools.partial(StepCollective, part="embedding")
    for stack in workload.stacks:
        tokens = rows_on_device(workload, layout) * workload.length(stack)
        values = tokens * model.d_model * table.itemsize
        ids = tokens * ID_BYTES * layout.parts(columns)
        forward = (2 if model.positions == "learned" else 1) * steps
        again = forward * layout.forwards
        columns_moved = functools.partial(collective, "all-to-all", "looked up columns")
        found += [
            collective(
                "all-reduce",
                "looked up rows",
                rows,
                values,
                steps * layout.forwards,
                forward=steps,
            ),
            collective("all-gather", "token ids", columns, ids, again, forward=forward),
            columns_moved(columns, values, again + steps, forward=forward),
        ]
    targets = rows_on_device(workload, layout) * workload.decoder_length * SUM_BYTES
    inputs = targets * model.d_model
    return found + [
        collective("all-reduce", "gradients of logits' inputs", rows, inputs, steps),
        collective(
            "all-reduce",
            "sums of softmax",
            rows,
            targets,
            SOFTMAX_SUMS * steps,
            forward=SOFTMAX_SUMS * steps,
        ),
    ]


def _token_table(workload: Workload) -> StateArray:
    return next(each for each in workload.state if each.name == TOKEN_TABLE)


def _pipeline(workload: Workload, layout: Layout) -> list[StepCollective]:
    """Activations to the next stage and gradients back; outputs to all, for the logits."""
    if layout.pipe == 1:
        return []
    values = sum(activation_bytes(workload, layout, stack) for stack in workload.stacks)
    sends = layout.num_microbatches * (layout.pipe - 1) / layout.pipe
    if layout.is_ours:
        sends = layout.schedule.num_ticks(
            layout.pipe, layout.num_microbatches, len(workload.stacks)
        )
        if workload.model.is_encoder_decoder:  # its decoder's messages include the memory
            values += activation_bytes(workload, layout, "encoder")
    collective = functools.partial(StepCollective, part="pipeline", axes=("pipe",))
    blocks = sum(
        local_bytes(array, layout) / layout.pipe
        for array in workload.state
        if array.kind == "params" and array.is_in_blocks
    )
    moved = blocks * moved_share(layout.pipe, layout.schedule.num_chunks)
    outputs, rounds = activation_bytes(workload, layout, "decoder"), layout.num_microbatches
    found = (
        ("collective-permute", "chunks of blocks to their stages", moved, 1),
        ("collective-permute", "gradients of chunks back", moved, 1),
        ("collective-permute", "activations to the next stage", values, sends),
        ("collective-permute", "gradients to the last stage", values, sends),
        ("reduce-scatter", "outputs to all stages, for their logits", outputs, rounds),
        ("all-gather", "gradients of the outputs", outputs, rounds),
    )
    return [
        collective(kind, what, num_bytes=num_bytes, count=count)
        for kind, what, num_bytes, count in found
    ]
