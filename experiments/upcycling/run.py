# SPDX-License-Identifier: Apache-2.0
"""Experts that begin as copies of a dense model's FFN, against training from scratch.

    make experiments EXPERIMENT=upcycling DATA=FOLDER

All go on, or begin, for 300 steps; the upcycled and the dense model begin with the dense run
of experiments/pretraining.
"""

import math

from experiments.comparison import Trained, judge_of, run_comparison
from experiments.experiment import GIN_FILE, Comparison, Contender
from experiments.study import Study, main

EXPERTS = 8

COMPARISON = Comparison(
    contenders=(
        Contender(
            "dense, continued", ("ModelConfig.switch=None", "INIT_FROM='<pretrained dense>'")
        ),
        Contender(
            f"upcycled, {EXPERTS} experts",
            (
                f"NUM_EXPERTS={EXPERTS}",
                "RouterConfig.num_selected=2",
                "RouterConfig.gate='normalized'",
                "INIT_FROM='<run upcycled>'",
            ),
        ),
        Contender(
            f"from scratch, {EXPERTS} experts",
            (
                f"NUM_EXPERTS={EXPERTS}",
                "RouterConfig.num_selected=2",
                "RouterConfig.gate='normalized'",
            ),
        ),
    ),
    steps=300,
)


def verdict(trained: Trained) -> dict:
    """Not of the papers: reported, upcycled over dense at equal steps and by time, and over
    scratch, which takes the same time."""
    dense, upcycled, scratch = trained.curves
    gain, over_scratch = (trained.gain(upcycled, other) for other in (dense, scratch))
    in_time = trained.speedup_in_time(upcycled, dense)
    by_time = "not at the dense model's quality on some seed"
    if not math.isnan(in_time.mean):
        by_time = f"at the dense model's quality in {1 / in_time.mean:.2f} of its time"
    return {
        "verdict": "reported",
        "because": f"After 300 more steps upcycled experts are {gain.mean:+.3f} nats over "
        f"the continued dense model, {by_time}, and {over_scratch.mean:+.3f} over experts "
        "trained from scratch for as many.",
        "effect": gain,
        "effect_of": "upcycled over dense, nats per token",
    }


judge = judge_of(verdict)


def run(study: Study) -> dict:
    study.command(
        study.cells(),
        "upcycled",
        "reshape",
        f"--gin_file={GIN_FILE}",
        "--gin.ModelConfig.switch=None",
        f"--gin.FILES=<data {' '.join(COMPARISON.data)}>",
        "--model_dir=<pretrained dense>",
        "--output=<run upcycled>",
        f"--experts={EXPERTS}",
        "--every=1",
    )
    return run_comparison(study, COMPARISON, judge)


if __name__ == "__main__":
    main(__file__, __doc__, run)
