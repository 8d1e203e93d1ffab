# SPDX-License-Identifier: Apache-2.0
"""Adafactor as T5 uses it, with every expert and every stacked layer a matrix of its own.

Shazeer and Stern 2018 (arXiv:1804.04235), algorithms 4 to 6, in T5X's order of operations.
With g the gradient, G = g^2 + epsilon1 and beta2 = 1 - (step + 1)^-decay_rate:

    v_row = beta2 v_row + (1 - beta2) mean of G over columns, v_col likewise over rows
    y     = g / sqrt(v_row v_col / mean(v_row))           (a matrix that is not factored,
    y     = y / max(1, rms(y) / clipping_threshold)        a vector: g / sqrt(v))
    u     = learning rate * max(epsilon2, rms(w)) * y
    w     = w - (momentum's average of u, if any) - weight_decay_rate w

A stack of layers (N), of stages (P) or of experts (E) is a batch of parameters: rms and all
means stay within one matrix, so stacked parameters are updated like the same ones kept apart.
The rest of a parameter is a matrix of rows by columns, or something without two sides (a norm
scale, a bias).
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from switchx import tree
from switchx.axes import dims_of, matrix_dims
from switchx.fields import require, require_above_zero, require_at_least, require_below_one
from switchx.optim.protocol import is_decayed
from switchx.optim.schedules import Schedule, require_schedule
from switchx.partitioning.mesh import platform_of

Axes = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Factoring:
    """Axes of one parameter by their role, and the names of its statistics.

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
        """All axes except the batch: those over which a root mean square is taken."""
        return tuple(range(len(self.batch), self.ndim))

    def state_name(self, statistic: str, without: Axes = ()) -> str:
        """`v_row` without the columns of `w_in_EDF` -> `v_row_ED`.

        Like a parameter, a statistic carries its dimension letters in its name, without the
        N of a stack, so `axes.dims_of` and the partitioning rules read it as it is.
        """
        extra = self.ndim - len(self.suffix)
        kept = [s for axis, s in enumerate(self.suffix, start=extra) if axis not in without]
        return "_".join([statistic, "".join(kept)]) if kept else statistic


class AdafactorState(NamedTuple):
    """Steps taken, and for each parameter a dictionary of float32 statistics.

    A factored `w_in_EDF` has `v_row_ED` and `v_col_EF`, any other parameter `v_` and its
    letters, and each has `momentum_` and its letters if there is momentum.
    """

    count: jax.Array
    statistics: dict


@dataclasses.dataclass(frozen=True)
class Adafactor:
    """Adafactor's settings, named and set as in T5X.

    Attributes:
        multiply_by_parameter_scale: learning rates are relative to a parameter's own root
            mean square.
        beta1: momentum over scaled updates; None keeps no average.
        decay_rate: exponent of the second moments' decay.
        clipping_threshold: largest root mean square of an update before it is scaled by
            the learning rate and the parameter; None for no limit.
        weight_decay_rate: part of every decayed parameter (`is_decayed`: layers' matrices)
            that each step takes away, whatever the learning rate; None for none.
        min_dim_size_to_factor: matrices with a side below this keep every second moment.
            T5X exempts stacked and expert parameters from it; here stacking changes nothing.
        epsilon1: epsilon that is added to squared gradients.
        epsilon2: the smallest parameter scale.
    """

    multiply_by_parameter_scale: bool = True
    beta1: float | None = None
    decay_rate: float = 0.8
    clipping_threshold: float | None = 1.0
    weight_decay_rate: float | None = None
    min_dim_size_to_factor: int = 128
    epsilon1: float = 1e-30
    epsilon2: float = 1e-3

    def __post_init__(self):
        require_at_least(self, 1, "min_dim_size_to_factor")
        require_at_least(self, 0, "epsilon2")
        require_above_zero(self, "decay_rate", "clipping_threshold", "epsilon1")
        require_below_one(self, "beta1", "weight_decay_rate")

    def build(self, schedule: Schedule) -> optax.GradientTransformationExtraArgs:
        """The transformation; its updates, float32, are what is added to the parameters.

        `update(gradients, state, params, gradient_scale=s)` treats every gradient as s
        times what it is, at no cost: clipping, loss scales and averages go there.

        Raises:
            ValueError: the schedule is not callable; at `update`, no parameters.
        """
        require_schedule(schedule)

        def init(params):
            return AdafactorState(
                jnp.zeros((), jnp.int32), tree.map_named(self._init_statistics, params)
            )

        def update(gradients, state, params=None, *, gradient_scale=1.0):
            require(params is not None, "update got params=None; pass the parameters")
            step = _Step(
                learning_rate=schedule(state.count),
                beta2=1.0 - (state.count + 1.0) ** -self.decay_rate,
                gradient_scale=gradient_scale,
            )
            results = tree.map_named(
                lambda *leaf: self._update_parameter(step, *leaf),
                params,
                gradients,
                state.statistics,
            )
            updates, statistics = (
                jax.tree.map(lambda _, result, part=part: result[part], params, results)
                for part in (0, 1)
            )
            return updates, AdafactorState(optax.safe_increment(state.count), statistics)

        return optax.GradientTransformationExtraArgs(init, update)

    def _init_statistics(self, name, param):
        factoring = factoring_of(name, param.shape, self.min_dim_size_to_factor)
        without = {"v": ()}  # the axes that each statistic is a mean over
        if factoring.is_factored:
            without = {"v_row": factoring.columns, "v_col": factoring.rows}
        if self.beta1 is not None:
            without["momentum"] = ()
        zeros = {}
        for statistic, axes in without.items():
            shape = [n for axis, n in enumerate(param.shape) if axis not in axes]
            zeros[factoring.state_name(statistic, axes)] = jnp.zeros(shape, jnp.float32)
        return zeros

    def _update_parameter(self, step: "_Step", name, param, gradient, statistics):
        """Update and new statistics of one parameter."""
        factoring = factoring_of(name, param.shape, self.min_dim_size_to_factor)
        scale = -step.learning_rate
        if self.multiply_by_parameter_scale:
            scale = scale * parameter_scale(param, factoring.within, self.epsilon2)
        scale = jnp.broadcast_to(scale, param.shape[: len(factoring.batch)])
        updated = self._factored if factoring.is_factored else self._unfactored
        update, new = updated(step, factoring, scale, gradient, statistics)
        if self.beta1 is not None:
            name_m = factoring.state_name("momentum")
            update = self.beta1 * statistics[name_m] + (1.0 - self.beta1) * update
            new[name_m] = update
        if self.weight_decay_rate and is_decayed(name, param):
            update = update - self.weight_decay_rate * param.astype(jnp.float32)
        return update, new

    def _factored(self, step, factoring, scale, gradient, statistics):
        gradient = gradient.astype(jnp.float32)
        name_row = factoring.state_name("v_row", factoring.columns)
        name_col = factoring.state_name("v_col", factoring.rows)
        of_rows = jnp.mean(jnp.square(gradient), axis=factoring.columns)
        again = gradient
        if platform_of(jax.sharding.get_abstract_mesh()) == "cpu":
            # XLA writes out squares that two reductions share there; elsewhere it fuses both.
            again = jax.lax.optimization_barrier(gradient)
        of_columns = jnp.mean(jnp.square(again), axis=factoring.rows)
        v_row = step.average(statistics[name_row], of_rows, self.epsilon1)
        v_col = step.average(statistics[name_col], of_columns, self.epsilon1)
        row_axes = tuple(range(len(factoring.batch), v_row.ndim))
        row = jax.lax.rsqrt(v_row / jnp.mean(v_row, axis=row_axes, keepdims=True))
        row, column = row * step.gradient_scale, jax.lax.rsqrt(v_col)
        # The mean square of row * gradient * column, rows first: XLA fuses the factor of a row
        # into a reduction, and writes out an array of the gradient's size for that of a column.
        by_row = gradient * jnp.expand_dims(row, factoring.columns)
        means = jnp.mean(jnp.square(by_row), axis=factoring.rows) * jnp.square(column)
        means = jnp.mean(means, axis=tuple(range(len(factoring.batch), means.ndim)))
        row = row * jnp.expand_dims(scale / self._clipping(means), row_axes)
        by_row = gradient * jnp.expand_dims(row, factoring.columns)
        update = by_row * jnp.expand_dims(column, factoring.rows)
        return update, {name_row: v_row, name_col: v_col}

    def _unfactored(self, step, factoring, scale, gradient, statistics):
        gradient = gradient.astype(jnp.float32)
        name_v = factoring.state_name("v")
        v = step.average(statistics[name_v], jnp.square(gradient), self.epsilon1)
        y = gradient * step.gradient_scale * jax.lax.rsqrt(v)
        scale = scale / self._clipping(jnp.mean(jnp.square(y), axis=factoring.within))
        return jnp.expand_dims(scale, factoring.within) * y, {name_v: v}

    def _clipping(self, mean_squares):
        """The divisor of an update with these mean squares."""
        if self.clipping_threshold is None:
            return 1.0
        return jnp.maximum(1.0, jnp.sqrt(mean_squares) / self.clipping_threshold)


@dataclasses.dataclass(frozen=True)
class _Step:
    """The scalars of one step."""

    learning_rate: jax.Array
    beta2: jax.Array
    gradient_scale: jax.Array | float

    def average(self, old, mean_squares, epsilon: float):
        """The second moment after this step's mean squares (of unscaled gradients)."""
        new = jnp.square(self.gradient_scale) * mean_squares + epsilon
        return self.beta2 * old + (1.0 - self.beta2) * new


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
    first_row = matrix.num_batch
    first_column = matrix.num_batch + matrix.num_rows
    rows = tuple(range(first_row, first_column))
    columns = tuple(range(first_column, ndim))
    if min(math.prod(shape[axis] for axis in side) for side in (rows, columns)) < min_dim_size:
        rows = columns = ()
    return Factoring(suffix, tuple(range(first_row)), rows, columns, ndim)


def parameter_scale(param, within: Axes, smallest: float):
    """Root mean square over the axes `within` of a parameter, at least `smallest`, float32.

    Shazeer and Stern 2018 (arXiv:1804.04235), section 8: the scale of relative steps.
    """
    mean_squares = jnp.mean(jnp.square(param.astype(jnp.float32)), axis=within)
    return jnp.maximum(jnp.sqrt(mean_squares), smallest)


def _num_batch(dims: str) -> int:
    """Number of leading batch letters of what is not a matrix: 2 in `NEF`, 1 in `NE`.

    E alone is a vector over experts; E before another letter is one vector per expert.
    """
    count = len(dims) - len(dims.lstrip("NP"))
    return count + (dims[count:].startswith("E") and len(dims) > count + 1)
