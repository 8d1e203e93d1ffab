# SPDX-License-Identifier: Apache-2.0
"""Dense against 16 experts of the second rung, fine-tuned on tasks that the dense model learns.

    make experiments EXPERIMENT=fine_tuning DATA=FOLDER

First each model's rate is swept, on a part that is held out of a task's training set. What is
compared is the log-likelihood of right answers after the last step; it tells models apart whose
texts are seldom right. A seed is a pretraining of experiments/switch_vs_dense.
"""

import dataclasses
import statistics
from typing import Any

from experiments import rules
from experiments.experiment import run_name
from experiments.ladder import R1, wall_seconds
from experiments.measured import Cells
from experiments.rates.run import MOST_ADDED, SEED, found_rate
from experiments.rules import Rule
from experiments.side_by_side import on_each_core
from experiments.statistics import difference, estimate, open_sides
from experiments.study import Study, main
from experiments.sweeps import own_rates
from experiments.switch_vs_dense.run import SECOND, SEEDS


@dataclasses.dataclass(frozen=True)
class Task:
    """How a task is learnt.

    Attributes:
        files: files of its data, below the data folder.
        chance: share of the most frequent answer among those evaluated, in percent.
        bindings: gin bindings over configs/runs/finetune_english.gin and the task's file.
        gin_file: name of the file in configs/tasks.
    """

    files: str
    chance: float
    bindings: tuple[str, ...]
    gin_file: str


TASKS = {
    "glue_sst2": Task("glue/SST-2/*", 50.9, ("INPUTS_LENGTH=80",), "glue_sst2"),
    "trec": Task("trec/*", 27.6, ("INPUTS_LENGTH=48",), "trec"),
    "banking77": Task(
        "banking77/*",
        1.3,
        (
            "FROM='<data>/banking77'",
            "INPUTS='banking: {text}'",
            "TARGETS='{category}'",
            "EVALUATION_SPLIT='test'",
            "INPUTS_LENGTH=64",
            "TARGETS_LENGTH=32",
            "TextEvaluation.max_new_tokens=32",
            "TextEvaluation.max_examples=500",
        ),
        "templates",
    ),
}
DENSE, SPARSE = (each.name for each in SECOND.contenders)
MODELS = {each.name: each.bindings for each in SECOND.contenders}
# Of Adafactor, relative to a parameter's size; swept on a task for all of them.
RATES, SWEPT_ON = (0.01, 0.02, 0.04), "trec"
# A task counts where the dense model has so many points more than chance.
ABOVE = 5.0
LEARNT = "the dense model is above chance on some task"
RULES = (
    Rule(
        "16 experts are ahead of the dense model after fine-tuning",
        difference(SPARSE, DENSE),
        "ahead",
        margin=0.01,
        looks=(4,),
        seeds=SEEDS[:4],
        expected=0.05,
        rates_from=None,
        gates=(LEARNT,),
    ),
)


def tuned(study: Study, cells: Cells, model: str, name: str, seed: int, *more: str) -> dict:
    """A model of the second rung, fine-tuned on a task: `right`, the best share of right
    answers in percent, and `nats`, their log-likelihood per token after the last step.

    Args:
        seed: that of the pretraining.
        more: bindings over those of the task.
    """
    task, begin = TASKS[name], run_name(model + R1.suffix, seed)
    bindings = [
        f"INIT_FROM='<pretrained {begin}>'",
        *("SwitchConfig.expert_dropout_rate=0.1",) * (model == SPARSE),
        *task.bindings,
        *(("MANUAL_DIR='<data>'",) if task.gin_file == name else ()),
        *MODELS[model],
        *("TextEvaluation.max_examples=4",) * study.is_quick,
        *more,
    ]
    files = ["configs/runs/finetune_english.gin", f"configs/tasks/{task.gin_file}.gin"]
    run = run_name(" ".join((model, name, *more)), seed)
    run = "".join(c if c.isalnum() or c in "_-" else "_" for c in run)
    found = study.train(cells, run, files, bindings)
    (metrics,) = found["peaks"].values()
    return {
        "right": statistics.mean(each["score"] for each in metrics.values()),
        "nats": found["curve"][max(found["curve"], key=int)],
    }


def swept(study: Study, cells: Cells, model: str) -> dict[str, float]:
    """Log-likelihood by rate on a held-out part, with rates added where the best is at the
    edge."""
    split = ("TRAIN_SPLIT='train[:90%]'", "EVALUATION_SPLIT='train[90%:]'", f"SEED={SEED}")
    rates = list(RATES)
    for _ in range(MOST_ADDED + 1):
        found = {
            rate: tuned(
                study, cells, model, SWEPT_ON, SEEDS[0], f"LEARNING_RATE={rate}", *split
            )
            for rate in rates
        }
        quality = {f"{rate:g}": each["nats"] for rate, each in found.items()}
        sides = open_sides(rates, [*quality.values()])
        if not sides:
            break
        rates = sorted({*rates, *(min(rates) / 2,) * ("lower" in sides),
                        *(max(rates) * 2,) * ("higher" in sides)})  # fmt: skip
    return quality


def judge(results: dict[str, Any]) -> dict[str, Any]:
    """By the rule, of the mean over tasks that the dense model learns."""

    def right(name: str, model: str) -> float:
        return statistics.mean(each["right"] for each in results["tasks"][name][model])

    nats = {
        name: {model: [each["nats"] for each in seen] for model, seen in by.items()}
        for name, by in results["tasks"].items()
    }
    counted = [name for name in nats if right(name, DENSE) > TASKS[name].chance + ABOVE]
    of_seeds = {
        model: zip(*(nats[name][model] for name in counted or nats), strict=True)
        for model in MODELS
    }
    curves = {m: [{"1": statistics.mean(each)} for each in v] for m, v in of_seeds.items()}
    gains = {
        name: dataclasses.asdict(estimate(by, difference(SPARSE, DENSE)).interval())
        for name, by in nats.items()
    }
    rows = [
        {"task": name, "counts": "yes" if name in counted else "no"}
        | {f"{model}, right, %": right(name, model) for model in by}
        | {f"{model}, nats": statistics.mean(by[model]) for model in by}
        | {"gain, nats per token (95%)": gains[name]}
        for name, by in nats.items()
    ]
    fits = [
        {"model": model, "rate": found_rate(quality).rate} | quality
        for model, quality in results["quality"].items()
    ]
    of_rates = [
        {"title": f"{e.pop('model')}: log-likelihood by rate", "rows": [e]} for e in fits
    ]
    measured = {"curves": curves, "gates": {LEARNT: bool(counted)}}
    return rules.judged(RULES, results | measured) | {
        "tables": [{"title": "", "rows": rows}, *of_rates],
        "intervals": gains,
        "intervals_of": "16 experts over dense, nats per token of right answers",
    }


def run(study: Study) -> None:
    cells = study.cells()
    tasks = (SWEPT_ON,) if study.is_quick else tuple(TASKS)
    files = study.files(*(TASKS[task].files for task in tasks))
    seeds = (0,) if study.is_quick else RULES[0].seeds_at(study.look)
    quality, rates = {}, dict.fromkeys(MODELS, RATES[0])
    if not study.is_quick:
        found = on_each_core(lambda model: swept(study, cells, model), MODELS)
        quality = dict(zip(MODELS, found, strict=True))
        rates = own_rates(quality)
    asked = [(seed, task, model) for seed in seeds for task in tasks for model in MODELS]

    def learn(one: tuple[int, str, str]) -> dict:
        seed, task, model = one
        more = f"LEARNING_RATE={rates[model]:.6g}", f"SEED={seed}"
        return tuned(study, cells, model, task, seed, *more)

    learnt = dict(zip(asked, on_each_core(learn, asked), strict=True))
    by_task = {
        task: {model: [learnt[seed, task, model] for seed in seeds] for model in MODELS}
        for task in tasks
    }
    seconds = wall_seconds(cells)
    study.publish(cells, files, judge, seeds=list(seeds), quality=quality, tasks=by_task,
                  wall_seconds=seconds)  # fmt: skip


if __name__ == "__main__":
    main(__file__, __doc__, run)
