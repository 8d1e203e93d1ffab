# SPDX-License-Identifier: Apache-2.0
"""Dense against 32 experts of the same pretraining, fine-tuned on ten tasks (Table 5).

    make experiments EXPERIMENT=fine_tuning DATA=FOLDER

First a learning rate is chosen, one for both models: the best mean of both on two tasks, on a
part that is held out of their training sets, seed 100. Then every task is learnt with it.
"""

import dataclasses
import statistics
from typing import Any

from experiments.pages import publish_page
from experiments.study import Cells, Interval, Study, bootstrap, main, run_name

MODELS = {"dense": ("ModelConfig.switch=None",), "32 experts": ()}
REASONING = (
    "glue_cola", "glue_sst2", "super_glue_rte", "super_glue_cb", "super_glue_copa",
    "winogrande", "trec",
)  # fmt: skip
KNOWLEDGE = ("arc_easy", "openbookqa", "web_questions")
SMALL = ("super_glue_rte", "super_glue_cb", "super_glue_copa")
RATES = (0.003, 0.01, 0.03)
CHOSEN_ON = ("trec", "glue_sst2")
# What a data set's files are called below the data folder.
DATA = {
    "glue_cola": "glue/CoLA/*", "glue_sst2": "glue/SST-2/*",
    "super_glue_rte": "super_glue/RTE/*", "super_glue_cb": "super_glue/CB/*",
    "super_glue_copa": "super_glue/COPA/*",
    "winogrande": "winogrande/*", "trec": "trec/*", "arc_easy": "arc_easy/*",
    "openbookqa": "openbookqa/*", "web_questions": "web_questions/*",
}  # fmt: skip


def tuned(study: Study, cells: Cells, model: str, task: str, seed: int, *more: str) -> float:
    """Peak over evaluations of the mean of a task's metrics, in percent."""
    name = run_name(" ".join((model, task, *more)), seed)
    name = "".join(c if c.isalnum() or c in "_-" else "_" for c in name)
    bindings = [
        f"INIT_FROM='<pretrained {model}>'", "MANUAL_DIR='<data>'", f"SEED={seed}",
        *MODELS[model], *more,
    ]  # fmt: skip
    if study.is_quick:
        bindings += ["TRAIN_STEPS=2", "EVAL_EVERY=2", "TextEvaluation.max_examples=4"]
    files = ["configs/runs/finetune_english.gin", f"configs/tasks/{task}.gin"]
    (metrics,) = study.train(cells, name, files, bindings)["peaks"].values()
    return statistics.mean(each["score"] for each in metrics.values())


def chosen_rate(study: Study, cells: Cells) -> tuple[float, list[dict[str, Any]]]:
    """The best of RATES, and a row each."""
    rates, tasks = (RATES[:1], ()) if study.is_quick else (RATES, CHOSEN_ON)
    rows = []
    for rate in rates:
        split = ("TRAIN_SPLIT='train[:90%]'", "EVALUATION_SPLIT='train[90%:]'")
        more = (f"LEARNING_RATE={rate}", *split)
        row = {"learning rate": rate}
        for model in MODELS:
            for task in tasks:
                row[f"{model}, {task}"] = tuned(study, cells, model, task, 100, *more)
        rows.append(row)
    best = max(rows, key=lambda row: sum(row.values()) - row["learning rate"])
    return best["learning rate"], rows


def verdict(gains: dict[str, Interval]) -> dict[str, Any]:
    """Reproduced: more tasks have a gain whose interval leaves out 0 than a loss, and the mean
    of all tasks' gains is above 0 in its interval."""
    better = [task for task, gain in gains.items() if gain.low > 0]
    worse = [task for task, gain in gains.items() if gain.high < 0]
    mean = bootstrap([gain.mean for gain in gains.values()])
    word = "undecided" if not mean.excludes_zero else "not reproduced"
    if mean.low > 0 and len(better) > len(worse):
        word = "reproduced"
    return {
        "verdict": word,
        "because": f"Experts are ahead in {', '.join(better) or 'no task'} and behind in "
        f"{', '.join(worse) or 'none'}, by intervals that leave out 0; over all tasks "
        f"{mean.mean:+.1f} points.",
        "effect": mean,
        "effect_of": "32 experts over dense, points",
    }


def run(study: Study) -> None:
    cells = study.cells()
    tasks = (*REASONING, *KNOWLEDGE)
    if study.is_quick:
        tasks = ("trec",)
    files = study.files(*(DATA[task] for task in tasks))
    rate, sweep = chosen_rate(study, cells)
    rows, gains = [], {}
    for task in tasks:
        seeds = range(1 if study.is_quick else 5 if task in SMALL else 3)
        scores = {
            model: [
                tuned(study, cells, model, task, seed, f"LEARNING_RATE={rate}")
                for seed in seeds
            ]
            for model in MODELS
        }
        pairs = zip(*scores.values(), strict=True)
        gains[task] = bootstrap([sparse - dense for dense, sparse in pairs])
        kind = "knowledge" if task in KNOWLEDGE else "reasoning"
        means = {model: round(statistics.mean(each), 1) for model, each in scores.items()}
        rows.append(
            {"task": task, "kind": kind, "seeds": len(seeds)}
            | means
            | {"gain (95%)": dataclasses.asdict(gains[task])}
        )
    study.publish(
        cells,
        files,
        **verdict(gains),
        seeds=[0, 1, 2, 3, 4],
        tables=[
            {"title": f"Learning rate {rate}, the best of a sweep on held-out parts:",
             "rows": sweep},
            {"title": "Peaks of the mean of each task's metrics, of the texts that the models "
             "write; differences are paired by seed:", "rows": rows},
        ],
        intervals={task: dataclasses.asdict(gain) for task, gain in gains.items()},
    )  # fmt: skip
    if not study.is_quick:
        publish_page(study.folder)


if __name__ == "__main__":
    main(__file__, __doc__, run)
