# SPDX-License-Identifier: Apache-2.0
"""Operations on the float32 sums of a product before they are rounded, and their derivative.

With `a_r = x_r w_e` and, in a gated linear unit, `b_r = x_r v_e` (Shazeer 2020,
arXiv:2002.05202):

    y_r = gate_r act(a_r + bias_e) b_r

Every part is optional: without v there is no b_r, and an activation of None is the identity.
`act(a_r + bias_e) b_r` are two halves of one product: each tile of x meets both matrices.
Kernels apply the same functions to their accumulators that the reference applies to arrays.
They are given one record, `Epilogue`, which each cuts for its copies at its launch.
Dims: R rows, F outputs, E experts
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

ACTIVATIONS = (None, "relu", "gelu", "gelu_exact", "silu")


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """The operands of a kernel's product besides rows and matrices.

    Attributes:
        scales: scales of each matrix, `[E, F, G]`, a factor for each feature and group of D / G
            channels; empty if weights are not quantized.
        zeros: zero points of each matrix, in the scales' shape; empty if they are 0.
        row_scale_R: a factor of each row's sums, if rows are quantized.
        bias_EF, activation, gate_R: see `api.grouped_matmul`.
        has_residual: whether the residual is returned, too.
    """

    scales: tuple[jax.Array, ...] = ()
    zeros: tuple[jax.Array, ...] = ()
    row_scale_R: jax.Array | None = None
    bias_EF: jax.Array | None = None
    activation: str | None = None
    gate_R: jax.Array | None = None
    has_residual: bool = False


def check_activation(activation: str | None) -> None:
    """Raises ValueError if no kernel has this activation."""
    if activation not in ACTIVATIONS:
        *others, last = (repr(name) for name in ACTIVATIONS)
        raise ValueError(
            f"activation={activation!r}; expected {', '.join(others)} or {last}: use one of "
            "these, or None and apply it to the result"
        )


def activated(activation: str | None, z, erf=jax.lax.erf):
    """`act(z)`; GELU is the tanh form, `gelu_exact` that of the normal distribution.

    It uses only operations that the compilers of all kernels have, so none of `jax.nn`. If a
    kernel's compiler has no error function, the kernel gives its own, `erf`.
    """
    match activation:
        case None:
            return z
        case "relu":
            return jnp.maximum(z, 0)
        case "gelu":
            inner = math.sqrt(2 / math.pi) * (z + 0.044715 * (z * z * z))
            return 0.5 * z * (1 + jnp.tanh(inner))
        case "gelu_exact":
            return 0.5 * z * (1 + erf(z * math.sqrt(0.5)))
        case "silu":
            return z * jax.lax.logistic(z)
    raise ValueError(f"activation={activation!r}; use one of {ACTIVATIONS}")


def result_of(activation: str | None, residual, erf=jax.lax.erf):
    """`act(z) b` of a residual, `(z,)` or `(z, b)`."""
    z, *others = residual
    y = activated(activation, z, erf)
    for each in others:
        y = y * each
    return y


def finite(z, dtype):
    """A part of the residual, float32, within the range of its dtype; NaN stays NaN.

    Beyond float16 it would be infinite, and the gradient of its activation NaN.
    """
    if dtype != jnp.float16:
        return z
    most = float(jnp.finfo(jnp.float16).max)
    return jnp.minimum(jnp.maximum(z, -most), most)


def apply_epilogue(sums, expert_R, is_used_R, bias_EF, activation: str | None, gate_R):
    """Rows `y_RF` of the sums, and the residual that its derivative needs; 0 in unused rows.

    Args:
        sums: `(a_RF,)`, or `(a_RF, b_RF)` of a gated linear unit, float32.

    Returns:
        (y_RF, residual): `(a_RF + bias, *b_RF)`, float32.
    """
    z_RF, *others = sums
    if bias_EF is not None:
        z_RF = z_RF + bias_EF.astype(jnp.float32)[expert_R]
    y_RF = result_of(activation, (z_RF, *others))
    if gate_R is not None:
        y_RF = y_RF * gate_R.astype(jnp.float32)[:, None]
    y_RF, *residual = (jnp.where(is_used_R[:, None], each, 0) for each in (y_RF, z_RF, *others))
    return y_RF, tuple(residual)


def epilogue_gradients(residual, gate_R, dy_RF, activation: str | None):
    """Gradients of the sums and of the gates, float32: `((da_RF, *db_RF), dgate_R or None)`.

    Args:
        residual: `(z_RF,)` or `(z_RF, b_RF)` of `apply_epilogue`.
    """

    def run(residual, gate_R):
        z_RF, *others = residual
        if activation == "relu":  # The derivative of `maximum` is a half where both are 0.
            y_RF = result_of(None, (jax.nn.relu(z_RF), *others))
        else:
            y_RF = result_of(activation, residual)
        return y_RF if gate_R is None else y_RF * gate_R[:, None]

    residual, gate_R, dy_RF = jax.tree.map(
        lambda array: array.astype(jnp.float32), (tuple(residual), gate_R, dy_RF)
    )
    _, pull_back = jax.vjp(run, residual, gate_R)
    return pull_back(dy_RF)
