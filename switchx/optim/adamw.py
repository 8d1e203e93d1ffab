# SPDX-License-Identifier: Apache-2.0
"""AdamW: Optax's, with float32 moments and decay of the layers' matrices only.

Loshchilov and Hutter 2019 (arXiv:1711.05101), algorithm 2; as in Optax and PyTorch the
decay is multiplied by the learning rate.
"""

import dataclasses

import optax

from switchx.fields import require_above_zero, require_at_least, require_below_one
from switchx.optim.protocol import decay_mask, in_float32
from switchx.optim.schedules import Schedule, require_schedule


@dataclasses.dataclass(frozen=True)
class AdamW:
    """AdamW's settings.

    Attributes:
        beta1, beta2: decay of the first and second moment.
        epsilon: epsilon that is added to the root of the second moment.
        weight_decay: decay rate: times the learning rate, it is the part of every decayed
            parameter (`is_decayed`: layers' matrices) that each step takes away.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.01

    def __post_init__(self):
        require_below_one(self, "beta1", "beta2")
        require_above_zero(self, "epsilon")
        require_at_least(self, 0, "weight_decay")

    def build(self, schedule: Schedule) -> optax.GradientTransformationExtraArgs:
        """The transformation; its updates, float32, are what is added to the parameters.

        Raises:
            ValueError: the schedule is not callable; at `update`, no parameters.
        """
        require_schedule(schedule)
        return in_float32(
            optax.adamw(
                schedule,
                b1=self.beta1,
                b2=self.beta2,
                eps=self.epsilon,
                weight_decay=self.weight_decay,
                mask=decay_mask,
            )
        )
