# SPDX-License-Identifier: Apache-2.0
"""Pretrains the models that other experiments start from: dense, 8, 32 and 64 experts.

make experiments EXPERIMENT=pretraining DATA=FOLDER
"""

from experiments.comparison import Trained, judge_of, run_comparison
from experiments.pretrained import COMPARISON
from experiments.study import main


def verdict(trained: Trained) -> dict:
    """Nothing is claimed of one seed: the numbers are those that others start from."""
    best = max(trained.curves, key=lambda name: trained.final(name)[0])
    return {
        "verdict": "reported",
        "because": "One seed, the runs that other experiments start from; "
        f"{best} end with the best quality.",
        "effect": trained.gain("32 experts", "dense"),
        "effect_of": "32 experts over dense, nats per token",
    }


judge = judge_of(verdict)


if __name__ == "__main__":
    main(__file__, __doc__, lambda study: run_comparison(study, COMPARISON, judge))
