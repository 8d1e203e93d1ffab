# SPDX-License-Identifier: Apache-2.0
"""Checks of the operands of both operations, and the mesh axes over which these vary.

Operands are checked before anything is launched. Inside `jax.shard_map` JAX tracks the mesh
axes over which each array varies; it does not look inside a kernel or a `custom_vjp`, so both
have to declare it for their results.
Dims: R rows, D inputs, F outputs, E experts
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.epilogue import check_activation
from pallas_kernels.quantization.qtensor import QTensor

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def check_grouped(
    x_RD,
    w_EDF,
    group_sizes_E,
    w_gate_EDF=None,
    *,
    transpose_w=False,
    group_offset=None,
    preferred_element_type=None,
    **epilogue,
) -> tuple[int, int, int]:
    """(E, D, F); raises ValueError if these are not operands of `grouped_matmul`."""
    meaning = "[experts, outputs, inputs]" if transpose_w else "[experts, inputs, outputs]"
    _check_array("w_EDF", w_EDF, meaning, 3, DTYPES)
    if w_gate_EDF is not None:
        _check_array("w_gate_EDF", w_gate_EDF, meaning, 3, DTYPES)
    E, D, F = w_EDF.shape
    shape = (E, F, D) if transpose_w else (E, D, F)
    check_rows(x_RD, shape, group_sizes_E, group_offset)
    if w_gate_EDF is not None and w_gate_EDF.shape != w_EDF.shape:
        raise ValueError(
            f"w_gate_EDF has shape {w_gate_EDF.shape}; expected {w_EDF.shape}, that of w_EDF: "
            "give both matrices of a gated linear unit in one layout"
        )
    check_result_dtype(preferred_element_type)
    check_epilogue(x_RD, shape, **epilogue)
    return shape


def check_quantized(
    x_RD,
    w: QTensor,
    group_sizes_E,
    w_gate=None,
    *,
    group_offset=None,
    preferred_element_type=None,
    **epilogue,
) -> None:
    """Raises ValueError if these are not operands of `quantized_grouped_matmul`."""
    for name, each in {"w": w, **({} if w_gate is None else {"w_gate": w_gate})}.items():
        if not isinstance(each, QTensor):
            raise ValueError(
                f"{name} is a {type(each).__name__}; expected a QTensor: use quantize(w_EDF, "
                "bits), or grouped_matmul for weights that are not quantized"
            )
        each.check()
    check_rows(x_RD, w.shape, group_sizes_E, group_offset)
    if w_gate is not None:
        kinds = [
            (
                *(each.shape, "float8_e4m3fn" if each.is_float8 else each.bits),
                *(each.group_size, "no" if each.zeros_EFG is None else "with"),
            )
            for each in (w_gate, w)
        ]
        if kinds[0] != kinds[1]:
            raise ValueError(
                "w_gate has shape {}, bits={}, group_size={} and {} zero points".format(
                    *kinds[0]
                )
                + "; expected those of w, {}, {}, {} and {}".format(*kinds[1])
                + ": quantize both matrices alike, or give zeros_EFG of 0"
            )
    check_result_dtype(preferred_element_type)
    check_epilogue(x_RD, w.shape, **epilogue)


def check_result_dtype(preferred_element_type) -> None:
    """Raises ValueError if results cannot have this dtype."""
    if preferred_element_type is None:
        return
    try:
        name = jnp.dtype(preferred_element_type).name
    except TypeError:
        name = repr(preferred_element_type)
    if name not in _names(DTYPES).split(", "):
        raise ValueError(
            f"preferred_element_type={name}; expected {_names(DTYPES)}: use one of these, or "
            "None for the dtype of x_RD"
        )


def check_tiling(tiling, module) -> None:
    """Raises ValueError if it is neither None nor a tiling of the module that multiplies."""
    if tiling is not None and not isinstance(tiling, module.Tiling):
        expected = f"{module.Tiling.__module__}.{module.Tiling.__qualname__}"
        raise ValueError(
            f"tiling is {tiling!r}; expected a {expected}, as {module.__name__} runs here: use "
            "one of its candidates(...), or None"
        )


def check_epilogue(x_RD, shape_EDF, *, bias_EF, activation, gate_R) -> None:
    """Raises ValueError if these do not fit rows times matrices of this shape."""
    (E, _, F), R = shape_EDF, x_RD.shape[0]
    check_activation(activation)
    for name, array, meaning, shape in (
        ("bias_EF", bias_EF, "[experts, outputs]", (E, F)),
        ("gate_R", gate_R, "one for each row of x_RD", (R,)),
    ):
        if array is None:
            continue
        _check_array(name, array, meaning, len(shape), DTYPES)
        if array.shape != shape:
            raise ValueError(
                f"{name} has shape {array.shape}; expected {shape}, {meaning}: reshape it, or "
                f"leave {name} out"
            )


def check_group_sizes(group_sizes_E, R: int, E: int, group_offset=None) -> None:
    """Raises ValueError if these are not sizes of E groups among R rows.

    Traced values cannot be checked. For these `group_bounds` cuts groups at row R, and a
    negative size gives undefined results.

    Args:
        group_offset: number of the first expert of this device, or None; with it, there are
            sizes of at least E groups, those of all devices.
    """
    meaning = "the rows of each expert"
    _check_array("group_sizes_E", group_sizes_E, meaning, 1, (jnp.integer,))
    G = group_sizes_E.shape[0]
    if group_offset is None and G != E:
        raise ValueError(
            f"group_sizes_E has {G} elements; expected {E}, one for each expert of the "
            "weights: give the sizes of these experts, or group_offset"
        )
    if group_offset is not None:
        _check_offset(group_offset, G, E)
    if isinstance(group_sizes_E, jax.core.Tracer):
        return
    size_E = np.asarray(group_sizes_E)
    if (size_E < 0).any():
        e = int(np.argmax(size_E < 0))
        raise ValueError(
            f"group_sizes_E[{e}]={size_E[e]}; expected sizes of 0 or more: use 0 for an expert "
            "without rows"
        )
    # Not with NumPy, whose uint64 and int64 add up to float64.
    if (total := sum(map(int, size_E))) > R:
        raise ValueError(
            f"group_sizes_E sum to {total}, and x_RD has {R} rows; expected at most {R}: pad "
            "the rows, or leave out groups"
        )


def _check_offset(group_offset, G: int, E: int) -> None:
    """Raises ValueError if E groups of G cannot begin there."""
    is_number = isinstance(group_offset, int | np.integer | np.ndarray | jax.Array)
    if (
        not is_number
        or jnp.ndim(group_offset) != 0
        or not jnp.issubdtype(jnp.result_type(group_offset), jnp.integer)
    ):
        raise ValueError(
            f"group_offset is {group_offset!r}; expected the number of the first expert of the "
            "weights, an integer or a scalar array of integers"
        )
    if isinstance(group_offset, jax.core.Tracer):
        is_within, first = E <= G, "a traced number"
    else:
        first = int(group_offset)
        is_within = 0 <= first <= G - E
    if not is_within:
        raise ValueError(
            f"group_offset={first} with {G} elements of group_sizes_E and weights of {E} "
            f"experts; expected an offset of 0 to {G - E}: give the sizes of all groups, and "
            "the number of the weights' first expert among them"
        )


def check_rows(x_RD, shape_EDF, group_sizes_E, group_offset=None) -> None:
    """Raises ValueError if these are not rows for matrices of this shape."""
    E, D, F = shape_EDF
    _check_array("x_RD", x_RD, "[rows, inputs]", 2, DTYPES)
    if x_RD.shape[1] != D:
        raise ValueError(
            f"x_RD has {x_RD.shape[1]} columns, and the weights are E={E}, D={D}, F={F}; "
            f"expected {D} columns: where the weights are the ones that are transposed, see "
            "transpose_w"
        )
    check_group_sizes(group_sizes_E, x_RD.shape[0], E, group_offset)


def _check_array(name: str, array, meaning: str, ndim: int, dtypes) -> None:
    if not isinstance(array, jax.Array | np.ndarray):
        raise ValueError(
            f"{name} is a {type(array).__name__}; expected an array, {meaning}: use jnp.asarray"
        )
    if array.ndim != ndim:
        raise ValueError(
            f"{name} has shape {array.shape}; expected {ndim} dimensions, {meaning}: reshape it"
        )
    if not any(jnp.issubdtype(array.dtype, dtype) for dtype in dtypes):
        raise ValueError(
            f"{name} has dtype {array.dtype}; expected {_names(dtypes)}: use "
            f"{name}.astype(jnp.{_names(dtypes[:1])})"
        )


def _names(dtypes) -> str:
    return ", ".join(
        "int32" if dtype is jnp.integer else jnp.dtype(dtype).name for dtype in dtypes
    )


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
    """The gradient, in the primal's dtype, of a primal that does not vary over all the mesh
    axes that the gradient varies over.

    Along such an axis every device used the same value, and has a part of its gradient.
    """
    replicas = varying_axes(gradient) - varying_axes(primal)
    if replicas:
        gradient = jax.lax.psum(gradient, tuple(sorted(replicas)))
    return gradient.astype(primal.dtype)
