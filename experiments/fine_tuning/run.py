# SPDX-License-Identifier: Apache-2.0
"""Dense against 16 experts of the second rung, fine-tuned on tasks that the dense model learns,
and LoRA beside both.

    make experiments EXPERIMENT=fine_tuning DATA=FOLDER

First each model's rate is swept, on a part that is held out of a task's training set. What is
compared is the log-likelihood of right answers after the last step; it tells models apart whose
texts are seldom right. A seed is a pretraining of experiments/switch_vs_dense.
"""

import dataclasses
import itertools
import statistics
from typing import Any

from experiments import rules
from experiments.experiment import run_name
from experiments.ladder import R1, wall_seconds
from experiments.measured import Cells
from experiments.rates.run import MOST_ADDED, SEED, found_rate
from experiments.rules import Rule
from experiments.side_by_side import on_each_core
from experiments.statistics import difference, finite_mean, interval_over, open_sides
from experiments.study import Study, main
from experiments.sweeps import own_rates
from experiments.switch_vs_dense.run import SECOND, SEEDS


@dataclasses.dataclass(frozen=True)
class Task:
    """How a task is learnt.

    Attributes:
        files: files of its data, below the data folder.
        chance: share of the most frequent answer among those evaluated, which are the whole
            split, in percent.
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
            # The file is sorted by intent: of a part some are missing.
            "TrainingJob.eval_batches=None",
        ),
        "templates",
    ),
}


@dataclasses.dataclass(frozen=True)
class Learner:
    """How a model of the second rung learns a task.

    Attributes:
        model: its name there, whose runs it begins with.
        rates: learning rates to begin the sweep with.
        gin_files: files of configs/ over configs/runs/finetune_english.gin.
    """

    model: str
    bindings: tuple[str, ...]
    rates: tuple[float, ...]
    gin_files: tuple[str, ...] = ()


DENSE, SPARSE = (each.name for each in SECOND.contenders)
# Of Adafactor, relative to a parameter's size.
FULL = {
    each.name: Learner(each.name, each.bindings, (0.01, 0.02, 0.04))
    for each in SECOND.contenders
}
_LORA = (
    "LORA=@LoRASpec()", "LoRASpec.base=%INIT_FROM", "LoRASpec.alpha=16.0",
    "TrainingJob.init_from=None", "WARMUP_STEPS=20",
)  # fmt: skip
# Adapters of rank 8 beside everything but the router, by AdamW; as many steps.
ADAPTED = {
    f"{name}, LoRA": dataclasses.replace(
        each, bindings=(*each.bindings, *_LORA), rates=(0.008, 0.016, 0.032),
        gin_files=("configs/optimizers/adamw.gin",),
    )
    for name, each in FULL.items()
}  # fmt: skip
LEARNERS = FULL | ADAPTED


@dataclasses.dataclass(frozen=True)
class Method:
    """What the verdict hangs on beside the rule, and its hash therefore covers.

    Attributes:
        swept_on: task that rates are swept on, for all learners.
        of_adapters: tasks that adapters learn.
        above: points above chance that the dense model has where a task counts.
    """

    tasks: dict[str, Task]
    learners: dict[str, Learner]
    swept_on: str = "trec"
    of_adapters: tuple[str, ...] = ("trec", "glue_sst2")
    above: float = 5.0


METHOD = Method(TASKS, LEARNERS)
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


def tuned(study: Study, cells: Cells, learner: str, name: str, seed: int, *more: str) -> dict:
    """What a learner has after a task: `right`, the best share of right answers in percent, and
    `nats`, their log-likelihood per token after the last step.

    Args:
        seed: that of the pretraining.
        more: bindings over those of the task.
    """
    task, how = TASKS[name], LEARNERS[learner]
    bindings = [
        f"INIT_FROM='<pretrained {run_name(how.model + R1.suffix, seed)}>'",
        *("SwitchConfig.expert_dropout_rate=0.1",) * (how.model == SPARSE),
        *task.bindings,
        *(("MANUAL_DIR='<data>'",) if task.gin_file == name else ()),
        *how.bindings,
        *("TextEvaluation.max_examples=4",) * study.is_quick,
        *("WARMUP_STEPS=1",) * (study.is_quick and learner in ADAPTED),
        *more,
    ]
    files = ["configs/runs/finetune_english.gin", f"configs/tasks/{task.gin_file}.gin"]
    files += how.gin_files
    run = run_name(" ".join((learner, name, *more)), seed)
    run = "".join(c if c.isalnum() or c in "_-" else "_" for c in run)
    found = study.train(cells, run, files, bindings)
    (metrics,) = found["peaks"].values()
    return {
        "right": statistics.mean(each["score"] for each in metrics.values()),
        "nats": found["curve"][max(found["curve"], key=int)],
    }


def swept(study: Study, cells: Cells, learner: str) -> dict[str, float]:
    """Log-likelihood by rate on a held-out part, with rates added where the best is at the
    edge."""
    split = ("TRAIN_SPLIT='train[:90%]'", "EVALUATION_SPLIT='train[90%:]'", f"SEED={SEED}")
    task = METHOD.swept_on
    rates = list(LEARNERS[learner].rates)
    for _ in range(MOST_ADDED + 1):
        found = {
            rate: tuned(study, cells, learner, task, SEEDS[0], f"LEARNING_RATE={rate}", *split)
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
        name: {model: [each["nats"] for each in by[model]] for model in FULL}
        for name, by in results["tasks"].items()
    }
    counted = [name for name in nats if right(name, DENSE) > TASKS[name].chance + METHOD.above]
    of_seeds = {
        model: zip(*(nats[name][model] for name in counted or nats), strict=True)
        for model in FULL
    }
    curves = {m: [{"1": finite_mean(each)} for each in v] for m, v in of_seeds.items()}
    gains = {name: interval_over(by, SPARSE, DENSE) for name, by in nats.items()}
    rows = [
        {"task": name, "counts": "yes" if name in counted else "no"}
        | {f"{model}, right, %": right(name, model) for model in by}
        | {f"{model}, nats": finite_mean(by[model]) for model in by}
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
        "tables": [
            {"title": "", "rows": rows},
            {"title": "Adapters, after as many steps:", "rows": of_adapters(results["tasks"])},
            *of_rates,
        ],
        "intervals": {name: each for name, each in gains.items() if each},
        "intervals_of": "16 experts over dense, nats per token of right answers",
    }


def of_adapters(tasks: dict[str, Any]) -> list[dict[str, Any]]:
    """A row each task and model of what LoRA reaches beside the fine-tuning of all
    parameters."""
    rows = []
    for name, adapter in itertools.product(METHOD.of_adapters, ADAPTED):
        found = {"full": tasks[name][ADAPTED[adapter].model], "LoRA": tasks[name][adapter]}
        nats = {way: [each["nats"] for each in seeds] for way, seeds in found.items()}
        right = {way: statistics.mean(e["right"] for e in v) for way, v in found.items()}
        rows.append(
            {"task": name, "model": ADAPTED[adapter].model}
            | {f"{way}, right, %": each for way, each in right.items()}
            | {f"{way}, nats": finite_mean(each) for way, each in nats.items()}
            | {"LoRA over full, nats per token (95%)": interval_over(nats, "LoRA", "full")}
        )
    return rows


def run(study: Study) -> None:
    cells = study.cells()
    tasks = (METHOD.swept_on,) if study.is_quick else tuple(TASKS)
    files = study.files(*(TASKS[task].files for task in tasks))
    seeds = (0,) if study.is_quick else RULES[0].seeds_at(study.look)
    quality = {}
    rates = {name: each.rates[0] for name, each in LEARNERS.items()}
    if not study.is_quick:
        found = on_each_core(lambda learner: swept(study, cells, learner), LEARNERS)
        quality = dict(zip(LEARNERS, found, strict=True))
        rates = own_rates(quality)
    asked = [
        (seed, task, learner)
        for seed, task, learner in itertools.product(seeds, tasks, LEARNERS)
        if learner in FULL or task in METHOD.of_adapters
    ]

    def learn(one: tuple[int, str, str]) -> dict:
        seed, task, learner = one
        more = f"LEARNING_RATE={rates[learner]:.6g}", f"SEED={seed}"
        return tuned(study, cells, learner, task, seed, *more)

    by_task: dict[str, dict[str, list]] = {task: {} for task in tasks}
    for (_, task, learner), each in zip(asked, on_each_core(learn, asked), strict=True):
        by_task[task].setdefault(learner, []).append(each)
    seconds = wall_seconds(cells)
    study.publish(cells, files, judge, seeds=list(seeds), quality=quality, tasks=by_task,
                  wall_seconds=seconds)  # fmt: skip


if __name__ == "__main__":
    main(__file__, __doc__, run)
