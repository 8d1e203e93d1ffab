# SPDX-License-Identifier: Apache-2.0
"""The collectives that a whole training step runs on a layout, and their bytes.

Dense layers as the compiler partitions them by the rules (Shoeybi et al. 2019,
arXiv:1909.08053, section 3, for `model`; Rajbhandari et al. 2020, arXiv:1910.02054, for
`fsdp`), sparse ones as in `sparse_comm`, a pipeline's as Chen et al. 2023 (Pipeline MoE,
arXiv:2304.11414), section 3.3.5.
Dims: B rows of a batch, L tokens of a row, D model, H heads, F feed-forward, V vocabulary,
N layers
"""

import dataclasses
import functools
import math

from switchx.moe.config import DISPATCHERS
from switchx.partitioning.optimizer_slices import optimizer_slice, with_slice
from switchx.partitioning.rules import MeshAxes
from switchx.planner.layout import Layout, StateArray, Workload, own_rows_axes
from switchx.planner.slice_comm import into_slices
from switchx.planner.sparse_comm import (
    SparseLayer,
    gather_forward_collectives,
    sparse_layer_collectives,
)

ID_BYTES = SUM_BYTES = 4
# Sums over the vocabulary that cross-entropy takes of each token: a maximum, a denominator,
# the target's logit.
SOFTMAX_SUMS = 3
TOKEN_TABLE = "embedding/embedding_VD"


@dataclasses.dataclass(frozen=True)
class StepCollective:
    """Equal collectives of one step.

    Attributes:
        kind: as HLO names it.
        what: what they move, for people.
        axes: mesh axes that they go over.
        num_bytes: of one, on one device, where the array is whole.
        count: in one step, on one device of an average stage.
        part: `layers`, `exchange` (of tokens and experts), `weights` (gathered ones and
            gradients), `embedding` or `pipeline`.
        terms: terms of one sum that CPU reduces one by one; elsewhere XLA adds them first.
        by_compiler: XLA makes it of a sharding; on CPU it has no reduce-scatter.
        forward: of `count`, those of a forward pass, without what remat runs again.
    """

    kind: str
    what: str
    axes: MeshAxes
    num_bytes: float
    count: float
    part: str
    terms: int = 1
    by_compiler: bool = False
    forward: float = 0.0

    @property
    def total_bytes(self) -> float:
        return self.num_bytes * self.count


def step_collectives(workload: Workload, layout: Layout) -> list[StepCollective]:
    """Everything a step communicates, on one device, batches split into microbatches.

    Raises:
        ValueError: the layout does not divide a parameter, or a formula is missing.
    """
    found = []
    for stack in workload.stacks:
        found += _attention(workload, layout, stack)
        found += _relative_bias(workload, layout, stack)
        found += _dense_ffn(workload, layout, stack)
        found += _sparse(workload, layout, stack)
    found += _embedding(workload, layout)
    found += _weights(workload, layout)
    found = _reduced_once(found, workload, layout) + _pipeline(workload, layout)
    found = into_slices(found, workload, layout)
    if (teacher := workload.taught_by) is not None:
        found += forward_collectives(teacher, layout.of_teacher(teacher))
    return [each for each in found if each.axes and each.count and each.num_bytes]


def forward_collectives(workload: Workload, layout: Layout) -> list[StepCollective]:
    """Those of a teacher's forward pass, whose Switch layers run by `gather`.

    Raises:
        ValueError: the layout does not divide a parameter, or a formula is missing.
    """
    found = _embedding(workload, layout) + _weights(workload, layout)
    for stack in workload.stacks:
        found += _attention(workload, layout, stack)
        found += _dense_ffn(workload, layout, stack)
        found += _gathered(workload, layout, stack)
    return [dataclasses.replace(each, count=each.forward) for each in found]


def compiled_on_cpu(planned: list[StepCollective], layout: Layout) -> list[StepCollective]:
    """The same collectives as XLA's CPU compiler has them.

    It reduces the terms of a sum one by one, makes an all-reduce over all replicas and a slice
    where others reduce-scatter, and has no ragged all-to-all.
    """

    def on_cpu(each: StepCollective) -> StepCollective:
        kind, axes, num_bytes = each.kind, each.axes, each.num_bytes
        if each.by_compiler and kind == "reduce-scatter":
            kind, axes = "all-reduce", layout.batch_axes
        if kind == "ragged-all-to-all":  # emulated, `partitioning/collectives.py`
            kind, num_bytes = "all-gather", num_bytes * layout.parts(axes)
        count = each.count * each.terms
        return dataclasses.replace(
            each, kind=kind, axes=axes, num_bytes=num_bytes, count=count, terms=1
        )

    return [on_cpu(each) for each in planned]


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
    split = [_axes_of(entry) for entry in spec]
    shape = tuple(n // layout.parts(a) for n, a in zip(array.shape, split, strict=True))
    return shape, tuple(axis for axes in split for axis in axes)


def rows_on_device(workload: Workload, layout: Layout) -> int:
    """Rows of one microbatch on one device."""
    return workload.batch_size // layout.num_microbatches // layout.parts(layout.batch_axes)


def activation_bytes(workload: Workload, layout: Layout, stack: str) -> int:
    """Bytes of `[B, L, D]` of one microbatch on one device."""
    tokens = rows_on_device(workload, layout) * workload.length(stack)
    return tokens * workload.model.d_model * workload.activation_bytes


def sparse_layer(workload: Workload, layout: Layout, stack: str) -> SparseLayer:
    """A Switch layer of a stack, of one microbatch."""
    model, switch = workload.model, workload.model.switch
    rows = workload.batch_size // layout.num_microbatches
    groups, tokens, capacity = workload.routing(rows, workload.length(stack))
    own = workload.task_slots(layout)
    replicated = switch.num_experts + switch.num_replicas if switch.num_replicas else None
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
        num_slots=own or replicated,
        is_local=own is not None,
    )


def _axes_of(entry) -> MeshAxes:
    """The axes of one entry of a `PartitionSpec`."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _reduced_once(
    found: list[StepCollective], workload: Workload, layout: Layout
) -> list[StepCollective]:
    """Gradients' sums of every microbatch as they are: over replicas once for all of them."""
    axes, done = own_rows_axes(workload, layout), []
    for each in found:
        once = tuple(axis for axis in each.axes if axis in axes)
        if (each.kind, each.part) == ("all-reduce", "weights") and once:
            rest = tuple(axis for axis in each.axes if axis not in once)
            done.append(dataclasses.replace(each, axes=rest))
            count = each.count / layout.num_microbatches
            each = dataclasses.replace(each, axes=once, count=count, terms=1)
        done.append(each)
    return done


def _passes(layout: Layout, layers: float) -> float:
    """How often something of each of the layers happens on one device in a step."""
    return layers * layout.num_microbatches / layout.pipe


def _attention(workload: Workload, layout: Layout, stack: str) -> list[StepCollective]:
    """A sum after the heads; before them the gradient's, of queries, keys and values."""
    axes = layout.rules.axes("H", layout, table="params")
    count = _passes(layout, workload.num_layers(stack))
    again = count * (2 if workload.model.remat == "full" else 1)
    own = activation_bytes(workload, layout, stack)

    def summed(what, num_bytes, times, terms=1, forward=0.0):
        return StepCollective(
            "all-reduce", what, axes, num_bytes, times, "layers", terms, forward=forward
        )

    found = [
        summed("attention outputs", own, again, forward=count),
        summed("gradients of attention inputs", own, count, terms=3),
    ]
    if stack == "decoder" and workload.model.is_encoder_decoder:
        memory = activation_bytes(workload, layout, "encoder")
        found += [
            summed("cross-attention outputs", own, again, forward=count),
            summed("gradients of queries", own, count),
            summed("gradients of the memory", memory, count, terms=2),
        ]
    return found


def _relative_bias(workload: Workload, layout: Layout, stack: str) -> list[StepCollective]:
    """The bias' gradient `[H, L, L]`, summed over the batch before it is over buckets."""
    if not workload.model.has_relative_bias:
        return []
    heads = workload.model.num_heads // layout.parts_of("H")
    count = _passes(layout, workload.num_layers(stack))
    num_bytes = heads * workload.length(stack) ** 2 * SUM_BYTES
    what, own = "gradient of the relative bias", own_rows_axes(workload, layout)
    axes = tuple(axis for axis in layout.batch_axes if axis not in own)
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
    gradients, terms = "gradients of FFN inputs", 2 if model.is_gated else 1
    return [
        StepCollective("all-reduce", "FFN outputs", axes, own, count, "layers", forward=count),
        StepCollective("all-reduce", gradients, axes, own, count, "layers", terms),
    ]


def _sparse(workload: Workload, layout: Layout, stack: str) -> list[StepCollective]:
    """Those of `sparse_comm`; what remat computes again it communicates again."""
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
    layer = sparse_layer(workload, layout, stack)
    count = _passes(layout, layers)
    found = []
    for each in sparse_layer_collectives(dispatcher, layer, layout, layout.rules):
        is_weight = "w_" in each.what
        is_again = each.phase == "forward" and (
            model.remat != "none" or (is_weight and model.scan_layers)
        )
        # The layer's output is a term of a sum whose other term is kept: not needed again.
        is_again = is_again and each.what != "outputs"
        part, times = "weights" if is_weight else "exchange", count * (2 if is_again else 1)
        found.append(
            StepCollective(each.kind, each.what, each.axes, each.num_bytes, times, part)
        )
    return found


def _gathered(workload: Workload, layout: Layout, stack: str) -> list[StepCollective]:
    """Switch layers of a forward pass by `gather`."""
    layers = workload.model.num_sparse_layers_of(stack)
    if not layers:
        return []
    count, layer = _passes(layout, layers), sparse_layer(workload, layout, stack)
    return [
        StepCollective(
            each.kind, each.what, each.axes, each.num_bytes, count,
            "weights" if "w_" in each.what else "exchange", forward=count,
        )
        for each in gather_forward_collectives(layer, layout, layout.rules)
    ]  # fmt: skip


def _embedding(workload: Workload, layout: Layout) -> list[StepCollective]:
    """Lookups and logits, where the table's rows or columns are on several devices."""
    model, steps = workload.model, layout.num_microbatches
    table = _token_table(workload)
    rows, columns = map(
        _axes_of, layout.rules.spec(table.dims, table.shape, layout, table="params")
    )
    found = []
    collective = functools.partial(StepCollective, part="embedding")
    for stack in workload.stacks:
        tokens = rows_on_device(workload, layout) * workload.length(stack)
        values = tokens * model.d_model * table.itemsize
        ids = tokens * ID_BYTES * layout.parts(columns)
        forward = (2 if model.positions == "learned" else 1) * steps
        columns_moved = functools.partial(collective, "all-to-all", "looked up columns")
        found += [
            collective("all-reduce", "looked up rows", rows, values, steps, forward=steps),
            collective("all-gather", "token ids", columns, ids, forward, forward=forward),
            columns_moved(columns, values, forward + steps, forward=forward),
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


def _weights(workload: Workload, layout: Layout) -> list[StepCollective]:
    """Dense parameters: columns gathered where they are used, gradients summed."""
    batch = layout.batch_axes
    model, found = workload.model, []
    collective = functools.partial(StepCollective, part="weights")
    for array in workload.state:
        if array.kind != "params" or array.table == "expert_params":
            continue
        shape, split = local_shape(array, layout)
        stacked = array.shape[0] if array.dims.startswith("N") else 1
        one = math.prod(shape) // stacked * array.itemsize
        uses = stacked * layout.num_microbatches / (layout.pipe if array.is_in_blocks else 1)
        gathered = tuple(axis for axis in split if axis in batch)
        what = array.name.rsplit("/", 1)[-1]
        gradient = f"gradient of {what}"
        if gathered and array.name != "embedding/positions_LD":  # looked up (`_embedding`)
            whole = one * layout.parts(gathered)
            is_again = array.is_in_blocks and (model.remat != "none" or model.scan_layers)
            times = uses * (2 if is_again else 1)
            compiled = functools.partial(collective, by_compiler=True)
            found += [
                compiled("all-gather", what, gathered, whole, times, forward=uses),
                compiled("reduce-scatter", gradient, gathered, whole, uses),
            ]
        replicas = tuple(axis for axis in batch if axis not in split)
        # Of the token table's gradient, the lookups', and that of tied logits.
        is_table = array.name == TOKEN_TABLE
        terms = len(workload.stacks) + model.tie_embeddings if is_table else 1
        found.append(collective("all-reduce", gradient, replicas, one, uses, terms=terms))
    return found


def _token_table(workload: Workload) -> StateArray:
    return next(each for each in workload.state if each.name == TOKEN_TABLE)


def _pipeline(workload: Workload, layout: Layout) -> list[StepCollective]:
    """Activations to the next stage and gradients back; a tied table's two gradients."""
    if layout.pipe == 1:
        return []
    values = sum(activation_bytes(workload, layout, stack) for stack in workload.stacks)
    sends = layout.num_microbatches * (layout.pipe - 1) / layout.pipe
    collective = functools.partial(StepCollective, part="pipeline", axes=("pipe",))
    found = [
        collective("collective-permute", what, num_bytes=values, count=sends)
        for what in ("activations to the next stage", "gradients to the last stage")
    ]
    outputs = activation_bytes(workload, layout, "decoder")
    found += [
        collective(kind, what, num_bytes=outputs, count=layout.num_microbatches)
        for kind, what in (
            ("reduce-scatter", "outputs to all stages, for their part of the logits"),
            ("all-gather", "gradients of the outputs"),
        )
    ]
    if workload.model.tie_embeddings:
        table = _token_table(workload)
        num_bytes = math.prod(local_shape(table, layout)[0]) * table.itemsize
        what = "gradient of the tied table"
        found.append(collective("all-reduce", what, num_bytes=num_bytes, count=1))
    return found
