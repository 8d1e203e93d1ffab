# SPDX-License-Identifier: Apache-2.0
"""How much of a sparse teacher's gain a dense student keeps, by technique and by the teacher's
size (Switch Transformers, Tables 6 and 7).

    make experiments EXPERIMENT=distillation DATA=FOLDER

Teachers are those of experiments/pretraining after as many steps as a student takes.
"""

import dataclasses
import functools
import statistics
from typing import Any

from experiments.comparison import Trained, judge_of, run_comparison
from experiments.experiment import Comparison, Contender
from experiments.pretrained import pretrained_curve
from experiments.study import Study, main

# A step of which pretraining keeps the checkpoint.
STEPS = 500
TEACHER, SMALL_TEACHER = "32 experts", "8 experts"
_DENSE = "ModelConfig.switch=None"
STEP = f"Distillation.step={STEPS}"


def _mixed(name: str, teacher: str, is_initialized: bool) -> Contender:
    """A quarter of the loss is the teacher's probabilities, the rest the text."""
    bindings = (
        _DENSE,
        "DISTILLATION=@Distillation()",
        f"Distillation.teacher='<pretrained {teacher}>'",
        STEP,
        "Distillation.soft_weight=0.25",
        f"Distillation.starts_from_teacher={is_initialized}",
    )
    return Contender(name, bindings)


MIX, ALONE = "0.75 mix", "from non-experts alone"
BOTH = f"{MIX}, from non-experts"
COMPARISON = Comparison(
    contenders=(
        Contender("dense", (_DENSE,)),
        _mixed(BOTH, TEACHER, True),
        _mixed(MIX, TEACHER, False),
        Contender(
            ALONE,
            (
                _DENSE,
                f"INIT_FROM='<pretrained {TEACHER}>'",
                f"INIT_STEP={STEPS}",
                r"INIT_RULES=((r'.*/ffn/w_(in|out)_\w+', None),)",
                "INIT_DROP=('.*/ffn/.*',)",
            ),
        ),
        _mixed(f"{BOTH}, of {SMALL_TEACHER}", SMALL_TEACHER, True),
    ),
    steps=STEPS,
    # Teachers were evaluated on as many batches.
    bindings=("TrainingJob.eval_batches=20",),
    times=False,
)


def found(trained: Trained, teachers: dict[str, float]) -> dict:
    """What was found."""
    gains = {name: trained.gain(name, "dense") for name in trained.curves if name != "dense"}
    both, mix, init, of_small = gains.values()
    over_init = trained.gain(BOTH, ALONE)
    dense = statistics.mean(trained.final("dense"))
    of_teachers = {name: quality - dense for name, quality in teachers.items()}
    return {
        "because": f"Over the dense model, in nats per token: mix and initialization "
        f"{both.mean:+.3f} with {TEACHER} as the teacher (itself {of_teachers[TEACHER]:+.3f}) "
        f"and {of_small.mean:+.3f} with {SMALL_TEACHER} ({of_teachers[SMALL_TEACHER]:+.3f}), "
        f"the mix alone {mix.mean:+.3f}, initialization alone {init.mean:+.3f}. Both together "
        f"over initialization alone: {over_init}.",
        "effect": over_init,
        "effect_of": "mix and initialization over initialization alone, nats per token",
    }


def judge(results: dict[str, Any]) -> dict[str, Any]:
    return judge_of(functools.partial(found, teachers=results["teachers"]))(results)


def run(study: Study) -> dict:
    comparison, teachers = COMPARISON, {}
    if study.is_quick:  # its teacher has no such step
        contenders = [
            dataclasses.replace(each, bindings=tuple(b for b in each.bindings if b != STEP))
            for each in comparison.contenders
        ]
        comparison = dataclasses.replace(comparison, contenders=tuple(contenders))
    else:
        teachers = {
            name: pretrained_curve(study, name)[STEPS] for name in (TEACHER, SMALL_TEACHER)
        }
    return run_comparison(study, comparison, judge, teachers=teachers)


if __name__ == "__main__":
    main(__file__, __doc__, run)
