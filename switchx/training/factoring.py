# SPDX-License-Identifier: Apache-2.0
"""How Adafactor reads a parameter: which dimensions it keeps apart, and its two sides.

A stack of layers (N), of stages (P) or of experts (E) is a batch: nothing is averaged over
it, so stacked parameters are updated exactly as the same ones kept apart. The rest is a
matrix of rows by columns, or something without two sides (a norm scale, a bias).
"""

import dataclasses
import math

import jax.numpy as jnp

from switchx.axes import dims_of, matrix_dims

Axes = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Factoring:
    """Axes of one parameter by their role, and the names of what is kept for it.

    Attributes:
        suffix: the dimension letters in the parameter's name.
        batch: axes that index independent parameters; always the first ones.
        rows, columns: the two sides of each matrix; both empty when it is not factored.
        ndim: number of axes.
    """

    suffix: str
    batch: Axes
    rows: Axes
    columns: Axes
    ndim: int

    @property
    def is_factored(self) -> bool:
        return bool(self.rows)

    @property
    def within(self) -> Axes:
        """All axes but the batch: what a root mean square is taken over."""
        return tuple(range(len(self.batch), self.ndim))

    def state_name(self, statistic: str, without: Axes = ()) -> str:
        """`v_row` without the columns of `w_in_EDF` -> `v_row_ED`.

        Like a parameter, a statistic carries its dimension letters in its name, without the
        N of a stack, so `axes.dims_of` and the partitioning rules read it as it is.
        """
        extra = self.ndim - len(self.suffix)
        kept = [s for axis, s in enumerate(self.suffix, start=extra) if axis not in without]
        return "_".join([statistic, "".join(kept)]) if kept else statistic


def factoring_of(name: str, shape: tuple[int, ...], min_dim_size: int) -> Factoring:
    """The factoring of parameter `name`.

    Args:
        name: path of the parameter; the last part ends in its dimension letters.
        min_dim_size: a matrix with fewer rows or columns than this is not factored; heads
            and head size count as one side.

    Raises:
        ValueError: the name's letters do not fit the shape.
    """
    leaf_name, ndim = name.rsplit("/", 1)[-1], len(shape)
    dims = dims_of(leaf_name, ndim)
    suffix = dims if leaf_name.endswith(f"_{dims}") else dims[1:]
    matrix = matrix_dims(dims)
    if matrix is None:
        return Factoring(suffix, tuple(range(_num_batch(dims))), (), (), ndim)
    first_row, first_column = matrix.num_batch, matrix.num_batch + matrix.num_rows
    rows, columns = tuple(range(first_row, first_column)), tuple(range(first_column, ndim))
    if min(_size(shape, rows), _size(shape, columns)) < min_dim_size:
        rows = columns = ()
    return Factoring(suffix, tuple(range(first_row)), rows, columns, ndim)


def parameter_scale(param, within: Axes, smallest: float):
    """Root mean square over the axes `within` of a parameter, at least `smallest`, float32.

    Shazeer and Stern 2018 (arXiv:1804.04235), section 8: what a relative step is relative to.
    """
    mean_squares = jnp.mean(jnp.square(param.astype(jnp.float32)), axis=within)
    return jnp.maximum(jnp.sqrt(mean_squares), smallest)


def _num_batch(dims: str) -> int:
    """Leading batch letters of what is not a matrix: `NEF` has 2, `NE` has 1.

    E alone is a vector over experts; E before another letter is one vector an expert.
    """
    count = len(dims) - len(dims.lstrip("NP"))
    return count + (dims[count:].startswith("E") and len(dims) > count + 1)


def _size(shape, axes: Axes) -> int:
    return math.prod(shape[axis] for axis in axes)
