# SPDX-License-Identifier: Apache-2.0
"""Initialization scale 1.0 against 0.1, each at its own rate: mean and spread over seeds.

make experiments EXPERIMENT=initialization DATA=FOLDER
"""

import dataclasses
from typing import Any

from experiments.ladder import OnLadder, Runs, judge_by, run_by
from experiments.measured import finite_of
from experiments.rules import OF_COMPUTE, Rule
from experiments.statistics import difference, spread_ratio
from experiments.study import Study, main
from experiments.sweeps import with_own_rates

SMALL, LARGE = "scale 0.1", "scale 1.0"
SEEDS = tuple(range(100, 110))
# Of all matrices, the router's among them; a run that diverges is a result.
_SCALES = ("ModelConfig.init_scale=1.0", "SwitchConfig.router_init_scale=1.0")
_GOES_ON = ("TrainingJob.max_skipped_in_a_row=1000000",)
RUNS = Runs((OnLadder(SMALL, _GOES_ON), OnLadder(LARGE, (*_SCALES, *_GOES_ON))), seeds=SEEDS)
RULES = (
    Rule(
        "scale 0.1 is ahead of scale 1.0",
        difference(SMALL, LARGE),
        "ahead",
        margin=OF_COMPUTE,
        looks=(5, 10),
        seeds=SEEDS,
        expected=0.1,
    ),
)


def judge(results: dict[str, Any]) -> dict[str, Any]:
    """By the rule; beside it the spread over seeds, by Fisher's F."""
    found, finals = judge_by(RULES)(results), finite_of(results)
    if {SMALL, LARGE} <= finals.keys():
        ratio = dataclasses.asdict(spread_ratio(finals[SMALL], finals[LARGE]))
        row = {"standard deviation over seeds at scale 0.1 over that at 1.0 (95%)": ratio}
        found["tables"].append({"title": "The spread, which judges nothing:", "rows": [row]})
    return found


def run(study: Study) -> None:
    runs, quality = with_own_rates(study, study.cells(), RUNS, [LARGE])
    run_by(study, runs, RULES, judge, quality=quality)


if __name__ == "__main__":
    main(__file__, __doc__, run)
