# SPDX-License-Identifier: Apache-2.0
"""`grouped_matmul`: rows sorted by expert, each times its expert's matrix, and its gradients.

Gale et al. 2022, MegaBlocks (arXiv:2211.15841), section 3. What follows the product (bias,
activation, gated linear unit and the row's weight) is applied to its float32 sums
(`epilogue.py`), and so are their gradients.
Dims: R rows, D inputs, F outputs, E experts
"""

import dataclasses
import functools
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.epilogue import epilogue_gradients
from pallas_kernels.implementations import choose
from pallas_kernels.operands import check_grouped, check_tiling, sum_over_replicas, vary_like
from pallas_kernels.sorted_rows import (
    in_32_bits,
    int32_sizes,
    local_groups,
    rows_of_groups,
)
from pallas_kernels.tiling.tuned import tuned_tiling


def grouped_matmul(
    x_RD,
    w_EDF,
    group_sizes_E,
    *,
    w_gate_EDF=None,
    bias_EF=None,
    activation: str | None = None,
    gate_R=None,
    transpose_w: bool = False,
    group_offset=None,
    preferred_element_type=None,
    implementation: str | None = None,
    tiling: Any = None,
    interpret: bool = False,
):
    """`y_r = gate_r act(x_r w_e + bias_e) (x_r w_gate_e)` with e the expert of row r.

    The result is `[R, F]`; every factor but the product with w is optional. The first
    `group_sizes_E[0]` rows are expert 0's, the next `group_sizes_E[1]` expert 1's. Rows past
    the last group are not read and give zeros; matrices of empty groups are not read. Products
    are summed in float32 and rounded once, after the epilogue. It is differentiable in x, w,
    w_gate, bias and gate, once and in reverse mode; neither pass transposes the weights in
    memory. For the gradient of an activation the forward pass also returns its argument (and
    `x_r w_gate_e`) as the one residual; for that of a ReLU alone, the result is enough.

    Args:
        x_RD, bias_EF: float32, bfloat16 or float16.
        w_EDF: floating point; multiplied in the dtype of x. Its gradient leaves the kernel in
            its own dtype, so that of float32 parameters is never rounded to bfloat16.
        w_gate_EDF: the gate's matrices of a gated linear unit, like w. Each tile of rows is
            multiplied by both matrices.
        activation: the activation: None, `relu`, `gelu` (tanh), `gelu_exact` or `silu`.
        gate_R: the weight of each row's result, such as a router's gate.
        group_sizes_E: integers, signed or not, summing to at most R; checked if they are
            concrete. Traced ones may sum to more: rows past R are neither read nor written.
        transpose_w: whether w (and w_gate) is `[E, F, D]`, output-major, as are the gradients.
        group_offset: number of w's first expert: w has only the E experts from this one on, a
            device's part, and `group_sizes_E` has the sizes of all. Rows of other experts are
            not read and give zeros. The rows of w's experts are moved to the front and back, a
            copy of x and one of y, on every back end.
        preferred_element_type: dtype of the result, `float32`, `bfloat16` or `float16`, to
            which the float32 sums are rounded; None is the dtype of x. If it is wider than x,
            the Hopper kernel writes its sums in two parts, which XLA adds.
        implementation: `reference`, `tpu`, `gpu`, `triton`, or None: see
            `implementations.choose`.
        tiling: the implementation's `Tiling` of the forward product; None is the tuned one
            (`switchx tune kernels`) or its heuristic, which gradients always take.
        interpret: whether to run a named kernel by interpretation, on any machine and slowly.

    Raises:
        ValueError: shapes that do not agree, an unsupported dtype, activation or alignment,
            group sizes below 0 or above R in sum, an implementation that cannot run here, a
            damaged file of tuned tilings. Nothing has been launched then.
    """
    E, D, F = check_grouped(
        x_RD,
        w_EDF,
        group_sizes_E,
        w_gate_EDF,
        transpose_w=transpose_w,
        group_offset=group_offset,
        preferred_element_type=preferred_element_type,
        bias_EF=bias_EF,
        activation=activation,
        gate_R=gate_R,
    )
    R = x_RD.shape[0]
    module = choose(
        "grouped_matmul",
        implementation,
        (x_RD.dtype, x_RD.dtype, R, D, F, E),
        interpret=interpret,
    )
    check_tiling(tiling, module)
    if tiling is None and not interpret and w_gate_EDF is None and not transpose_w:
        tiling = tuned_tiling(module, x_RD.dtype, None, None, R, D, F, E)
    settings = _Settings(
        module,
        activation,
        tiling,
        interpret,
        transpose_w,
        jnp.dtype(preferred_element_type or x_RD.dtype),
    )

    def multiply(x_RD, gate_R, group_sizes_E):
        operands = _Operands(x_RD, w_EDF, w_gate_EDF, bias_EF, gate_R, group_sizes_E)
        return _grouped(settings, jax.tree.map(jnp.asarray, operands))

    return with_group_offset(multiply, x_RD, gate_R, group_sizes_E, group_offset, E)


@dataclasses.dataclass(frozen=True)
class _Settings:
    """The arguments that are not arrays: the module that multiplies, and its settings."""

    module: ModuleType
    activation: str | None
    tiling: Any
    interpret: bool
    transpose_w: bool
    out_dtype: jnp.dtype

    @property
    def options(self) -> dict:
        """Options of all products of the module, in both passes; only kernels have any."""
        return {"interpret": True} if self.interpret else {}


def with_group_offset(multiply, x_RD, gate_R, group_sizes_E, group_offset, E: int):
    """`multiply(x_RD, gate_R, int32 sizes of E groups)`, as `grouped_matmul` says of an offset.

    The rows of the E groups are rolled to the front and their results back.
    """
    group_sizes_E = int32_sizes(group_sizes_E, len(x_RD))
    if group_offset is None:
        return multiply(x_RD, gate_R, group_sizes_E)
    group_sizes_E, first = local_groups(group_sizes_E, group_offset, E, len(x_RD))
    gate_R = None if gate_R is None else jnp.roll(gate_R, -first)
    y_RF = multiply(jnp.roll(x_RD, -first, axis=0), gate_R, group_sizes_E)
    return jnp.roll(y_RF, first, axis=0)


class _Operands(NamedTuple):
    x_RD: Any
    w_EDF: Any
    w_gate_EDF: Any
    bias_EF: Any
    gate_R: Any
    group_sizes_E: Any

    def matrices(self) -> list:
        """The experts' matrices, in the dtype of the rows."""
        matrices = (self.w_EDF, self.w_gate_EDF)
        return [each.astype(self.x_RD.dtype) for each in matrices if each is not None]


def _run(settings: _Settings, operands: _Operands, *, has_residual: bool):
    w, *w_gate = operands.matrices()
    return settings.module.forward(
        operands.x_RD,
        w,
        operands.group_sizes_E,
        w_gate=w_gate[0] if w_gate else None,
        bias_EF=operands.bias_EF,
        activation=settings.activation,
        gate_R=operands.gate_R,
        has_residual=has_residual,
        transpose_w=settings.transpose_w,
        tiling=settings.tiling,
        out_dtype=settings.out_dtype,
        **settings.options,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
@in_32_bits
def _grouped(settings: _Settings, operands: _Operands):
    return _run(settings, operands, has_residual=False)


@in_32_bits
def _grouped_forward(settings: _Settings, operands: _Operands):
    is_plain = operands.w_gate_EDF is None and operands.gate_R is None
    if operands.w_gate_EDF is None and settings.activation is None:
        return _run(settings, operands, has_residual=False), (operands, None)
    if is_plain and settings.activation == "relu":
        y_RF = _run(settings, operands, has_residual=False)
        return y_RF, (operands, (y_RF,))  # above 0 where its argument is
    y_RF, residual = _run(settings, operands, has_residual=True)
    return y_RF, (operands, residual)


@in_32_bits
def _grouped_backward(settings: _Settings, saved, dy_RF):
    operands, residual = saved
    x_RD = operands.x_RD
    group_sizes_E = operands.group_sizes_E
    gate_R = operands.gate_R
    expert_R, is_used_R = rows_of_groups(group_sizes_E, len(x_RD))

    def input_gradient(da_RF, w_EDF, **dtype):
        return settings.module.forward(
            da_RF.astype(x_RD.dtype),
            w_EDF,
            group_sizes_E,
            transpose_w=not settings.transpose_w,
            **dtype,
            **settings.options,
        )

    if residual is None:
        # The product is linear: the gates' gradient is that of the ungated rows times x.
        # float16 has no range for rows that are not gated yet: 0 times infinity is NaN.
        is_wide = gate_R is not None and x_RD.dtype == jnp.float16
        wide = {"out_dtype": jnp.float32} if is_wide else {}
        dx_RD = input_gradient(dy_RF, operands.w_EDF.astype(x_RD.dtype), **wide)
        da, dgate_R = [dy_RF], None
        if gate_R is not None:
            gate_R = jnp.where(is_used_R, gate_R.astype(jnp.float32), 0)
            dgate_R = _row_dot(dx_RD, x_RD)
            if operands.bias_EF is not None:
                dgate_R += _row_dot(dy_RF, operands.bias_EF[expert_R])
            da = [dy_RF.astype(jnp.float32) * gate_R[:, None]]
            dx_RD = (dx_RD.astype(jnp.float32) * gate_R[:, None]).astype(x_RD.dtype)
    else:
        da, dgate_R = epilogue_gradients(residual, gate_R, dy_RF, settings.activation)
        dx_RD = sum(map(input_gradient, da, operands.matrices()))

    gradients = {"x_RD": dx_RD}
    if gate_R is not None:
        gradients["gate_R"] = jnp.where(is_used_R, dgate_R, 0)
    da = [each.astype(x_RD.dtype) for each in da]
    if operands.bias_EF is not None:
        # The weight gradient of rows of a single 1: sums of each expert's rows, and no other's.
        ones_R1 = vary_like(jnp.ones((len(x_RD), 1), x_RD.dtype), da[0])
        gradients["bias_EF"] = settings.module.weight_gradient(
            ones_R1, da[0], group_sizes_E, out_dtype=jnp.float32, **settings.options
        )[:, 0]
    for name, da_RF in zip(("w_EDF", "w_gate_EDF"), da, strict=False):
        factors = (da_RF, x_RD) if settings.transpose_w else (x_RD, da_RF)
        gradients[name] = settings.module.weight_gradient(
            *factors, group_sizes_E, out_dtype=getattr(operands, name).dtype, **settings.options
        )
    gradients = {
        name: sum_over_replicas(each, getattr(operands, name))
        for name, each in gradients.items()
    }
    none = _Operands(None, None, None, None, None, _no_gradient(group_sizes_E))
    return (none._replace(**gradients),)


def _row_dot(a_RX, b_RX):
    return jnp.sum(a_RX.astype(jnp.float32) * b_RX.astype(jnp.float32), axis=1)


def _no_gradient(integers):
    return np.zeros(integers.shape, jax.dtypes.float0)


_grouped.defvjp(_grouped_forward, _grouped_backward)
