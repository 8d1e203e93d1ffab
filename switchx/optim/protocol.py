# SPDX-License-Identifier: Apache-2.0
"""The common part of optimizers: how they are built and applied, and what decays."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Container
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from switchx import tree
from switchx.axes import dims_of, matrix_dims
from switchx.fields import require, without_gin
from switchx.optim.schedules import Schedule, require_schedule

# For moments that begin at 0 while the count goes on: AdamW takes their bias as corrected.
NEW_AT_OLD_COUNT = (
    "at the old count, so that AdamW's first updates of them may be 6.5 times the rate"
)


class Optimizer(Protocol):
    """A frozen description, such as `Adafactor` and `AdamW`."""

    def build(self, schedule: Schedule) -> optax.GradientTransformationExtraArgs:
        """The transformation; its `update` takes `gradient_scale`, a factor of gradients."""


@dataclasses.dataclass(frozen=True)
class Optax:
    """Any optimizer of Optax, or of a user's own module: `make(learning_rate=..., ...)`.

    Moments that mirror the parameters are split over a mesh as these are, other statistics
    are whole on every device (`has_letters`). One that computes over a whole array, such as a
    trust ratio (lamb, lars) or clipping by block, takes all experts of a layer for one
    parameter, and with `ModelConfig.scan_layers` all layers of a stack: `scan_layers` is then
    not a free choice, nor may it change when a run is resumed.

    Attributes:
        make: optimizer's function in a module, such as `optax.lion`; it is called with
            `learning_rate`, here the schedule, and `arguments`.
        arguments: arguments of `make` besides the schedule. `make` gets no others: bindings of
            the function itself in a gin file have no effect.
    """

    make: Callable[..., optax.GradientTransformation]
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        object.__setattr__(self, "make", without_gin(self.make))
        try:
            inspect.signature(self.make).bind(learning_rate=None, **self.arguments)
        except TypeError as error:
            raise ValueError(
                f"Optax.make={self.make.__qualname__} with learning_rate and the arguments "
                f"{sorted(self.arguments)}: {error}; name a function that takes these"
            ) from error

    def build(self, schedule: Schedule) -> optax.GradientTransformationExtraArgs:
        """The transformation, in float32; its updates are added to the parameters.

        Raises:
            ValueError: the schedule is not callable, or what `make` returned is not a
                transformation.
        """
        require_schedule(schedule)
        made = self.make(learning_rate=schedule, **self.arguments)
        require(
            isinstance(made, optax.GradientTransformation),
            f"Optax.make={self.make.__qualname__} gave a {type(made).__name__}; expected an "
            "optax.GradientTransformation",
        )
        return in_float32(made)


def in_float32(
    transformation: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """The transformation on float32 copies of gradients and parameters of any dtype.

    `update(gradients, state, params, gradient_scale=s)` treats every gradient as s times what
    it is.
    """
    inner = optax.with_extra_args_support(transformation)

    def init(params):
        return inner.init(_float32(params))

    def update(gradients, state, params=None, *, gradient_scale=1.0):
        require(params is not None, "update got params=None; pass the parameters")
        gradients = jax.tree.map(lambda g: g * gradient_scale, _float32(gradients))
        return inner.update(gradients, state, _float32(params))

    return optax.GradientTransformationExtraArgs(init, update)


def _float32(values):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), values)


def has_letters(name: str, shape, param_shapes: dict[str, tuple[int, ...]]) -> bool:
    """Whether the name of an array of an optimizer's state ends in its dimension letters.

    Our own optimizers name statistics so: `.../w_in_EDF/v_row_ED`. Those of Optax keep a
    parameter's statistics below its path: a statistic of the parameter's shape (a moment) has
    the parameter's letters, one of another shape has none.

    Args:
        param_shapes: shapes of the parameters by path.
    """
    parts = name.split("/")
    paths = ("/".join(parts[i:]) for i in range(len(parts)))
    mirrored = next((param_shapes[path] for path in paths if path in param_shapes), shape)
    return mirrored == shape and re.search("_[A-Z]+$", parts[-1]) is not None


def param_of(name: str, params: Container[str]) -> str | None:
    """The path of the parameter that an array of an optimizer's state is kept for, or None.

    Args:
        name: a path that ends in the parameter's, or in that and a statistic's name.
        params: the parameters' paths.
    """
    parts = name.split("/")
    for end in (len(parts), len(parts) - 1):
        for start in range(end):
            if (path := "/".join(parts[start:end])) in params:
                return path
    return None


# First letter of a table that is looked up: words, positions, relative position buckets.
_TABLE_LETTERS = "VLU"


def is_decayed(name: str, param) -> bool:
    """Whether a parameter is a matrix that inputs are multiplied by, from its letters.

    Norm scales and biases are not: shrinking them shrinks what they scale or shift, not a
    map. Embedding tables are not: a row gets a gradient only with its word, but would decay
    in every step. Logits (`w_logits_DV`), routers and experts are.

    Args:
        name: path of the parameter; the last part ends in its dimension letters.
        param: anything with a shape.

    Raises:
        ValueError: the name's letters do not fit the shape.
    """
    dims = dims_of(name.rsplit("/", 1)[-1], len(param.shape))
    matrix = matrix_dims(dims)
    return matrix is not None and dims[matrix.num_batch] not in _TABLE_LETTERS


def decay_mask(params):
    """`is_decayed` of every parameter, as a tree of bools."""
    return tree.map_named(is_decayed, params)
