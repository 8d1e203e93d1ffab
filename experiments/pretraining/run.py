# SPDX-License-Identifier: Apache-2.0
"""Pretrains the models that other experiments start from: dense, 8, 32 and 64 experts.

make experiments EXPERIMENT=pretraining DATA=FOLDER
"""

from experiments.comparison import (
    ENGLISH,
    Comparison,
    Contender,
    Trained,
    judge_of,
    run_comparison,
)
from experiments.study import main

COMPARISON = Comparison(
    contenders=(
        Contender("dense", ("ModelConfig.switch=None",)),
        *(Contender(f"{n} experts", (f"NUM_EXPERTS={n}",)) for n in (32, 8, 64)),
    ),
    steps=1000,
    seeds=(0,),
    # Figure 13 fine-tunes what was kept on the way.
    bindings=("checkpointer.Retention.keep_period=250", "TrainingJob.eval_batches=20"),
    data=ENGLISH,
)


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
