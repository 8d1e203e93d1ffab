# SPDX-License-Identifier: Apache-2.0
"""Collectives of a step's dense weights: gathered where they are used, gradients summed.

Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054): slices of D over `fsdp` are gathered and their
gradients scattered (stage 3); what an optimizer keeps in slices over replicas has its gradients
scattered to them, and new parameters gathered (stage 1, `into_slices`).
Not modelled: a TPU's compiler reduces a gradient whole and then slices it if a slice is not a
multiple of a tile (8 by 128 of float32), as with Switch-C's 2,080 columns over 32 devices, or
if it combined the sum with that of a small array.
Dims: N layers, L tokens, E experts, D model, F feed-forward
"""

import dataclasses
import functools
import math

from switchx.hardware.spec import Compute
from switchx.partitioning.optimizer_slices import OptimizerSlice, optimizer_slice
from switchx.partitioning.rules import MeshAxes
from switchx.planner.layout import Layout, Workload, local_shape, own_rows_axes

GRADIENT = "gradient of "
TOKEN_TABLE, LOGITS_MATRIX = "embedding/embedding_VD", "embedding/w_logits_DV"
FLOAT32_BYTES = 4
# The target of a compiler that sends arrays as the program states it.
AS_WRITTEN = Compute(math.inf, 1.0, "no device")


@dataclasses.dataclass(frozen=True)
class StepCollective:
    """Equal collectives of one step.

    Attributes:
        kind: kind of the collective, as HLO names it.
        what: description of the arrays, for the user.
        axes: mesh axes of the collective.
        num_bytes: bytes of one collective on one device, where the array is whole.
        count: number of them in one step, on one device of an average stage.
        part: `layers`, `exchange` (of tokens and experts), `weights` (gathered ones and
            gradients), `embedding` or `pipeline`.
        terms: terms of one sum that CPU reduces one by one; elsewhere XLA adds them first.
        by_compiler: whether XLA inserts it because of a sharding; on CPU it has no
            reduce-scatter.
        forward: number out of `count` in the forward pass, without remat's recomputation.
        narrower: bytes of the gradient over bytes of the parameter, below 1 where gradients are
            summed in the dtype of products.
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
    narrower: float = 1.0

    @property
    def total_bytes(self) -> float:
        return self.num_bytes * self.count


def weight_collectives(
    workload: Workload, layout: Layout, compute: Compute
) -> list[StepCollective]:
    """Dense parameters: columns gathered where they are used, gradients summed."""
    batch, own_axes = layout.batch_axes, own_rows_axes(workload, layout)
    model, found = workload.model, []
    collective = functools.partial(StepCollective, part="weights")
    for array in workload.state:
        if array.kind != "params" or array.table == "expert_params":
            continue
        shape, split = local_shape(array, layout)
        stacked = array.shape[0] if array.dims.startswith("N") else 1
        one = math.prod(shape) // stacked * array.itemsize
        once, rounds = stacked, layout.num_microbatches
        if array.is_in_blocks:
            once, rounds = stacked / layout.pipe, layout.rounds
        uses = once * rounds
        gathered = tuple(axis for axis in split if axis in batch)
        what = array.name.rsplit("/", 1)[-1]
        gradient = f"gradient of {what}"
        # A block's products have the dtype that it computes in, and so do sums of them.
        is_computed = array.is_in_blocks and "router" not in what
        narrower = min(1, workload.activation_bytes / array.itemsize) if is_computed else 1
        if gathered and array.name != "embedding/positions_LD":  # looked up (`_embedding`)
            whole = one * layout.parts(gathered)
            # A scale or a bias is in no product; the router's products are in float32.
            is_operand = len(array.dims.removeprefix("N")) > 1 and "router" not in what
            share = min(1, compute.operand_bytes / array.itemsize) if is_operand else 1
            is_again = array.is_in_blocks and (model.remat != "none" or model.scan_layers)
            times = uses * ((layout.forwards if array.is_in_blocks else 1) + is_again)
            # The logits' matrix: `layers/embedding.summed_over_tokens`.
            by_compiler = array.name not in (TOKEN_TABLE, LOGITS_MATRIX)
            of_array = functools.partial(collective, by_compiler=by_compiler)
            found += [
                of_array("all-gather", what, gathered, whole * share, times, forward=uses),
                of_array("reduce-scatter", gradient, gathered, whole * narrower, uses),
            ]
        replicas = tuple(axis for axis in batch if axis not in split)
        # Terms of the token table's gradient: one for each lookup, and one for tied logits.
        is_table = array.name == TOKEN_TABLE
        terms = len(workload.stacks) + model.tie_embeddings if is_table else 1
        if is_table and layout.pipe > 1 and layout.is_ours:
            rounds, terms = rounds * terms, 1  # in separate conditionals: summed separately
        elif compute.sums_after_loops and not (is_table or gathered or model.scan_layers):
            rounds = 1
        # All stages have what is in no block; in other systems, only the tied table.
        is_shared = not array.is_in_blocks and (layout.is_ours or is_table)
        stages = ("pipe",) if layout.pipe > 1 and is_shared else ()
        found += gradient_sums(
            gradient, replicas, own_axes, one, once, rounds, terms, stages, narrower
        )
    return found


def gradient_sums(
    what: str,
    axes: MeshAxes,
    own: MeshAxes,
    num_bytes: float,
    once: float,
    rounds: float,
    terms: int = 1,
    stages: MeshAxes = (),
    narrower: float = 1,
) -> list[StepCollective]:
    """All-reduces of a parameter's gradients: some in every round, those over replicas once.

    Args:
        own: mesh axes that `own_rows_axes` returns; over them, gradients are summed once per
            step.
        once: number of such parameters on a device.
        rounds: number of times that they are used in a step.
        stages: axis of the stages that all have the parameter.
        narrower: bytes of a gradient over bytes of the parameter, in the sum of a round; the
            sum over `own` is in the parameter's dtype.
    """
    own, rest = (
        tuple(axis for axis in axes if (axis in own) is here) for here in (True, False)
    )
    summed = functools.partial(StepCollective, "all-reduce", what, num_bytes=num_bytes)
    of_round = summed(
        axes=rest,
        num_bytes=num_bytes * narrower,
        count=once * rounds,
        part="weights",
        terms=terms,
        narrower=narrower,
    )
    return [of_round, summed(axes=stages + own, count=once, part="weights")]


def into_slices(found: list, workload: Workload, layout: Layout) -> list:
    """A step's collectives with gradients scattered to slices, and new parameters gathered.

    Gradients are scattered once per step; if routing groups are on several replicas, in every
    microbatch, as the compiler does it.

    Args:
        found: collectives that `step_comm.step_collectives` returned, which name what they sum.
    """
    if not layout.has_optimizer_slices:
        return found
    shapes = _shapes(workload)
    own_rows, done = own_rows_axes(workload, layout), []
    for each in found:
        own = _slice_of(each, shapes, layout)
        axes = tuple(axis for axis in own.axes if axis in each.axes) if own else ()
        if axes:
            is_once = set(axes) <= set(own_rows)
            updates = each.count / (1 if is_once else layout.num_microbatches)
            scattered = dataclasses.replace(
                each, kind="reduce-scatter", axes=axes, by_compiler=not is_once
            )
            gathered = dataclasses.replace(
                each,
                kind="all-gather",
                what="new parameters",
                axes=axes,
                num_bytes=each.num_bytes / each.narrower,
                count=updates,
                terms=1,
            )
            done += [scattered, gathered]
            rest = tuple(axis for axis in each.axes if axis not in axes)
            part = each.num_bytes / layout.parts(axes)
            each = dataclasses.replace(each, axes=rest, num_bytes=part)
        done.append(each)
    return done


def _slice_of(each, shapes: dict, layout: Layout) -> OptimizerSlice | None:
    """The slices of the parameter whose gradient is summed; None for other collectives."""
    name = each.what.removeprefix(GRADIENT)
    is_sum = (each.kind, each.part) == ("all-reduce", "weights")
    if not is_sum or name == each.what or name not in shapes:
        return None
    return optimizer_slice(layout.rules, layout.stage, *shapes[name])


def _shapes(workload: Workload) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Letters and sizes by the names of gradients: `w_in_DF`, or for experts `w_EDF`."""
    shapes = {
        array.name.rsplit("/", 1)[-1]: (array.dims, array.shape)
        for array in workload.state
        if array.kind == "params"
    }
    model, switch = workload.model, workload.model.switch
    if switch is not None:
        sizes = {"E": switch.num_experts, "D": model.d_model, "F": switch.d_ff or model.d_ff}
        for dims in ("EDF", "EFD", "EF", "ED"):
            shapes[f"w_{dims}"] = dims, tuple(sizes[letter] for letter in dims)
    return shapes
