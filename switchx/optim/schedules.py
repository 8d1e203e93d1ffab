# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules: frozen descriptions, called with the number of updates so far."""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from switchx.fields import at_resume, require, require_at_least

# Updates so far (an int or an int32 scalar, 0 for the first) -> learning rate, float32.
Schedule = Callable[[jax.typing.ArrayLike], jax.Array]


def require_schedule(schedule) -> None:
    """Raises ValueError unless `schedule` can be called, as a bare number cannot."""
    require(
        callable(schedule),
        f"schedule={schedule!r} is not a schedule; use Constant({schedule!r})",
    )


@dataclasses.dataclass(frozen=True)
class Constant:
    """A constant learning rate; T5 fine-tunes with 1e-3.

    Attributes:
        value: the rate.
    """

    value: float

    def __post_init__(self):
        _require_rate("Constant.value", self.value)

    def __call__(self, step):
        del step
        return jnp.asarray(self.value, jnp.float32)


@dataclasses.dataclass(frozen=True)
class InverseSquareRoot:
    """`base / sqrt(max(step, warmup_steps))`: T5's schedule for pretraining.

    Raffel et al. 2020 (arXiv:1910.10683), section 3.1.2. With the default 10000 the rate is
    0.01 for that long and falls from there: there is no ramp from zero.

    Attributes:
        base: the rate times the square root of the step.
        warmup_steps: steps at the first rate.
    """

    base: float = 1.0
    warmup_steps: int = 10_000

    def __post_init__(self):
        _require_rate("InverseSquareRoot.base", self.base)
        require_at_least(self, 1, "warmup_steps")

    def __call__(self, step):
        step = jnp.asarray(step, jnp.float32)
        return self.base * jax.lax.rsqrt(jnp.maximum(step, self.warmup_steps))


@dataclasses.dataclass(frozen=True)
class LinearWarmup:
    """`peak * min(1, step / warmup_steps)`: from 0 up, then constant.

    Attributes:
        peak: the last rate.
        warmup_steps: steps until it is reached.
    """

    peak: float
    warmup_steps: int

    def __post_init__(self):
        _require_rate("LinearWarmup.peak", self.peak)
        require_at_least(self, 1, "warmup_steps")

    def __call__(self, step):
        schedule = optax.linear_schedule(0.0, self.peak, self.warmup_steps)
        return jnp.asarray(schedule(step), jnp.float32)


@dataclasses.dataclass(frozen=True)
class WarmupCosine:
    """Linear from 0 to `peak`, then half a cosine down to `final`, then constant.

    Attributes:
        peak: the largest rate.
        warmup_steps: steps until it is reached.
        final: the last rate.
        total_steps: the step at which `final` is reached, warm-up included.
    """

    peak: float
    warmup_steps: int
    total_steps: int = at_resume()
    final: float = 0.0

    def __post_init__(self):
        _require_rate("WarmupCosine.peak", self.peak)
        require_at_least(self, 1, "warmup_steps")
        require(
            self.total_steps > self.warmup_steps,
            f"WarmupCosine.total_steps={self.total_steps} leaves nothing after "
            f"warmup_steps={self.warmup_steps}; use more steps or a shorter warm-up "
            "(COSINE_STEPS and WARMUP_STEPS of configs/optimizers/adamw.gin)",
        )
        require(
            0 <= self.final <= self.peak,
            f"WarmupCosine.final={self.final}; use a rate from 0 to peak={self.peak}",
        )

    def __call__(self, step):
        schedule = optax.warmup_cosine_decay_schedule(
            0.0, self.peak, self.warmup_steps, self.total_steps, self.final
        )
        return jnp.asarray(schedule(step), jnp.float32)


def _require_rate(name: str, rate: float) -> None:
    require(0 < rate < math.inf, f"{name}={rate}; use a learning rate above 0")
