# SPDX-License-Identifier: Apache-2.0
"""Checks of the operands of both operations, and the mesh axes over which these vary.

Operands are checked before anything is launched. Inside `jax.shard_map` JAX tracks the mesh
axes over which each array varies; it does not look inside a kernel or a `custom_vjp`, so both
have to say it of their results.
Dims: R rows, D inputs, F outputs, E experts
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.quantization.qtensor import QTensor

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
ACTIVATIONS = (None, "relu")


def check_grouped(x_RD, w_EDF, group_sizes_E, bias_EF) -> None:
    """Raises ValueError where these are not the operands of `grouped_matmul`."""
    _check_array("w_EDF", w_EDF, "[experts, inputs, outputs]", 3, DTYPES)
    check_rows(x_RD, w_EDF.shape, group_sizes_E, bias_EF)


def check_activation(activation: str | None) -> None:
    """Raises ValueError where it is none that a kernel has."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r}; use None or 'relu'")


def check_quantized(x_RD, w: QTensor, group_sizes_E, bias_EF, activation, gate_R) -> None:
    """Raises ValueError where these are not the operands of `quantized_grouped_matmul`."""
    if not isinstance(w, QTensor):
        raise ValueError(
            f"w is a {type(w).__name__}; expected a QTensor: use quantize(w_EDF, bits), or "
            "grouped_matmul for weights that are not quantized"
        )
    w.check()
    check_rows(x_RD, w.shape, group_sizes_E, bias_EF)
    check_activation(activation)
    if gate_R is not None:
        _check_array("gate_R", gate_R, "one for each row of x_RD", 1, DTYPES)
        if gate_R.shape[0] != x_RD.shape[0]:
            raise ValueError(
                f"gate_R has {gate_R.shape[0]} elements; expected {x_RD.shape[0]}, one for "
                "each row of x_RD"
            )


def check_group_sizes(group_sizes_E, R: int, E: int) -> None:
    """Raises ValueError where these are no sizes of E groups among R rows.

    Values that are being traced cannot be looked at. There `group_bounds` cuts groups at row
    R, and a negative size gives results that mean nothing.
    """
    _check_array("group_sizes_E", group_sizes_E, "the rows of each expert", 1, (jnp.int32,))
    if group_sizes_E.shape[0] != E:
        raise ValueError(
            f"group_sizes_E has {group_sizes_E.shape[0]} elements; expected {E}, one for each "
            "expert of the weights"
        )
    if isinstance(group_sizes_E, jax.core.Tracer):
        return
    size_E = np.asarray(group_sizes_E)
    if (size_E < 0).any():
        e = int(np.argmax(size_E < 0))
        raise ValueError(f"group_sizes_E[{e}]={size_E[e]}; sizes are 0 or more")
    if size_E.sum(dtype=np.int64) > R:
        raise ValueError(
            f"group_sizes_E sum to {size_E.sum(dtype=np.int64)}, and x_RD has {R} rows; pad "
            "the rows, or leave out groups"
        )


def check_rows(x_RD, shape_EDF, group_sizes_E, bias_EF=None) -> None:
    """Raises ValueError where these are not rows for matrices of this shape."""
    E, D, F = shape_EDF
    _check_array("x_RD", x_RD, "[rows, inputs]", 2, DTYPES)
    if x_RD.shape[1] != D:
        raise ValueError(
            f"x_RD has {x_RD.shape[1]} columns, and the weights are E={E}, D={D}, F={F}; "
            f"expected {D} columns"
        )
    if bias_EF is not None:
        _check_array("bias_EF", bias_EF, "[experts, outputs]", 2, DTYPES)
        if bias_EF.shape != (E, F):
            raise ValueError(f"bias_EF has shape {bias_EF.shape}; expected {(E, F)}")
    check_group_sizes(group_sizes_E, x_RD.shape[0], E)


def _check_array(name: str, array, meaning: str, ndim: int, dtypes) -> None:
    if not isinstance(array, jax.Array | np.ndarray):
        raise ValueError(f"{name} is a {type(array).__name__}; expected an array, {meaning}")
    if array.ndim != ndim:
        raise ValueError(f"{name} has shape {array.shape}; expected {meaning}")
    if array.dtype not in dtypes:
        names = ", ".join(jnp.dtype(dtype).name for dtype in dtypes)
        raise ValueError(f"{name} has dtype {array.dtype}; use {names}")


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
