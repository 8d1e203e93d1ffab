# SPDX-License-Identifier: Apache-2.0
"""Initialization scale 1.0 against 0.1: mean and spread over seeds.

make experiments EXPERIMENT=initialization DATA=FOLDER
"""

import statistics

from experiments.comparison import Comparison, Contender, Trained, run_comparison
from experiments.study import main

COMPARISON = Comparison(
    contenders=(
        Contender("scale 1.0", ("ModelConfig.init_scale=1.0",)),
        Contender("scale 0.1", ("ModelConfig.init_scale=0.1",)),
    ),
    seeds=(0, 1, 2, 3, 4),
    steps=300,
    times=False,
)


def verdict(trained: Trained) -> dict:
    """Reproduced: 0.1 has the smaller standard deviation over seeds and the better mean."""
    spread = {name: statistics.stdev(trained.final(name)) for name in trained.curves}
    gain = trained.gain("scale 0.1", "scale 1.0")
    is_smaller = spread["scale 0.1"] < spread["scale 1.0"]
    word = "reproduced" if is_smaller and gain.low > 0 else "not reproduced"
    if is_smaller and not gain.excludes_zero:
        word = "undecided"
    return {
        "verdict": word,
        "because": f"Standard deviation over seeds {spread['scale 0.1']:.4f} at scale 0.1 and "
        f"{spread['scale 1.0']:.4f} at 1.0; the mean differs by {gain.mean:+.3f} nats.",
        "effect": gain,
        "effect_of": "scale 0.1 over 1.0, nats a token",
    }


if __name__ == "__main__":
    main(__file__, __doc__, lambda study: run_comparison(study, COMPARISON, verdict))
