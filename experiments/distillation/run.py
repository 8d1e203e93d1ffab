# SPDX-License-Identifier: Apache-2.0
"""What a dense student gains by a sparse teacher, and what by beginning with a trained model.

    make experiments EXPERIMENT=distillation DATA=FOLDER

Teachers are those of experiments/switch_vs_dense, each the teacher of its seed's student.
"""

from experiments.ladder import DENSE, OnLadder, Runs, judge_by, run_by
from experiments.rules import OF_COMPUTE, Rule
from experiments.statistics import difference
from experiments.study import Study, main
from experiments.sweeps import with_own_rates

TEACHER = "32 experts"
SEEDS = tuple(range(100, 104))
BOTH = "0.75 mix, from non-experts"


def _begun(name: str, model: str, *bindings: str) -> OnLadder:
    """A dense model that begins with a trained one's embeddings, attention and norms."""
    begin = (
        f"INIT_FROM='<pretrained {model}>'",
        r"INIT_RULES=((r'.*/ffn/w_(in|out)_\w+', None),)",
        "INIT_DROP=('.*/ffn/.*',)",
    )
    return OnLadder(name, (DENSE, *begin, *bindings), rate_of="dense")


_TAUGHT = (
    "DISTILLATION=@Distillation()",
    f"Distillation.teacher='<pretrained {TEACHER}>'",
    "Distillation.soft_weight=0.25",
    "Distillation.starts_from_teacher=True",
)
RUNS = Runs(
    (
        OnLadder("dense", (DENSE,), rate_of="dense"),
        _begun("from non-experts alone", TEACHER),
        # As much training before it began, and no experts.
        _begun("from a dense model's", "dense"),
        OnLadder(BOTH, (DENSE, *_TAUGHT), rate_of="dense"),
    ),
    seeds=SEEDS,
)
RULES = (
    Rule(
        "a student of a sparse teacher is ahead of the dense model",
        difference(BOTH, "dense"),
        "ahead",
        margin=OF_COMPUTE,
        looks=(4,),
        seeds=SEEDS,
        expected=0.04,
    ),
)
judge = judge_by(RULES)


def run(study: Study) -> None:
    begun = [each.name for each in RUNS.contenders[1:]]
    runs, quality = with_own_rates(study, study.cells(), RUNS, begun)
    run_by(study, runs, RULES, judge, quality=quality)


if __name__ == "__main__":
    main(__file__, __doc__, run)
