# SPDX-License-Identifier: Apache-2.0
"""What every optimizer has in common: how it is built and applied, and what decays."""

from typing import Protocol

import jax
import optax

from switchx import tree
from switchx.axes import dims_of, matrix_dims
from switchx.optim.schedules import Schedule


class Optimizer(Protocol):
    """A frozen description, as `Adafactor` and `AdamW`."""

    def build(self, schedule: Schedule) -> optax.GradientTransformationExtraArgs:
        """The transformation; its `update` takes `gradient_scale`, a factor of them all."""


def apply_updates(params, updates):
    """`params + updates`, each in its parameter's dtype.

    As `optax.apply_updates`. The sum is
    rounded to the nearest value: below float32, an update less than half the distance to a
    parameter's neighbour (2^-9 of a bfloat16 parameter) is lost, so keep parameters that
    are trained in float32.

    To leave parameters and state as they were when a gradient is not finite, put the whole
    update under `jax.lax.cond`: it works in place. `jnp.where` afterwards makes XLA copy
    moments and parameters (AdamW takes twice the time and three times the memory).
    """
    return jax.tree.map(lambda w, update: (w + update).astype(w.dtype), params, updates)


# First letter of a table that is looked up: words, positions, relative position buckets.
_TABLE_LETTERS = "VLU"


def is_decayed(name: str, param) -> bool:
    """Whether a parameter is a matrix that inputs are multiplied by, from its letters.

    Norm scales and biases are not: shrinking them shrinks what they scale or shift, not a
    map. Embedding tables are not: a row's gradient comes only with its word, its decay
    would come every step. Logits (`w_logits_DV`), routers and experts are.

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
