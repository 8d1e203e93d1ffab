# SPDX-License-Identifier: Apache-2.0
"""Parameters of stacked layers in host memory, and their slices on the device.

A `HostStack` takes the place of a parameter's array, in a tree or in a module, and tells the
scan over layers (`host_ring.py`) to take its slices from where it is. The type of an array
has its memory space: `jax.typeof(array).memory_space`. On CPU a program has these types too,
and one memory. Dims: N layers
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from switchx.partitioning.collectives import vary
from switchx.partitioning.constrain import current_rules, num_devices, open_axes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HostStack:
    """One parameter of all layers, in place of its array `[N, ...]`.

    Its gradient is another `HostStack`: `value` has the gradients, `squares` the sum of their
    squares in float32, added up slice by slice on the device.

    Attributes:
        value: `[N, ...]`, where it is typed to be (`jax.typeof(value).memory_space`).
        squares: 0.
        total: gradients `[N, ...]` of earlier microbatches, to which those of this one are
            added, in place; None if there are none.
        dims: dimension letters, such as `NEDF`.
        slots: layers of it on the device at once.
    """

    value: jax.Array
    squares: jax.Array
    total: jax.Array | None = None
    dims: str = dataclasses.field(default="", metadata={"static": True})
    slots: int = dataclasses.field(default=2, metadata={"static": True})

    @classmethod
    def of(cls, value, dims: str, slots: int) -> "HostStack":
        """The stack of a parameter's array."""
        return cls(value, jnp.zeros((), jnp.float32), dims=dims, slots=slots)


def is_host_stack(leaf) -> bool:
    return isinstance(leaf, HostStack)


def host_stacks(tree) -> list[HostStack]:
    """The `HostStack`s among the leaves of a tree, or of a module."""
    return [
        leaf for leaf in jax.tree.leaves(tree, is_leaf=is_host_stack) if is_host_stack(leaf)
    ]


# Gradients of several microbatches: those in host memory are added up by the ring, in place.


def with_totals(params, gradients):
    """The parameters, with gradients in host memory to be added to these of other microbatches.

    Args:
        gradients: gradients of the other microbatches, of the same structure as `params`.
    """

    def attach(leaf, gradient):
        if not is_host_stack(leaf):
            return leaf
        return dataclasses.replace(leaf, total=jax.lax.stop_gradient(gradient.value))

    return jax.tree.map(attach, params, gradients, is_leaf=is_host_stack)


def add_gradients(totals, gradients):
    """The sum of gradients; those of parameters `with_totals` already contain the others."""

    def add(total, gradient):
        if is_host_stack(gradient):
            return dataclasses.replace(gradient, total=None)
        return total + gradient

    return jax.tree.map(add, totals, gradients, is_leaf=is_host_stack)


def zero_gradients(params):
    """Gradients of zero, each where its parameter is."""

    def zeros(leaf):
        if not is_host_stack(leaf):
            return jnp.zeros(leaf.shape, leaf.dtype)
        return dataclasses.replace(leaf, value=zeros_like(leaf.value, leaf.dims))

    return jax.tree.map(zeros, params, is_leaf=is_host_stack)


# Slices of arrays in host memory. If an array is typed to be on the device, as in a program
# without memory kinds, these are plain slices.


def to_device(array, n):
    """The n-th slice of a stacked array, on the device."""
    return jax.device_put(slice_at(array, n), jax.memory.Space.Device)


def to_host(array, slice_, n):
    """The stacked array with its n-th slice written."""
    slice_ = jax.device_put(slice_, jax.typeof(array).memory_space)
    return with_slice(array, slice_, n)


def empty(like, dims: str, space=None):
    """An array of a shape and dtype, to be written; where `like` is, or in `space`.

    It is not of zeros: these would first be made on the device, all of them. Nothing may read
    what was not written.
    """
    return jax.device_put(_empty(like, dims), space or jax.typeof(like).memory_space)


def _empty(like, dims: str):
    """The array, each device making its own part: XLA for GPUs would make the whole one and
    slice that, and refuses such a slice in host memory."""
    if num_devices() == 1:
        return jax.lax.empty(like.shape, like.dtype)
    mesh, rules = jax.sharding.get_abstract_mesh(), current_rules()
    spec = rules.spec(dims, like.shape, mesh, table="expert_params")
    entries = (entry if isinstance(entry, tuple) else (entry,) for entry in spec)
    axes = tuple(axis for entry in entries for axis in entry if axis is not None)
    shape = NamedSharding(mesh, spec).shard_shape(like.shape)
    return jax.shard_map(
        lambda: vary(jax.lax.empty(shape, like.dtype), axes),
        in_specs=(),
        out_specs=spec,
        axis_names=open_axes(),
        check_vma=True,
    )()


def zeros_like(array, dims: str):
    """Zeros of the shape and the place of a stacked array, written slice by slice."""

    def write(n, array):
        return to_host(array, jnp.zeros(array.shape[1:], array.dtype), n)

    return jax.lax.fori_loop(0, array.shape[0], write, empty(array, dims))


def constrained(array, dims: str):
    """Splits a parameter's array, or one layer of it, over the mesh as the rules say."""
    if num_devices() == 1:
        return array
    mesh, rules = jax.sharding.get_abstract_mesh(), current_rules()
    spec = rules.spec(dims, array.shape, mesh, table="expert_params")
    return jax.lax.with_sharding_constraint(array, spec)


def slice_at(arrays, n):
    """The n-th slices of stacked arrays of a tree, in the memory where the arrays are."""

    def take(array):
        return jax.lax.dynamic_index_in_dim(
            array, n, keepdims=False, allow_negative_indices=False
        )

    return jax.tree.map(take, arrays)


def with_slice(arrays, slices, n):
    """The stacked arrays with their n-th slices written."""

    def write(array, slice_):
        return jax.lax.dynamic_update_index_in_dim(
            array, slice_, n, 0, allow_negative_indices=False
        )

    return jax.tree.map(write, arrays, slices)
