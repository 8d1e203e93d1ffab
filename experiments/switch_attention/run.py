# SPDX-License-Identifier: Apache-2.0
"""Experts in the FFN, in the attention and in both, each at its own rate, in float32.

make experiments EXPERIMENT=switch_attention DATA=FOLDER
"""

from experiments.ladder import WITH_CAPACITY, OnLadder, Runs, judge_by, run_by
from experiments.rules import OF_COMPUTE, Rule
from experiments.statistics import difference
from experiments.study import Study, main
from experiments.sweeps import with_own_rates

FFN, ATTENTION, BOTH = "FFN", "attention", "both"
SEEDS = tuple(range(100, 107))
# Experts in the attention have slots: twice those of an even share in training, and one for
# every token in evaluation.
_SLOTS = (
    *WITH_CAPACITY,
    "SwitchConfig.capacity_factor=2.0",
    "SwitchConfig.eval_capacity_factor=16.0",
)
RUNS = Runs(
    tuple(
        OnLadder(name, (f"SwitchConfig.sublayers='{where}'", *_SLOTS))
        for name, where in ((FFN, "ffn"), (ATTENTION, "attention"), (BOTH, "both"))
    ),
    seeds=SEEDS,
)
RULES = (
    Rule(
        "experts in the FFN and the attention are ahead of experts in the FFN",
        difference(BOTH, FFN),
        "ahead",
        margin=OF_COMPUTE,
        looks=(4, 7),
        seeds=SEEDS,
        expected=0.035,  # Table 10
    ),
)
judge = judge_by(RULES)


def run(study: Study) -> None:
    runs, quality = with_own_rates(study, study.cells(), RUNS, [ATTENTION, BOTH])
    run_by(study, runs, RULES, judge, quality=quality)


if __name__ == "__main__":
    main(__file__, __doc__, run)
