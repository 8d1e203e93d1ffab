# SPDX-License-Identifier: Apache-2.0
"""Sums of gradients where the optimizer's state is in slices over replicas (ZeRO-1).

Rajbhandari et al. 2020 (arXiv:1910.02054), section 5.1, as `partitioning/optimizer_slices.py`
does it. Dims: E experts, D model, F feed-forward
"""

import dataclasses

from switchx.partitioning.optimizer_slices import OptimizerSlice, optimizer_slice
from switchx.planner.layout import Layout, Workload, own_rows_axes

GRADIENT = "gradient of "


def into_slices(found: list, workload: Workload, layout: Layout) -> list:
    """A step's collectives with gradients scattered to slices, and new parameters gathered.

    Scattered once a step; where routing groups are on several replicas, in every microbatch, as
    the compiler has it.

    Args:
        found: of `step_comm.step_collectives`, which name what they sum.
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
    """The slices of the parameter whose gradient is summed; None of all else."""
    name = each.what.removeprefix(GRADIENT)
    is_sum = (each.kind, each.part) == ("all-reduce", "weights")
    if not is_sum or name == each.what or name not in shapes:
        return None
    return optimizer_slice(layout.rules, layout.stage, *shapes[name])


def _shapes(workload: Workload) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Letters and sizes by the names that gradients have: `w_in_DF`; of experts `w_EDF`."""
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
