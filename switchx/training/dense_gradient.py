# SPDX-License-Identifier: Apache-2.0
"""What Adafactor asks of a matrix gradient, and the answers of one that is an array.

Each method reads the gradient once and keeps nothing of its size, so that an update is
four passes over the gradient and two over the parameter.
"""

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp

from switchx.training.factoring import Axes, Factoring


class MatrixGradient(Protocol):
    """A batch of matrices; `row` and `column` factors have the shapes of the statistics."""

    def row_mean_squares(self) -> jax.Array:
        """Mean square of each row."""

    def column_mean_squares(self) -> jax.Array:
        """Mean square of each column."""

    def mean_squares(self, row, column) -> jax.Array:
        """Mean square of `row * gradient * column` of each matrix."""

    def scaled(self, row, column):
        """`row * gradient * column`, float32; what `apply_updates` adds to a parameter."""


@dataclasses.dataclass(frozen=True)
class DenseGradient:
    """A gradient that is an array of the parameter's shape, as `MatrixGradient`."""

    array: jax.Array
    factoring: Factoring

    def row_mean_squares(self):
        return _mean_squares(self.array, self.factoring.columns)

    def column_mean_squares(self):
        # Read after the rows: to XLA another gradient, see _mean_squares.
        array, _ = jax.lax.optimization_barrier((self.array, self.row_mean_squares()))
        return _mean_squares(array, self.factoring.rows)

    def mean_squares(self, row, column):
        # Over rows first: XLA's CPU reductions fuse the factor of a row, not of a column.
        by_row = self.array.astype(jnp.float32) * self._along_rows(row)
        means = jnp.mean(jnp.square(by_row), axis=self.factoring.rows) * jnp.square(column)
        return jnp.mean(means, axis=tuple(range(len(self.factoring.batch), means.ndim)))

    def scaled(self, row, column):
        column = jnp.expand_dims(column, self.factoring.rows)
        return self.array.astype(jnp.float32) * self._along_rows(row) * column

    def _along_rows(self, row):
        return jnp.expand_dims(row, self.factoring.columns)


def _mean_squares(array, axes: Axes):
    """Means of squares over the axes, float32.

    XLA's CPU compiler writes a square out in full when two different sums share it: of rows
    and of columns, of either and of the gradient norm. That makes the whole update 1.4 to
    2.7 times slower. Behind a barrier it is not recognised as the same. Guarded by
    test_dense_gradient.py::test_update_needs_no_memory_of_the_gradients_size.
    """
    array = jax.lax.optimization_barrier(array).astype(jnp.float32)
    return jnp.mean(jnp.square(array), axis=axes)
