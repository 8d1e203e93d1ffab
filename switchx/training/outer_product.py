# SPDX-License-Identifier: Apache-2.0
"""The gradient of an expert's weights as its two factors, never multiplied out.

The gradient of `w_in_EDF` in `h_ERF = x_ERD w_in_EDF` is a sum of R outer products,
`dW = X^T dY` for each expert. With many experts R is small (tokens / experts), and what
Adafactor wants of dW comes from R x R Gram matrices:

    sum_f dW_df^2 = x_d^T (dY dY^T) x_d        sum_d dW_df^2 = dy_f^T (X X^T) dy_f
    |dW|^2 = sum of (X X^T) * (dY dY^T)        r dW c = (X r)^T (dY c)

so dW is neither written nor read: the one pass over memory left is that over W itself.
This pays while R is below about a quarter of D and F; beyond, the products of the Gram
matrices cost more than dW. Where outer products cancel in dW, they cancel here in squares:
an error of 1e-7 of the terms' squares, not of the difference's.

Dims: E R D F; for `w_out_EFD` read F for D and D for F. Any dimensions before E are kept.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from switchx.training.factoring import parameter_scale

# Experts that an update on CPU takes at once: enough for two cores, few enough for the cache.
EXPERTS_A_BLOCK = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OuterProductGradient:
    """`dW_EDF = sum over r of x_ERD dy_ERF`, kept as x and dy; a leaf among gradients.

    Attributes:
        x_ERD: inputs of the experts, zero in empty slots.
        dy_ERF: gradients of the outputs.
    """

    x_ERD: jax.Array
    dy_ERF: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the gradient that this stands for."""
        return (*self.x_ERD.shape[:-2], self.x_ERD.shape[-1], self.dy_ERF.shape[-1])

    def dense(self) -> jax.Array:
        """The gradient itself, float32."""
        return jnp.einsum("...rd,...rf->...df", *self._float32())

    def squared_norm(self) -> jax.Array:
        """Sum of squares over all experts."""
        return jnp.sum(_squared_norms(*self._float32()))

    def row_mean_squares(self):
        x_ERD, dy_ERF = self._float32()
        return _diagonal(_gram(dy_ERF), x_ERD) / dy_ERF.shape[-1]

    def column_mean_squares(self):
        x_ERD, dy_ERF = self._float32()
        return _diagonal(_gram(x_ERD), dy_ERF) / x_ERD.shape[-1]

    def mean_squares(self, row, column):
        num_elements = math.prod(self.shape[-2:])
        return _squared_norms(*self._factors(row, column)) / num_elements

    def scaled(self, row, column) -> "OuterProductUpdate":
        left_ERD, right_ERF = self._factors(row, column)
        return OuterProductUpdate(jnp.swapaxes(left_ERD, -2, -1), right_ERF)

    def _factors(self, row, column):
        x_ERD, dy_ERF = self._float32()
        return x_ERD * row[..., None, :], dy_ERF * column[..., None, :]

    def _float32(self):
        return self.x_ERD.astype(jnp.float32), self.dy_ERF.astype(jnp.float32)


def is_outer_product(gradient) -> bool:
    """Whether a gradient is kept as its factors; `is_leaf` of trees with such leaves."""
    return isinstance(gradient, OuterProductGradient)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OuterProductUpdate:
    """`U_EDF = scale_E left_EDR right_ERF - decay W_EDF`, among updates.

    Attributes:
        smallest_scale: `scale_E` is Adafactor's `parameter_scale` of each expert with this
            floor; None for 1. Taken when the update is applied, which reads W anyway.
        decay: the part of the parameter that is taken away.
    """

    left_EDR: jax.Array
    right_ERF: jax.Array
    smallest_scale: float | None = dataclasses.field(default=None, metadata={"static": True})
    decay: float = dataclasses.field(default=0.0, metadata={"static": True})

    def dense(self, param) -> jax.Array:
        """The update of `param`, float32."""
        param = param.astype(jnp.float32)
        return self._scaled_left(param, self.left_EDR) @ self.right_ERF - self.decay * param

    def apply_to(self, param):
        """`param + U` in the parameter's dtype.

        On one CPU a few experts at a time, so that what is read of W stays in cache until
        it is written again; all at once elsewhere, and where devices share experts.
        """
        if jax.sharding.get_abstract_mesh().size > 1:
            return self._applied(param, self.left_EDR, self.right_ERF)
        return jax.lax.platform_dependent(
            param,
            self.left_EDR,
            self.right_ERF,
            cpu=self._applied_by_blocks,
            default=self._applied,
        )

    def _scaled_left(self, param, left_EDR):
        if self.smallest_scale is None:
            return left_EDR
        scale = parameter_scale(param, (-2, -1), self.smallest_scale)
        return left_EDR * scale[..., None, None]

    def _applied(self, param, left_EDR, right_ERF):
        kept = param * (1.0 - self.decay) if self.decay else param
        return (kept + self._scaled_left(param, left_EDR) @ right_ERF).astype(param.dtype)

    def _applied_by_blocks(self, param, left_EDR, right_ERF):
        flat, left, right = (
            array.reshape(-1, *array.shape[-2:]) for array in (param, left_EDR, right_ERF)
        )
        size = math.gcd(flat.shape[0], EXPERTS_A_BLOCK)

        def update_block(index, flat):
            blocks = (
                jax.lax.dynamic_slice_in_dim(array, index * size, size)
                for array in (flat, left, right)
            )
            # Without the barrier XLA computes the block while it writes it: 10% slower.
            new = jax.lax.optimization_barrier(self._applied(*blocks))
            return jax.lax.dynamic_update_slice_in_dim(flat, new, index * size, 0)

        blocks = flat.shape[0] // size
        return jax.lax.fori_loop(0, blocks, update_block, flat).reshape(param.shape)


def _gram(x_ERD):
    """Inner products of the rows of each expert, `[E, R, R]`."""
    return jnp.einsum("...rd,...qd->...rq", x_ERD, x_ERD)


def _diagonal(gram_ERR, x_ERD):
    """`x_d^T gram x_d` for each column d, `[E, D]`."""
    weighted_ERD = jnp.einsum("...rq,...qd->...rd", gram_ERR, x_ERD)
    own_ERD = _diagonals(gram_ERR)[..., None] * x_ERD
    return _above_rounding(
        jnp.sum(weighted_ERD * x_ERD, axis=-2), jnp.sum(own_ERD * x_ERD, axis=-2)
    )


def _squared_norms(x_ERD, dy_ERF):
    """Sum of squares of each expert's product, `[E]`."""
    x_ERR, dy_ERR = _gram(x_ERD), _gram(dy_ERF)
    own_E = jnp.sum(_diagonals(x_ERR) * _diagonals(dy_ERR), axis=-1)
    return _above_rounding(jnp.sum(x_ERR * dy_ERR, axis=(-2, -1)), own_E)


def _diagonals(gram_ERR):
    return jnp.diagonal(gram_ERR, axis1=-2, axis2=-1)


def _above_rounding(square, sum_of_squares):
    """The square of a sum, but no less than its rounding error.

    What cancels would otherwise be a square of 0, or below 0, of a product that is not 0,
    and dividing by its root would turn rounding errors into a large update.
    """
    return jnp.maximum(square, jnp.finfo(jnp.float32).eps * sum_of_squares)
