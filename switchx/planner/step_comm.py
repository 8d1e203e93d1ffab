# SPDX-License-Identifier: Apache-2.0
"""Which collectives a whole training step runs on a layout, and their bytes.

Dense layers as the compiler partitions them by the rules (Shoeybi et al. 2019,
arXiv:1909.08053, section 3, for `model`; Rajbhandari et al. 2020, arXiv:1910.02054, for
`fsdp`), sparse ones as `comm_cost` has them, a pipeline's as Chen et al. 2023 (Pipeline MoE,
arXiv:2304.11414), section 3.3.5. Dims: B L D H F V N
"""

import dataclasses
import math

from switchx.moe.config import DISPATCHERS
from switchx.partitioning.rules import MeshAxes
from switchx.planner.comm_cost import SparseLayer, sparse_layer_collectives
from switchx.planner.layout import Layout
from switchx.planner.model_cost import STACKS, StateArray, Workload

ID_BYTES = SUM_BYTES = 4
# Sums over the vocabulary that cross-entropy takes of each token: a maximum, a denominator,
# the target's logit.
SOFTMAX_SUMS = 3


@dataclasses.dataclass(frozen=True)
class StepCollective:
    """Equal collectives of one step.

    Attributes:
        kind: as HLO names it.
        what: what they move, for people.
        part: `layers`, `exchange` (of tokens and experts), `weights` (gathered ones and
            gradients), `embedding` or `pipeline`.
        axes: mesh axes that they go over.
        num_bytes: of one, on one device, where the array is whole.
        count: in one step, on one device of an average stage.
        terms: terms of one sum that CPU reduces each by itself; elsewhere XLA adds first.
        by_compiler: XLA makes it of a sharding; on CPU it has no reduce-scatter.
    """

    kind: str
    what: str
    part: str
    axes: MeshAxes
    num_bytes: float
    count: float
    terms: int = 1
    by_compiler: bool = False

    @property
    def total_bytes(self) -> float:
        return self.num_bytes * self.count


def step_collectives(workload: Workload, layout: Layout) -> list[StepCollective]:
    """Everything a step communicates, on one device, batches split into microbatches.

    Raises:
        ValueError: the layout does not divide a parameter, or a formula is missing.
    """
    found = []
    for stack in STACKS:
        if workload.length(stack):
            found += _attention(workload, layout, stack)
            found += _relative_bias(workload, layout, stack)
            found += _dense_ffn(workload, layout, stack)
            found += _sparse(workload, layout, stack)
    found += _embedding(workload, layout)
    found += _weights(workload, layout)
    found += _pipeline(workload, layout)
    return [each for each in found if each.axes and each.count and each.num_bytes]


def compiled_on_cpu(planned: list[StepCollective], layout: Layout) -> list[StepCollective]:
    """The same as XLA's CPU compiler has them.

    It reduces the terms of a sum one by one, scatters nothing that it reduces of its own
    accord (an all-reduce over all replicas, then a slice), and cannot send ragged rows.
    """
    batch = layout.rules.axes("B", layout, table="activations")

    def on_cpu(each: StepCollective) -> StepCollective:
        kind, axes, num_bytes = each.kind, each.axes, each.num_bytes
        if each.by_compiler and kind == "reduce-scatter":
            kind, axes = "all-reduce", batch
        if kind == "ragged-all-to-all":  # emulated, `partitioning.collectives`
            kind, num_bytes = "all-gather", num_bytes * layout.parts(axes)
        return dataclasses.replace(
            each,
            kind=kind,
            axes=axes,
            num_bytes=num_bytes,
            count=each.count * each.terms,
            terms=1,
        )

    return [on_cpu(each) for each in planned]


def local_shape(array: StateArray, layout: Layout) -> tuple[tuple[int, ...], MeshAxes]:
    """A state array's shape on one device, its stage's layers apart, and its axes.

    Raises:
        ValueError: the layout does not divide it.
    """
    if not array.dims:
        return array.shape, ()
    spec = layout.rules.spec(array.dims, array.shape, layout.stage, table=array.table)
    shape, used = [], []
    for size, entry in zip(array.shape, spec, strict=True):
        axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        shape.append(size // layout.parts(axes))
        used += axes
    return tuple(shape), tuple(used)


def rows_on_device(workload: Workload, layout: Layout) -> int:
    """Rows of one microbatch on one device."""
    batch = layout.rules.axes("B", layout, table="activations")
    return workload.batch_size // layout.num_microbatches // layout.parts(batch)


def activation_bytes(workload: Workload, layout: Layout, stack: str) -> int:
    """Bytes of `[B, L, D]` of one microbatch on one device."""
    tokens = rows_on_device(workload, layout) * workload.length(stack)
    return tokens * workload.model.d_model * workload.activation_bytes


def sparse_layer(workload: Workload, layout: Layout, stack: str) -> SparseLayer:
    """A Switch layer of a stack, of one microbatch."""
    rows = workload.batch_size // layout.num_microbatches
    groups, tokens, capacity = workload.routing(rows, workload.length(stack))
    return SparseLayer.of(
        workload.model,
        num_groups=groups,
        tokens_per_group=tokens,
        num_choices=workload.model.switch.router.num_selected,
        capacity=capacity,
        activation_bytes=workload.activation_bytes,
        param_bytes=workload.param_bytes,
    )


def _passes(workload: Workload, layout: Layout, layers: float) -> float:
    """How often something of every layer happens on one device in a step."""
    return layers * layout.num_microbatches / layout.pipe


def _attention(workload: Workload, layout: Layout, stack: str) -> list[StepCollective]:
    """After the heads a sum; before them the gradient's, of queries, keys and values."""
    axes = layout.rules.axes("H", layout, table="params")
    count = _passes(workload, layout, workload.num_layers(stack))
    again = 2 if workload.model.remat == "full" else 1
    own = activation_bytes(workload, layout, stack)
    found = [
        StepCollective("all-reduce", "attention outputs", "layers", axes, own, count * again),
        StepCollective(
            "all-reduce", "gradients of attention inputs", "layers", axes, own, count, 3
        ),
    ]
    if stack == "decoder" and workload.model.is_encoder_decoder:
        memory = activation_bytes(workload, layout, "encoder")
        found += [
            StepCollective(
                "all-reduce", "cross-attention outputs", "layers", axes, own, count * again
            ),
            StepCollective("all-reduce", "gradients of queries", "layers", axes, own, count),
            StepCollective(
                "all-reduce", "gradients of the memory", "layers", axes, memory, count, 2
            ),
        ]
    return found


def _relative_bias(workload: Workload, layout: Layout, stack: str) -> list[StepCollective]:
    """Its gradient `[H, L, L]`, summed over the batch before the buckets are."""
    if not workload.model.has_relative_bias:
        return []
    batch = layout.rules.axes("B", layout, table="activations")
    heads = workload.model.num_heads // layout.parts(
        layout.rules.axes("H", layout, table="params")
    )
    count = _passes(workload, layout, workload.num_layers(stack))
    values = heads * workload.length(stack) ** 2 * SUM_BYTES
    return [
        StepCollective(
            "all-reduce", "gradient of the relative bias", "weights", batch, values, count
        )
    ]


def _dense_ffn(workload: Workload, layout: Layout, stack: str) -> list[StepCollective]:
    model = workload.model
    axes = layout.rules.axes("F", layout, table="params")
    sparse = model.num_sparse_layers_of(stack) if model.switch and model.switch.has_ffn else 0
    dense = workload.num_layers(stack) - sparse
    if model.switch is not None and model.switch.shared_d_ff is not None:
        dense += sparse
    count = _passes(workload, layout, dense)
    own = activation_bytes(workload, layout, stack)
    terms = 2 if model.is_gated else 1
    return [
        StepCollective("all-reduce", "FFN outputs", "layers", axes, own, count),
        StepCollective(
            "all-reduce", "gradients of FFN inputs", "layers", axes, own, count, terms
        ),
    ]


def _sparse(workload: Workload, layout: Layout, stack: str) -> list[StepCollective]:
    """As `comm_cost` counts a layer; what remat computes again it communicates again."""
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
    planned = sparse_layer_collectives(dispatcher, layer, layout, layout.rules)
    count = _passes(workload, layout, layers)
    found = []
    for each in planned:
        is_weight = "w_" in each.what
        is_again = each.phase == "forward" and (
            model.remat != "none" or (is_weight and model.scan_layers)
        )
        # The layer's output is a term of a sum whose other term is kept: not needed again.
        is_again = is_again and each.what != "outputs"
        is_once = layout.pipe > 1 and is_weight and each.phase == "backward"
        times = count / layout.num_microbatches if is_once else count
        found.append(
            StepCollective(
                each.kind,
                each.what,
                "weights" if is_weight else "exchange",
                each.axes,
                each.num_bytes,
                times * (2 if is_again else 1),
            )
        )
    return found


def _embedding(workload: Workload, layout: Layout) -> list[StepCollective]:
    """Lookups and logits, where the table's rows or columns are on several devices."""
    model, steps = workload.model, layout.num_microbatches
    table = next(each for each in workload.state if each.name == "embedding/embedding_VD")
    spec = layout.rules.spec(table.dims, table.shape, layout, table="params")
    rows, columns = ((entry,) if isinstance(entry, str) else entry or () for entry in spec)
    found = []
    for stack in STACKS:
        tokens = rows_on_device(workload, layout) * workload.length(stack)
        values = tokens * model.d_model * table.itemsize
        found += [
            StepCollective("all-reduce", "looked up rows", "embedding", rows, values, steps),
            StepCollective(
                "all-gather", "token ids", "embedding", columns,
                tokens * ID_BYTES * layout.parts(columns), steps * 3, by_compiler=True,
            ),
            StepCollective(
                "all-to-all", "looked up columns", "embedding", columns, values,
                steps * (3 if model.positions == "learned" else 2), by_compiler=True,
            ),
        ]  # fmt: skip
    targets = rows_on_device(workload, layout) * workload.decoder_length
    values = targets * model.d_model * SUM_BYTES
    found += [
        StepCollective("all-reduce", "gradients of logits' inputs", "embedding", rows, values,
                       steps),
        StepCollective("all-reduce", "sums of softmax", "embedding", rows,
                       targets * SUM_BYTES, SOFTMAX_SUMS * steps),
    ]  # fmt: skip
    return found


def _weights(workload: Workload, layout: Layout) -> list[StepCollective]:
    """Dense parameters: columns gathered where they are used, gradients summed."""
    batch = layout.rules.axes("B", layout, table="activations")
    model, found = workload.model, []
    for array in workload.state:
        if array.kind != "params" or array.table == "expert_params":
            continue
        shape, split = local_shape(array, layout)
        stacked = array.shape[0] if array.dims.startswith("N") else 1
        one = math.prod(shape) // stacked * array.itemsize
        per_step = stacked / (layout.pipe if array.is_in_blocks else 1)
        # A pipeline adds gradients up before it communicates; a loop over microbatches not.
        reduced = per_step * (1 if layout.pipe > 1 else layout.num_microbatches)
        gathered = tuple(axis for axis in split if axis in batch)
        if gathered and array.name == "embedding/positions_LD":
            continue  # looked up by columns (`_embedding`), its gradient is whole there
        replicas = tuple(axis for axis in batch if axis not in split)
        terms = _uses(workload) if array.name == "embedding/embedding_VD" else 1
        what = array.name.rsplit("/", 1)[-1]
        if gathered:
            whole = one * layout.parts(gathered)
            is_again = array.is_in_blocks and (model.remat != "none" or model.scan_layers)
            times = per_step * layout.num_microbatches * (2 if is_again else 1)
            found += [
                StepCollective("all-gather", what, "weights", gathered, whole, times,
                               by_compiler=True),
                StepCollective("reduce-scatter", f"gradient of {what}", "weights", gathered,
                               whole, reduced, by_compiler=True),
            ]  # fmt: skip
        found.append(
            StepCollective("all-reduce", f"gradient of {what}", "weights", replicas, one,
                           reduced, terms)
        )  # fmt: skip
    return found


def _uses(workload: Workload) -> int:
    """Places that the token table's gradient comes from."""
    lookups = 2 if workload.model.is_encoder_decoder else 1
    return lookups + workload.model.tie_embeddings


def _pipeline(workload: Workload, layout: Layout) -> list[StepCollective]:
    """Activations to the next stage and gradients back; a tied table's two gradients."""
    if layout.pipe == 1:
        return []
    stacks = [stack for stack in STACKS if workload.length(stack)]
    values = sum(activation_bytes(workload, layout, stack) for stack in stacks)
    sends = layout.num_microbatches * (layout.pipe - 1) / layout.pipe
    found = [
        StepCollective("collective-permute", what, "pipeline", ("pipe",), values, sends)
        for what in ("activations to the next stage", "gradients to the last stage")
    ]
    table = next(each for each in workload.state if each.name == "embedding/embedding_VD")
    if workload.model.tie_embeddings:
        shape, _ = local_shape(table, layout)
        found.append(
            StepCollective("all-reduce", "gradient of the tied table", "pipeline", ("pipe",),
                           math.prod(shape) * table.itemsize, 1)
        )  # fmt: skip
    return found
