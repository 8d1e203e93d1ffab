# SPDX-License-Identifier: Apache-2.0
"""Optimizer state in slices over replicas; parameters are whole (ZeRO-1).

Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054), section 5.1. `Rules.optimizer_slices` names
the axes. Gradients are reduce-scattered to the slices, each device computes the update of its
own, and new parameters are gathered: on a ring, as many bytes as one all-reduce of gradients.

A parameter is sliced along its first dimension that no axis splits yet and that divides; if
there is none, along the first one whose parts divide. Stacks (N, P) are not cut: a loop over
layers goes through them. What divides nowhere stays whole. A statistic is cut along the same
letter, and is whole if it does not have it.
"""

import dataclasses
import math

import jax
from jax.sharding import PartitionSpec

from switchx import tree
from switchx.partitioning.constrain import constrain_params, current_rules, num_devices
from switchx.partitioning.rules import MeshAxes, Rules, param_dims, param_spec, param_table

# Lanes of a TPU's vectors.
LANES = 128


@dataclasses.dataclass(frozen=True)
class OptimizerSlice:
    """The slices of a parameter: dimension `letter`, cut along `axes` within its own parts."""

    letter: str
    axes: MeshAxes


def optimizer_slice(rules: Rules, mesh, dims: str, shape) -> OptimizerSlice | None:
    """The slices of what an optimizer keeps for a parameter; None if it stays whole.

    Args:
        dims: the parameter's letters, such as `NEDF`.
        mesh: a mesh, or anything with a `shape` like one's.

    Raises:
        ValueError: the parameter's own axes do not divide it.
    """
    spec = rules.spec(dims, shape, mesh, table=param_table(dims))
    own = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
    used = {axis for axes in own for axis in axes}
    axes = tuple(a for a in rules.slice_axes(mesh) if a not in used)
    parts = math.prod(mesh.shape[axis] for axis in axes)
    if parts == 1:
        return None
    divided = [
        (bool(axes_of), place)
        for place, (letter, size, axes_of) in enumerate(zip(dims, shape, own, strict=True))
        if letter not in "NP"
        and size % (parts * math.prod(mesh.shape[axis] for axis in axes_of)) == 0
    ]
    return OptimizerSlice(dims[min(divided)[1]], axes) if divided else None


def optimizer_slices(rules: Rules, mesh, params) -> dict[str, OptimizerSlice | None]:
    """The slices of all parameters, arrays or shape structs, by their paths."""
    return {
        name: optimizer_slice(rules, mesh, param_dims(name, leaf.shape), leaf.shape)
        for name, leaf in tree.named_leaves(params).items()
    }


def whole_notes(rules: Rules, mesh, params) -> tuple[str, ...]:
    """Notes about parameters that no axis divides; () if all are sliced."""
    axes, leaves = rules.slice_axes(mesh), tree.named_leaves(params)
    slices = optimizer_slices(rules, mesh, params)
    sizes = {name: math.prod(leaves[name].shape) for name, own in slices.items() if own is None}
    if not axes or not sizes:
        return ()
    largest = max(sizes, key=sizes.get)
    return (
        f"what the optimizer keeps of {len(sizes)} of {len(slices)} parameters "
        f"({sum(sizes.values()):,} elements) is not sliced over {'*'.join(axes)}: no dimension "
        f"divides; the largest is {largest} {leaves[largest].shape}",
    )


def with_slice(spec: PartitionSpec, dims: str, own: OptimizerSlice | None) -> PartitionSpec:
    """The partition of an array that is cut into slices if it has their letter."""
    if own is None or not own.axes or own.letter not in dims:
        return spec
    entries, place = list(spec), dims.index(own.letter)
    taken = entries[place]
    taken = (taken,) if isinstance(taken, str) else tuple(taken or ())
    axes = taken + own.axes
    entries[place] = axes if len(axes) > 1 else axes[0]
    return PartitionSpec(*entries)


def slice_spec(rules: Rules, mesh, name: str, shape) -> PartitionSpec:
    """The partition of a parameter's gradient, of which an optimizer updates a slice."""
    dims = param_dims(name, shape)
    own = optimizer_slice(rules, mesh, dims, shape)
    return with_slice(param_spec(rules, mesh, name, shape), dims, own)


def has_slices() -> bool:
    """Whether the rules in use slice an optimizer's state on the mesh in use."""
    return bool(_slice_axes())


def into_slices(params):
    """Parameters, or gradients of them, of which each device has the slices that it updates."""
    if not has_slices():
        return params
    mesh, rules = jax.sharding.get_abstract_mesh(), current_rules()

    def split(name, x):
        spec = slice_spec(rules, mesh, name, x.shape)
        return jax.lax.with_sharding_constraint(x, spec)

    return tree.map_named(split, params)


def out_of_slices(params):
    """The parameters gathered from the slices, split as the rules say and no further."""
    return constrain_params(params) if has_slices() else params


def is_scattered(axes: MeshAxes) -> bool:
    """Whether `scattered_sums` sums gradients over the replicas along `axes`."""
    return bool(set(_slice_axes()) & set(axes))


def scattered_sums(stacked, axes: MeshAxes):
    """Sums of the devices' gradients along `axes`, of which each device receives its slice.

    One reduce-scatter per parameter, inside of a `shard_map` over all axes of the mesh: if some
    are left to the compiler, it gathers what these split before it reduces.

    Args:
        stacked: gradients `[R, ...]` by the parameters' names, one of each device along `axes`.
    """
    mesh, rules = jax.sharding.get_abstract_mesh(), current_rules()

    def of_leaf(name, leaf):
        shape, dims = leaf.shape[1:], param_dims(name, leaf.shape[1:])
        own = optimizer_slice(rules, mesh, dims, shape)
        if own is not None:
            own = OptimizerSlice(own.letter, tuple(a for a in own.axes if a in axes))
        spec = param_spec(rules, mesh, name, shape)
        return dims, own, PartitionSpec(axes, *spec), with_slice(spec, dims, own)

    leaves, structure = jax.tree.flatten(stacked)
    names = tree.named_leaves(stacked)
    found = [of_leaf(name, leaf) for name, leaf in names.items()]

    def local(leaves):
        sums = []
        for leaf, (dims, own, *_) in zip(leaves, found, strict=True):
            gradient, scattered = leaf[0], ()
            if own is not None and own.axes:
                scattered = own.axes
                gradient = _scattered(gradient, dims.index(own.letter), scattered)
            rest = tuple(axis for axis in axes if axis not in scattered)
            sums.append(jax.lax.psum(gradient, rest))
        return sums

    sums = jax.shard_map(
        local,
        in_specs=([spec for *_, spec, _ in found],),
        out_specs=[spec for *_, spec in found],
        check_vma=False,
    )(leaves)
    return jax.tree.unflatten(structure, sums)


def _scattered(gradient, place: int, axes: MeshAxes):
    """The device's slice, along dimension `place`, of the sum of gradients along `axes`.

    It is computed on rows of `LANES`, the rows of each device one after another: the TPU
    compiler turns a reduce-scatter into an all-reduce and a slice along the last dimension,
    beside one of size 1 and, if arrays are large, along any dimension but the first.
    """
    shape, parts = gradient.shape, jax.lax.axis_size(axes)
    leading, one = math.prod(shape[:place]), math.prod(shape[place:]) // parts
    if leading * one % LANES:
        return jax.lax.psum_scatter(gradient, axes, scatter_dimension=place, tiled=True)
    rows = gradient.reshape(leading, parts, one).swapaxes(0, 1).reshape(-1, LANES)
    rows = jax.lax.psum_scatter(rows, axes, scatter_dimension=0, tiled=True)
    return rows.reshape(*shape[:place], shape[place] // parts, *shape[place + 1 :])


def _slice_axes() -> MeshAxes:
    """The axes of slices of the mesh in use."""
    if num_devices() == 1 or current_rules() is None:
        return ()
    return current_rules().slice_axes(jax.sharding.get_abstract_mesh())
