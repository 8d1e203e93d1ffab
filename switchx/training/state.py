# SPDX-License-Identifier: Apache-2.0
"""The training state: everything that a step changes and a checkpoint keeps."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from switchx.models.config import ModelConfig
from switchx.models.params import init_params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """One value of everything that training changes.

    Attributes:
        step: steps taken, skipped ones among them.
        params: nested dictionary of parameters.
        opt_state: the optimizer's state.
        key_data: the run's random key; each step folds its number in.
        skipped: steps left out so far for a non-finite loss or gradient.
        skipped_in_a_row: those since the last good step; float16's do not count while a
            smaller loss scale may mend them.
        loss_scale: what the loss is multiplied by before the backward pass, so that
            float16 gradients do not underflow; 1 in other dtypes.
        good_steps: good steps since the loss scale last changed.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    key_data: jax.Array
    skipped: jax.Array
    skipped_in_a_row: jax.Array
    loss_scale: jax.Array
    good_steps: jax.Array

    @property
    def key(self):
        """The random key of this step alone."""
        return jax.random.fold_in(jax.random.wrap_key_data(self.key_data), self.step)


def init_state(
    config: ModelConfig, optimizer: optax.GradientTransformation, seed: int, params=None
) -> TrainState:
    """A state at step 0; `params` of an earlier run, or drawn from `seed`."""
    init_key, run_key = jax.random.split(jax.random.key(seed))
    params = init_params(config, init_key) if params is None else params

    def zero():  # a new array each time: donated buffers must not be shared
        return jnp.zeros((), jnp.int32)

    is_half = config.precision.compute == "float16"
    return TrainState(
        step=zero(),
        params=params,
        opt_state=optimizer.init(params),
        key_data=jax.random.key_data(run_key),
        skipped=zero(),
        skipped_in_a_row=zero(),
        loss_scale=jnp.full((), 2.0**15 if is_half else 1.0, jnp.float32),
        good_steps=zero(),
    )
