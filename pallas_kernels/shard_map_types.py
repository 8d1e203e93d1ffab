# SPDX-License-Identifier: Apache-2.0
"""Arrays inside `jax.shard_map`, which tracks the mesh axes over which each of them varies.

JAX does not look inside a kernel or a `custom_vjp`, so both have to say it of their results.
"""

import jax


def varying_axes(*operands) -> frozenset:
    """The mesh axes over which some operand varies; none outside `jax.shard_map`."""
    types = (jax.typeof(leaf).manual_axis_type for leaf in jax.tree.leaves(operands))
    return frozenset().union(*(each.varying for each in types))


def result_type(shape, dtype, *operands) -> jax.ShapeDtypeStruct:
    """A result that varies over every mesh axis that some operand varies over."""
    axis_type = jax.sharding.ManualAxisType(varying=varying_axes(*operands))
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=axis_type)


def vary_like(array, *operands):
    """The array, which varies over every mesh axis that some operand varies over."""
    missing = varying_axes(*operands) - varying_axes(array)
    return jax.lax.pcast(array, tuple(sorted(missing)), to="varying") if missing else array


def sum_over_replicas(gradient, primal):
    """The gradient of a primal that does not vary over all the mesh axes that it varies over.

    Along such an axis every device used the same value, and has a part of its gradient.
    """
    replicas = varying_axes(gradient) - varying_axes(primal)
    return jax.lax.psum(gradient, tuple(sorted(replicas))) if replicas else gradient
