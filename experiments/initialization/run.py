# SPDX-License-Identifier: Apache-2.0
"""Initialization scale 1.0 against 0.1: mean and spread over seeds.

make experiments EXPERIMENT=initialization DATA=FOLDER
"""

import numpy as np

from experiments.comparison import Comparison, Contender, Trained, run_comparison
from experiments.measured import Interval
from experiments.study import main


def _scale(scale: float) -> Contender:
    """Of all matrices, the router's among them."""
    names = ("ModelConfig.init_scale", "SwitchConfig.router_init_scale")
    return Contender(f"scale {scale}", tuple(f"{name}={scale}" for name in names))


COMPARISON = Comparison(
    contenders=(_scale(1.0), _scale(0.1)),
    seeds=(0, 1, 2, 3, 4),
    steps=300,
    # A run that diverges is a result.
    bindings=("TrainingJob.max_skipped_in_a_row=1000000",),
    times=False,
)


def smaller_spread(of: list[float], than: list[float]) -> Interval:
    """How much smaller a standard deviation over seeds is, by bootstrap samples of seeds."""
    values_2S = np.array([of, than])
    drawn = np.random.default_rng(0).integers(0, len(of), (10_000, len(of)))
    smaller, larger = values_2S[:, drawn].std(axis=-1, ddof=1)
    low, high = np.percentile(larger - smaller, (2.5, 97.5))
    mine, other = values_2S.std(axis=-1, ddof=1)
    return Interval(float(other - mine), float(low), float(high))


def verdict(trained: Trained) -> dict:
    """Reproduced: the standard deviation over seeds is smaller at 0.1, by an interval without
    0; not reproduced where it is larger by one; otherwise undecided. The mean is reported."""
    final = [trained.final(f"scale {scale}") for scale in (0.1, 1.0)]
    effect = smaller_spread(*final)
    word = "undecided"
    if effect.excludes(0):
        word = "reproduced" if effect.low > 0 else "not reproduced"
    small, large = (np.std(values, ddof=1) for values in final)
    gain = trained.gain("scale 0.1", "scale 1.0")
    return {
        "verdict": word,
        "because": f"The standard deviation over {len(final[0])} seeds is {small:.4f} at scale "
        f"0.1 and {large:.4f} at 1.0; the mean is {gain.mean:+.3f} ({gain.low:+.3f} to "
        f"{gain.high:+.3f}) nats over that at 1.0.",
        "effect": effect,
        "effect_of": "smaller standard deviation over seeds at scale 0.1, nats per token",
    }


if __name__ == "__main__":
    main(__file__, __doc__, lambda study: run_comparison(study, COMPARISON, verdict))
