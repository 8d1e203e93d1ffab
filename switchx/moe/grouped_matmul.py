# SPDX-License-Identifier: Apache-2.0
"""Grouped matrix product: rows sorted by expert, each times its expert's matrix.

Gale et al. 2022, MegaBlocks (arXiv:2211.15841), section 3: nothing is padded to a capacity.
`jax.lax.ragged_dot` is the form of TPU and GPU; on CPU it multiplies every row by every
expert's matrix, so there the rows go block by block, and experts without rows are not even
read. (Gathering the experts' matrices instead would let XLA count the FLOPs, of a loop it
counts one turn; for 4 rows at D=512, F=2048 it takes eight times as long: fresh memory.)
Dims: R D E F; P blocks of rows
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np


def grouped_matmul(x_RD, w_EDF, count_E, *, block: int):
    """`y_r = x_r w_e` with e the expert of row r, `[R, F]` in the dtype of x.

    Args:
        x_RD: rows sorted by expert: `count_E[0]` rows of expert 0, then those of expert 1.
            Rows past the last expert's take part in nothing; their results mean nothing.
        count_E: int32, each a multiple of `block`.
        block: rows of one expert that are multiplied at once; divides R.

    Raises:
        ValueError: `block` does not divide R.
    """
    if x_RD.shape[0] % block:
        raise ValueError(
            f"{x_RD.shape[0]} rows do not divide into blocks of {block}; pad the rows"
        )
    return _grouped(block, x_RD, w_EDF.astype(x_RD.dtype), count_E)


def grouped_matmul_reference(x_RD, w_EDF, count_E):
    """The same by multiplying every row by every matrix and choosing: E times the work."""
    is_expert_RE = jax.nn.one_hot(
        expert_of_row(count_E, x_RD.shape[0]), w_EDF.shape[0], dtype=x_RD.dtype
    )
    return jnp.einsum("RD,EDF,RE->RF", x_RD, w_EDF.astype(x_RD.dtype), is_expert_RE)


def expert_of_row(count_E, num_rows: int):
    """The expert of each of `num_rows` sorted rows; past the last one, some expert."""
    end_E = jnp.cumsum(count_E)
    row_R = jnp.arange(num_rows, dtype=end_E.dtype)
    expert_R = jnp.sum(row_R[:, None] >= end_E[None], axis=1)
    return jnp.minimum(expert_R, count_E.shape[0] - 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(block, x_RD, w_EDF, count_E):
    return jax.lax.platform_dependent(
        x_RD,
        w_EDF,
        count_E,
        # Not a `functools.partial`: its arguments would be traced.
        cpu=lambda *operands: _by_blocks(block, "bD,DF->bF", *operands),
        default=_ragged,
    )


def _grouped_forward(block, x_RD, w_EDF, count_E):
    return _grouped(block, x_RD, w_EDF, count_E), (x_RD, w_EDF, count_E)


def _grouped_backward(block, residuals, dy_RF):
    x_RD, w_EDF, count_E = residuals
    dx_RD = jax.lax.platform_dependent(
        dy_RF,
        w_EDF,
        count_E,
        cpu=lambda *operands: _by_blocks(block, "bF,DF->bD", *operands),
        default=lambda dy_RF, w_EDF, count_E: _ragged(
            dy_RF, jnp.swapaxes(w_EDF, 1, 2), count_E
        ),
    )
    dw_EDF = jax.lax.platform_dependent(
        x_RD,
        dy_RF,
        w_EDF,
        count_E,
        cpu=lambda *operands: _weight_gradient_by_blocks(block, *operands),
        default=_weight_gradient_ragged,
    )
    return dx_RD, dw_EDF, np.zeros(count_E.shape, jax.dtypes.float0)


_grouped.defvjp(_grouped_forward, _grouped_backward)


def _used_blocks(block: int, count_E, num_rows: int):
    """The expert of each block, and how many blocks have rows."""
    return expert_of_row(count_E // block, num_rows // block), jnp.sum(count_E) // block


def _by_blocks(block, product, x_RX, w_EDF, count_E):
    expert_P, num_blocks = _used_blocks(block, count_E, x_RX.shape[0])

    def multiply(p, y_RY):
        x_bX = jax.lax.dynamic_slice_in_dim(x_RX, p * block, block)
        w_DF = jax.lax.dynamic_index_in_dim(w_EDF, expert_P[p], keepdims=False)
        y_bY = jnp.einsum(product, x_bX, w_DF)
        return jax.lax.dynamic_update_slice_in_dim(y_RY, y_bY, p * block, 0)

    columns = w_EDF.shape[2] if product.endswith("F") else w_EDF.shape[1]
    y_RY = jax.lax.full_like(x_RX, 0, shape=(x_RX.shape[0], columns))
    # As many turns as there are blocks with rows: the work follows the load.
    return jax.lax.fori_loop(0, num_blocks, multiply, y_RY)


def _weight_gradient_by_blocks(block, x_RD, dy_RF, w_EDF, count_E):
    expert_P, num_blocks = _used_blocks(block, count_E, x_RD.shape[0])
    # Summed over blocks in float32 at least, as one product would be.
    dtype = jnp.promote_types(w_EDF.dtype, jnp.float32)

    def add(p, dw_EDF):
        x_bD = jax.lax.dynamic_slice_in_dim(x_RD, p * block, block)
        dy_bF = jax.lax.dynamic_slice_in_dim(dy_RF, p * block, block)
        dw_DF = jnp.einsum("bD,bF->DF", x_bD, dy_bF, preferred_element_type=dtype)
        old_DF = jax.lax.dynamic_index_in_dim(dw_EDF, expert_P[p], keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(dw_EDF, old_DF + dw_DF, expert_P[p], 0)

    dw_EDF = jax.lax.full_like(w_EDF, 0, dtype=dtype)
    return jax.lax.fori_loop(0, num_blocks, add, dw_EDF).astype(w_EDF.dtype)


def _ragged(x_RD, w_EDF, count_E):
    y_RF = jax.lax.ragged_dot(x_RD, w_EDF, count_E)
    # What a kernel leaves in rows of no expert may be anything, NaN among it.
    is_used_R = jnp.arange(x_RD.shape[0]) < jnp.sum(count_E)
    return jnp.where(is_used_R[:, None], y_RF, 0)


def _weight_gradient_ragged(x_RD, dy_RF, w_EDF, count_E):
    _, pull_back = jax.vjp(lambda w_EDF: jax.lax.ragged_dot(x_RD, w_EDF, count_E), w_EDF)
    return pull_back(dy_RF)[0]
