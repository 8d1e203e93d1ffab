# SPDX-License-Identifier: Apache-2.0
"""A learning rate that is right until a step, and ten times too high from there on."""

import dataclasses

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Jump:
    """The rate of the small run, times ten from `step` on."""

    step: int = 200

    def __call__(self, step):
        return jnp.where(step < self.step, 0.1, 1.0)


GIN = """\
from __gin__ import dynamic_registration
from tests.integration import rates
SCHEDULE = @rates.Jump()
"""
