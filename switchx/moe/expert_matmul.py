# SPDX-License-Identifier: Apache-2.0
"""One matrix product an expert.

Dims: E R D F; for `w_out_EFD` read F for D and D for F.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import (
    QTensor,
    SeparateMatrices,
    grouped_matmul,
    quantized_grouped_matmul,
    separate_matmul,
)

# Up to so many rows, XLA's CPU products are 1.2 to 2.5 times as fast, weight on the left.
FEW_ROWS = 64


def expert_matmul(x_ERD, w: jax.Array | QTensor | SeparateMatrices):
    """`x_ERD w_EDF` for each expert, in the dtype of x."""
    if isinstance(w, QTensor | SeparateMatrices):
        E, R, D = x_ERD.shape
        y_RF = rows_matmul(x_ERD.reshape(E * R, D), w, jnp.full((E,), R, jnp.int32))
        return y_RF.reshape(E, R, -1)
    return _matmul(x_ERD, w.astype(x_ERD.dtype))


def rows_matmul(x_RD, w: jax.Array | QTensor | SeparateMatrices, count_E):
    """`x_r w_e` for rows sorted by expert, in the dtype of x; see `pallas_kernels`."""
    if isinstance(w, QTensor):
        return quantized_grouped_matmul(x_RD, w, count_E)
    if isinstance(w, SeparateMatrices):
        return separate_matmul(x_RD, w, count_E)
    return grouped_matmul(x_RD, w.astype(x_RD.dtype), count_E)


@jax.custom_vjp
def _matmul(x_ERD, w_EDF):
    return jnp.einsum("ERD,EDF->ERF", x_ERD, w_EDF)


def _matmul_forward(x_ERD, w_EDF):
    return _matmul(x_ERD, w_EDF), (x_ERD, w_EDF)


def _matmul_backward(residuals, dy_ERF):
    x_ERD, w_EDF = residuals
    return _times_transposed(dy_ERF, w_EDF), _weight_gradient(x_ERD, dy_ERF)


_matmul.defvjp(_matmul_forward, _matmul_backward)


def _times_transposed(dy_ERF, w_EDF):
    """`dy w^T` for each expert, `[E, R, D]`."""
    if dy_ERF.shape[1] > FEW_ROWS:
        return _product(dy_ERF, w_EDF)
    return jax.lax.platform_dependent(
        dy_ERF, w_EDF, cpu=_product_weight_first, default=_product
    )


def _product(dy_ERF, w_EDF):
    return jnp.einsum("ERF,EDF->ERD", dy_ERF, w_EDF)


def _product_weight_first(dy_ERF, w_EDF):
    # The barrier keeps XLA from turning the product around again.
    dx_EDR = jax.lax.optimization_barrier(jnp.einsum("EDF,ERF->EDR", w_EDF, dy_ERF))
    return jnp.swapaxes(dx_EDR, 1, 2)


def _weight_gradient(x_ERD, dy_ERF):
    """`x^T dy` for each expert, `[E, D, F]`."""
    return jax.lax.platform_dependent(
        x_ERD, dy_ERF, cpu=_product_of_a_transpose, default=_transposed_product
    )


def _transposed_product(x_ERD, dy_ERF):
    return jnp.einsum("ERD,ERF->EDF", x_ERD, dy_ERF)


def _product_of_a_transpose(x_ERD, dy_ERF):
    # Written out before: XLA's CPU product that transposes takes 1.1 to 2 times as long.
    x_EDR = jax.lax.optimization_barrier(jnp.swapaxes(x_ERD, 1, 2))
    return jnp.einsum("EDR,ERF->EDF", x_EDR, dy_ERF)
