# SPDX-License-Identifier: Apache-2.0
"""float32, and bfloat16 with a float32 router and with a bfloat16 one.

make experiments EXPERIMENT=selective_precision DATA=FOLDER

With logits 30 times as large a bfloat16 router should hurt; only where it does is it a test.
"""

from typing import Any

from experiments.ladder import OnLadder, Runs, judge_by, run_by
from experiments.measured import finite_of
from experiments.rules import OF_COMPUTE, Rule
from experiments.statistics import difference, estimate
from experiments.study import main

EXACT, SELECTIVE = "float32", "selective"
SEEDS = tuple(range(100, 107))
SEEN = "a bfloat16 router hurts at logits x 30"
_GOES_ON = "TrainingJob.max_skipped_in_a_row=1000000"  # a run that diverges is a result
_COMPUTE = "config.Precision.compute='bfloat16'"
_ROUTER = "config.Precision.router='bfloat16'"
_LARGE = "SwitchConfig.router_init_scale=90.0"  # of a variance: 30 squared times 0.1
CONTROL, HURT = f"{EXACT}, logits x 30", "bfloat16, logits x 30"


def _model(name: str, *bindings: str) -> OnLadder:
    return OnLadder(name, (*bindings, _GOES_ON))


RUNS = Runs(
    (
        _model(EXACT),
        _model(SELECTIVE, _COMPUTE),
        _model("bfloat16", _COMPUTE, _ROUTER),
        _model(CONTROL, _LARGE),
        _model(HURT, _LARGE, _COMPUTE, _ROUTER),
    ),
    seeds=SEEDS,
)
RULES = (
    Rule(
        "selective precision is as good as float32",
        difference(SELECTIVE, EXACT),
        "equivalent",
        margin=OF_COMPUTE,
        looks=(4, 7),
        seeds=SEEDS,
        expected=0.0,
        gates=(SEEN,),
    ),
)


def is_harm_seen(results: dict[str, Any]) -> bool:
    """Whether the bfloat16 router with large logits diverged, or is behind the float32 one by
    an interval that leaves out 0."""
    finals = finite_of(results)
    if CONTROL not in finals or HURT not in finals:
        return CONTROL in finals
    return estimate(finals, difference(HURT, CONTROL)).interval().high < 0


def judge(results: dict[str, Any]) -> dict[str, Any]:
    gates = {SEEN: is_harm_seen(results)}
    return judge_by(RULES)(results | {"gates": gates})


if __name__ == "__main__":
    main(__file__, __doc__, lambda study: run_by(study, RUNS, RULES, judge))
