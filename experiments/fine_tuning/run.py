# SPDX-License-Identifier: Apache-2.0
"""Dense against 32 experts of the same pretraining, fine-tuned on eight tasks (Table 5).

    make experiments EXPERIMENT=fine_tuning DATA=FOLDER

First a setting is chosen, one for both models and all tasks: the best mean of both models on
two tasks, on parts that are held out of their training sets, seed 100. Then every task is
learnt with it. At last two tasks are learnt from an earlier checkpoint (Figure 13).
"""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from experiments.measured import Cells, Interval, bootstrap
from experiments.study import Study, main, pretrained_curve, run_name

MODELS = {"dense": ("ModelConfig.switch=None",), "32 experts": ()}
REASONING = ("glue_cola", "glue_sst2", "super_glue_copa", "winogrande", "trec")
KNOWLEDGE = ("arc_easy", "openbookqa", "web_questions")
SMALL = ("super_glue_copa",)
# Over configs/runs/finetune_english.gin; what a dense model has not does not change it.
SETTINGS = {
    "rate 0.003": ("LEARNING_RATE=0.003",),
    "rate 0.01": ("LEARNING_RATE=0.01",),
    "rate 0.01, capacity 4": ("LEARNING_RATE=0.01", "SwitchConfig.capacity_factor=4.0"),
    "rate 0.01, capacity 4, expert dropout 0.1": (
        "LEARNING_RATE=0.01",
        "SwitchConfig.capacity_factor=4.0",
        "SwitchConfig.expert_dropout_rate=0.1",
    ),
    "rate 0.01, FFNs frozen": (
        "LEARNING_RATE=0.01",
        r"StepConfig.rate_multipliers=((r'.*/ffn/.*', 0.0),)",
    ),
}
CHOSEN_ON = ("trec", "glue_sst2")
# Over a task's own file: of Winogrande's training sets the one before the largest.
OF_TASK = {"winogrande": ("TRAIN_SPLIT='train_l'",)}
# A task of each kind, learnt from an earlier step too.
UPSTREAM_TASKS, EARLIER_STEP = ("trec", "arc_easy"), 500
# What a data set's files are called below the data folder.
DATA = {
    "glue_cola": "glue/CoLA/*", "glue_sst2": "glue/SST-2/*",
    "super_glue_copa": "super_glue/COPA/*", "winogrande": "winogrande/*", "trec": "trec/*",
    "arc_easy": "arc_easy/*", "openbookqa": "openbookqa/*", "web_questions": "web_questions/*",
}  # fmt: skip


def tuned(study: Study, cells: Cells, model: str, task: str, seed: int, *more: str) -> float:
    """Peak over evaluations of the mean of a task's metrics, in percent."""
    if model == "dense":
        more = tuple(each for each in more if not each.startswith("SwitchConfig."))
    more = (*OF_TASK.get(task, ()), *more)
    name = run_name(" ".join((model, task, *more)), seed)
    name = "".join(c if c.isalnum() or c in "_-" else "_" for c in name)
    bindings = [
        f"INIT_FROM='<pretrained {model}>'", "MANUAL_DIR='<data>'", f"SEED={seed}",
        *MODELS[model], *more,
    ]  # fmt: skip
    if study.is_quick:
        bindings.append("TextEvaluation.max_examples=4")
    files = ["configs/runs/finetune_english.gin", f"configs/tasks/{task}.gin"]
    (metrics,) = study.train(cells, name, files, bindings)["peaks"].values()
    return statistics.mean(each["score"] for each in metrics.values())


def chosen_setting(study: Study, cells: Cells) -> tuple[str, list[dict[str, Any]]]:
    """The best of SETTINGS, and a row each."""
    tasks = CHOSEN_ON[:1] if study.is_quick else CHOSEN_ON
    rows, means = [], {}
    for name in list(SETTINGS)[-1:] if study.is_quick else SETTINGS:
        split = ("TRAIN_SPLIT='train[:90%]'", "EVALUATION_SPLIT='train[90%:]'")
        scores = {
            f"{model}, {task}": tuned(study, cells, model, task, 100, *SETTINGS[name], *split)
            for model in MODELS
            for task in tasks
        }
        means[name] = statistics.mean(scores.values())
        rows.append({"setting": name} | scores | {"mean": means[name]})
    return max(means, key=means.get), rows


def learnt(
    study: Study, cells: Cells, tasks: Sequence[str], *more: str
) -> dict[str, dict[str, list[float]]]:
    """Scores by task and model, one a seed."""
    return {
        task: {
            model: [
                tuned(study, cells, model, task, seed, *more)
                for seed in range(1 if study.is_quick else 5 if task in SMALL else 3)
            ]
            for model in MODELS
        }
        for task in tasks
    }


def gains_of(scores: dict[str, dict[str, list[float]]]) -> dict[str, Interval]:
    """Experts over dense by task, paired by seed."""
    return {
        task: bootstrap(
            [sparse - dense for dense, sparse in zip(*of_task.values(), strict=True)]
        )
        for task, of_task in scores.items()
    }


def verdict(gains: dict[str, Interval]) -> dict[str, Any]:
    """Reproduced: more tasks have a gain whose interval leaves out 0 than a loss, and the mean
    of all tasks' gains is above 0 in its interval."""
    better = [task for task, gain in gains.items() if gain.low > 0]
    worse = [task for task, gain in gains.items() if gain.high < 0]
    mean = bootstrap([gain.mean for gain in gains.values()])
    kinds = {"reasoning": REASONING, "knowledge": KNOWLEDGE}
    by_kind = ", ".join(
        f"{statistics.mean(gains[task].mean for task in tasks if task in gains):+.1f} in {kind}"
        for kind, tasks in kinds.items()
        if any(task in gains for task in tasks)
    )
    word = "undecided" if not mean.excludes_zero else "not reproduced"
    if mean.low > 0 and len(better) > len(worse):
        word = "reproduced"
    return {
        "verdict": word,
        "because": f"Experts are ahead in {', '.join(better) or 'no task'} and behind in "
        f"{', '.join(worse) or 'none'}, by intervals that leave out 0; over all tasks "
        f"{mean.mean:+.1f} points, {by_kind}.",
        "effect": mean,
        "effect_of": "32 experts over dense, points",
    }


def run(study: Study) -> None:
    cells = study.cells()
    tasks = ("trec",) if study.is_quick else (*REASONING, *KNOWLEDGE)
    files = study.files(*(DATA[task] for task in tasks))
    chosen, sweep = chosen_setting(study, cells)
    scores = learnt(study, cells, tasks, *SETTINGS[chosen])
    gains = gains_of(scores)
    rows = [
        {
            "task": task,
            "kind": "knowledge" if task in KNOWLEDGE else "reasoning",
            "seeds": len(of_task["dense"]),
        }
        | {model: statistics.mean(each) for model, each in of_task.items()}
        | {"gain (95%)": dataclasses.asdict(gains[task])}
        for task, of_task in scores.items()
    ]
    tables = [
        {"title": f"Chosen on held-out parts: {chosen}.", "rows": sweep},
        {"title": "Peaks of the mean of each task's metrics, of the texts that the models "
         "write; differences are paired by seed:", "rows": rows},
    ]  # fmt: skip
    if not study.is_quick:
        tables.append(upstream(study, cells, scores, SETTINGS[chosen]))
    study.publish(
        cells,
        files,
        **verdict(gains),
        seeds=[0, 1, 2, 3, 4],
        tables=tables,
        intervals={task: dataclasses.asdict(gain) for task, gain in gains.items()},
    )


def upstream(study: Study, cells: Cells, scores: dict, setting: Sequence[str]) -> dict:
    """Quality in pretraining against that of fine-tuning, by kept checkpoint (Figure 13)."""
    earlier = learnt(study, cells, UPSTREAM_TASKS, *setting, f"INIT_STEP={EARLIER_STEP}")
    rows = []
    for model in MODELS:
        curve = pretrained_curve(study, model)
        for step, found in ((EARLIER_STEP, earlier), (max(curve), scores)):
            means = {task: statistics.mean(found[task][model]) for task in UPSTREAM_TASKS}
            row = {"model": model, "pretraining step": step, "upstream": curve[step]}
            rows.append(row | means)
    return {"title": "From an earlier checkpoint; upstream is the validation negative log "
            "perplexity of pretraining:", "rows": rows}  # fmt: skip


if __name__ == "__main__":
    main(__file__, __doc__, run)
