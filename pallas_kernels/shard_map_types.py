# SPDX-License-Identifier: Apache-2.0
"""Results of kernels inside `jax.shard_map`, which tracks over which axes an array varies.

A kernel has to say so of its result: JAX does not look inside it.
"""

import jax


def result_type(shape, dtype, *operands) -> jax.ShapeDtypeStruct:
    """A result that varies over every mesh axis that some operand varies over."""
    varying = frozenset().union(
        *(jax.typeof(operand).manual_axis_type.varying for operand in operands)
    )
    axis_type = jax.sharding.ManualAxisType(varying=varying)
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=axis_type)
