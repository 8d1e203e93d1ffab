# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints are kept: the newest few, and the best by one metric."""

import dataclasses
import math
import numbers
from typing import Any, Literal

import orbax.checkpoint as ocp


@dataclasses.dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept.

    Attributes:
        keep_last: so many of the newest, at least 1.
        keep_best: so many of the best among those saved with an evaluation.
        best_metric, best_mode: the metric that is compared, and which end of it is best.
    """

    keep_last: int = 3
    keep_best: int = 1
    best_metric: str = "neg_log_perplexity"
    best_mode: Literal["max", "min"] = "max"

    def __post_init__(self):
        if self.keep_last < 1:
            raise ValueError(f"Retention.keep_last={self.keep_last}; use at least 1")
        if self.keep_best < 0:
            raise ValueError(f"Retention.keep_best={self.keep_best}; use 0 or more")
        if self.best_mode not in ("max", "min"):
            raise ValueError(f"Retention.best_mode={self.best_mode!r}; use 'max' or 'min'")

    def score(self, metrics: dict[str, Any] | None) -> float | None:
        """`best_metric`, signed so that higher is better.

        Returns:
            None without metrics, or when the metric is not finite.

        Raises:
            ValueError: there are metrics, but not this one.
        """
        if metrics is None:
            return None
        if self.best_metric not in metrics:
            raise ValueError(
                f"Retention.best_metric={self.best_metric!r} is not among the metrics "
                f"{', '.join(metrics)}; use one of them"
            )
        value = float(metrics[self.best_metric])
        if not math.isfinite(value):
            return None
        return value if self.best_mode == "max" else -value

    def policy(self, scores: dict[int, float]) -> ocp.checkpoint_managers.PreservationPolicy:
        """The same for Orbax; `scores` by step may grow."""
        policies = ocp.checkpoint_managers
        return policies.AnyPreservationPolicy(
            [policies.LatestN(self.keep_last), KeepBest(self.keep_best, scores)]
        )


@dataclasses.dataclass
class KeepBest:
    """Orbax preservation policy: the `num` checkpoints with the highest scores."""

    num: int
    scores: dict[int, float]

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        del context
        scored = [info.step for info in checkpoints if info.step in self.scores]
        best = sorted(scored, key=self.scores.__getitem__, reverse=True)[: self.num]
        return [info.step in best for info in checkpoints]


def numbers_of(metrics: dict[str, Any] | None) -> dict[str, float]:
    """The finite numbers among metrics: what a manifest keeps of an evaluation."""
    return {
        name: float(value)
        for name, value in (metrics or {}).items()
        if isinstance(value, numbers.Real) and math.isfinite(value)
    }
