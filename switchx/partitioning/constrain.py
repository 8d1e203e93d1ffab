# SPDX-License-Identifier: Apache-2.0
"""Sharding constraints on activations, by dimension letters."""

import contextlib
import math

import jax
from jax.sharding import AbstractMesh, Mesh

from switchx import tree
from switchx.axes import dims_of
from switchx.partitioning.rules import Rules

# Of JAX's making, so that a program that was traced under other rules is traced again.
_rules = jax.make_user_context(None)


@contextlib.contextmanager
def use_mesh(mesh: Mesh | AbstractMesh, rules: Rules):
    """Makes `mesh` and `rules` those that `constrain` follows, also while tracing.

    `jax.set_mesh`, not `with mesh:`: under the latter the abstract mesh is empty and every
    constraint would vanish silently. An abstract mesh is for programs that are traced and
    lowered for devices that are not here.
    """
    is_there = isinstance(mesh, Mesh)
    with _rules(rules), (jax.set_mesh if is_there else jax.sharding.use_abstract_mesh)(mesh):
        yield


def current_rules() -> Rules:
    """The rules of the innermost `use_mesh`."""
    return _rules.value


def num_devices() -> int:
    """Devices of the innermost `use_mesh` that the compiler may split arrays over.

    1 outside of any, and inside of a `jax.shard_map` over all axes: what one device sees
    there is its own.
    """
    mesh = jax.sharding.get_abstract_mesh()
    free = set(mesh.axis_names) - set(mesh.manual_axes)
    return math.prod(mesh.shape[axis] for axis in free)


def open_axes() -> set[str]:
    """Axes of the innermost mesh that no `shard_map` around this has made manual.

    Inside of a pipeline, that is all but `pipe`: what a nested `shard_map` may take.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return set(mesh.axis_names) - set(mesh.manual_axes)


def constrain(x, dims: str):
    """Splits activation `x` as the rules say; leaves it alone outside of `use_mesh`."""
    if num_devices() == 1:
        return x
    mesh = jax.sharding.get_abstract_mesh()
    return jax.lax.with_sharding_constraint(
        x, current_rules().spec(dims, x.shape, mesh, table="activations")
    )


def constrain_named(arrays):
    """`constrain` of all arrays of a tree, whose names end in their dimensions."""
    if num_devices() == 1:
        return arrays
    return tree.map_named(
        lambda name, x: constrain(x, dims_of(name.rsplit("/", 1)[-1], x.ndim)), arrays
    )
