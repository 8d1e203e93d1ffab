# SPDX-License-Identifier: Apache-2.0
"""The block of today's decoders against T5's: 16 experts each, equal FLOPs, the first rung.

make experiments EXPERIMENT=todays_block DATA=FOLDER
"""

from experiments.experiment import ENGLISH
from experiments.ladder import OnLadder, Runs, judge_by, train_all, wall_seconds
from experiments.rates.run import Swept, found_rate, sweep
from experiments.rules import Rule
from experiments.statistics import difference
from experiments.study import Study, main

CONTROL, MODERN = "16 experts", "16 experts, today's block"
# Three matrices of F 256 have the FLOPs of two of F 384; rotation and norms have none that
# count, and heads of keys are as many as those of queries, as T5's.
BLOCK = (
    "ModelConfig.positions='rotary'",
    "ModelConfig.qk_norm='head'",
    "ModelConfig.scale_attention=True",
    "ModelConfig.activation='swiglu'",
    "ModelConfig.d_ff=256",
)
SWEPT = Swept(MODERN, BLOCK)
SEEDS = tuple(range(100, 107))
RULES = (
    Rule(
        "the block of today's decoders is ahead of T5's at equal FLOPs",
        difference(MODERN, CONTROL),
        "ahead",
        margin=None,
        looks=(4, 7),
        seeds=SEEDS,
        expected=0.04,  # of SwiGLU alone, arXiv:2002.05202, Table 1
    ),
)

judge = judge_by(RULES)


def contenders(rate: float) -> Runs:
    """T5's block at the rate that experiments/rates found, and today's at its own."""
    return Runs((OnLadder(CONTROL, (), CONTROL), OnLadder(MODERN, BLOCK, rate)))


def run(study: Study) -> None:
    """Sweeps the rate of today's block, on a seed that judges nothing, then trains both."""
    files, cells = study.files(*ENGLISH), study.cells()
    quality = sweep(study, cells, SWEPT)
    fit = None if study.is_quick else found_rate(quality)
    if fit and fit.rate is None:
        raise ValueError(f"{MODERN}: rate not found: {fit.problem}; its claim is not testable")
    runs = study.at_look(contenders(fit.rate if fit else 0.01), RULES[0])
    trained = train_all(study, cells, runs)
    study.publish(
        cells,
        files,
        judge,
        **trained,
        quality={MODERN: quality},
        wall_seconds=wall_seconds(cells),
    )


if __name__ == "__main__":
    main(__file__, __doc__, run)
