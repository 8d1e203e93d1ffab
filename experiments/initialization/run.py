# SPDX-License-Identifier: Apache-2.0
"""Initialization scale 1.0 against 0.1: mean and spread over seeds.

make experiments EXPERIMENT=initialization DATA=FOLDER
"""

import numpy as np

from experiments.comparison import Trained, judge_of, run_comparison
from experiments.experiment import Comparison, Contender
from experiments.statistics import spread_ratio
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


def found(trained: Trained) -> dict:
    """What was found."""
    final = [trained.final(f"scale {scale}") for scale in (0.1, 1.0)]
    effect = spread_ratio(*final)
    small, large = (np.std(values, ddof=1) for values in final)
    gain = trained.gain("scale 0.1", "scale 1.0")
    return {
        "because": f"The standard deviation over {len(final[0])} seeds is {small:.4f} at scale "
        f"0.1 and {large:.4f} at 1.0; the mean is {gain} nats over that at 1.0.",
        "effect": effect,
        "effect_of": "standard deviation over seeds at scale 0.1 over that at 1.0",
    }


judge = judge_of(found)


if __name__ == "__main__":
    main(__file__, __doc__, lambda study: run_comparison(study, COMPARISON, judge))
