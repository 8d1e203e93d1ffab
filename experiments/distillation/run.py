# SPDX-License-Identifier: Apache-2.0
"""How much of a sparse teacher's gain a dense student keeps, by technique (Table 6).

    make experiments EXPERIMENT=distillation DATA=FOLDER

The teacher is the 32 experts of experiments/pretraining after as many steps as a student takes.
"""

import dataclasses

from experiments.comparison import Comparison, Contender, Trained, run_comparison
from experiments.study import Cells, Study, main, run_name

STEPS = 1000
TEACHER = "32 experts"
_DENSE = "ModelConfig.switch=None"
STEP = f"distillation.Distillation.step={STEPS}"


def _distilled(name: str, soft_weight: float, is_initialized: bool) -> Contender:
    bindings = (
        _DENSE,
        "DISTILLATION=@distillation.Distillation()",
        f"distillation.Distillation.teacher='<pretrained {TEACHER}>'",
        STEP,
        f"distillation.Distillation.soft_weight={soft_weight}",
        f"distillation.Distillation.starts_from_teacher={is_initialized}",
    )
    return Contender(name, bindings)


COMPARISON = Comparison(
    contenders=(
        Contender("dense", (_DENSE,)),
        _distilled("distilled", 1.0, False),
        _distilled("distilled, from non-experts", 1.0, True),
        _distilled("0.75 mix", 0.25, False),
        _distilled("0.75 mix, from non-experts", 0.25, True),
        Contender(
            "from non-experts alone",
            (
                _DENSE,
                f"INIT_FROM='<pretrained {TEACHER}>'",
                f"INIT_STEP={STEPS}",
                r"INIT_RULES=((r'.*/ffn/w_(in|out)_\w+', None),)",
                "INIT_DROP=('.*/ffn/.*',)",
            ),
        ),
    ),
    steps=STEPS,
    times=False,
)


def verdict(trained: Trained, teacher: float) -> dict:
    """Reproduced: mix and initialization together gain over the dense model, and more than
    either alone."""
    gains = {name: trained.gain(name, "dense") for name in trained.curves if name != "dense"}
    both, mix, init = (
        gains[name]
        for name in ("0.75 mix, from non-experts", "0.75 mix", "from non-experts alone")
    )
    dense = sum(trained.final("dense")) / len(trained.final("dense"))
    kept = both.mean / (teacher - dense)
    is_most = both.mean > max(mix.mean, init.mean)
    word = "reproduced" if both.low > 0 and is_most else "not reproduced"
    if not both.excludes_zero:
        word = "undecided"
    return {
        "verdict": word,
        "because": f"Mix and initialization keep {kept:.0%} of the teacher's gain of "
        f"{teacher - dense:.3f} nats; the mix alone gains {mix.mean:+.3f} nats, initialization "
        f"alone {init.mean:+.3f}.",
        "effect": both,
        "effect_of": "0.75 mix from non-experts over dense, nats a token",
    }


def run(study: Study) -> dict:
    def judged(trained: Trained) -> dict:
        runs = study.output.absolute() / "pretraining"
        found = Cells(runs / "cells.jsonl").lines
        curve = next(
            line["value"]["curve"]
            for line in found
            if line["cell"].get("run") == run_name(TEACHER, seed=0)
        )
        return verdict(trained, curve[str(STEPS)])

    comparison = COMPARISON
    if study.is_quick:  # its teacher has no such step
        contenders = [
            dataclasses.replace(each, bindings=tuple(b for b in each.bindings if b != STEP))
            for each in comparison.contenders
        ]
        comparison = dataclasses.replace(comparison, contenders=tuple(contenders))
    return run_comparison(study, comparison, judged)


if __name__ == "__main__":
    main(__file__, __doc__, run)
