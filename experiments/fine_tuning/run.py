# SPDX-License-Identifier: Apache-2.0
"""Dense against 32 experts of the same pretraining, fine-tuned on twelve tasks (Table 5).

    make experiments EXPERIMENT=fine_tuning DATA=FOLDER

First a setting is chosen, one for both models and all tasks: the best mean of both models on
two tasks, on parts that are held out of their training sets, seed 100. Then every task is
learnt with it. At last three tasks are learnt from every kept checkpoint, on one seed
(Figure 13).
"""

import dataclasses
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

from experiments.experiment import ENGLISH, run_name
from experiments.measured import Cells, Interval, interval_of, paired, verdict_of
from experiments.study import Study, main


@dataclasses.dataclass(frozen=True)
class Task:
    """How a task of configs/tasks is learnt.

    Attributes:
        kind: what it asks for, of Figure 13's kinds or summaries.
        files: of its data, below the data folder.
        inputs: tokens of an input, enough for nine in ten; of RTE, CB and SciTLDR most are
            longer, and cut.
        bindings: over its gin file.
        gin_file: below configs/tasks; None is the task's own.
        seeds: five of sets with fewer than a thousand examples.
    """

    kind: str
    files: str
    inputs: int
    bindings: tuple[str, ...] = ()
    gin_file: str | None = None
    seeds: int = 3


REASONING, KNOWLEDGE = "reasoning", "knowledge"
# Closed-book questions of the textbooks' glossaries, a folder of the runs.
GLOSSARY = "glossary"
TASKS = {
    "glue_cola": Task(REASONING, "glue/CoLA/*", 48),
    "glue_sst2": Task(REASONING, "glue/SST-2/*", 80),
    "super_glue_rte": Task(REASONING, "super_glue/RTE/*", 128),
    "super_glue_cb": Task(REASONING, "super_glue/CB/*", 128, seeds=5),
    "super_glue_copa": Task(REASONING, "super_glue/COPA/*", 64, seeds=5),
    "winogrande": Task(REASONING, "winogrande/*", 80, ("TRAIN_SPLIT='train_l'",)),
    "trec": Task(REASONING, "trec/*", 48),
    "scitldr": Task(
        "summaries",
        "scitldr/*",
        128,
        (
            "TARGETS_LENGTH=48",
            "TextEvaluation.max_new_tokens=48",
            "TextEvaluation.max_examples=200",
        ),
    ),
    "arc_easy": Task(KNOWLEDGE, "arc_easy/*", 96),
    "openbookqa": Task(KNOWLEDGE, "openbookqa/*", 96),
    "web_questions": Task(KNOWLEDGE, "web_questions/*", 32),
    GLOSSARY: Task(
        KNOWLEDGE,
        "openstax/glossary.*",
        64,
        (
            f"FROM='<run {GLOSSARY}>'",
            "INPUTS='glossary question: {inputs}'",
            "TARGETS='{targets}'",
        ),
        gin_file="templates",
    ),
}
MODELS = {"dense": ("ModelConfig.switch=None",), "32 experts": ()}
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
    "rate 0.01, capacity 4, batch 16": (
        "LEARNING_RATE=0.01",
        "SwitchConfig.capacity_factor=4.0",
        "BATCH_SIZE=16",
    ),
}
CHOSEN_ON = ("trec", "glue_sst2")
# What was chosen; other experiments learn tasks so.
CHOSEN = SETTINGS["rate 0.01, capacity 4, expert dropout 0.1"]
# Tasks of both kinds, learnt from earlier steps too.
UPSTREAM_TASKS = ("trec", "web_questions", GLOSSARY)
KEPT_STEPS = (250, 500, 750, 1000)


@dataclasses.dataclass(frozen=True)
class Peaks:
    """The best of a run's evaluations.

    Attributes:
        score: the mean of the task's metrics of what the model wrote, in percent.
        log_likelihood: of the right answers, nats per token; it tells models apart that write
            hardly any right answer.
    """

    score: float
    log_likelihood: float


def tuned(
    study: Study, cells: Cells, model: str, name_of_task: str, seed: int, *more: str
) -> Peaks:
    """A model of experiments/pretraining, fine-tuned on a task.

    Args:
        more: bindings over those of the task.
    """
    task, name = TASKS[name_of_task], run_of(model, name_of_task, seed, *more)
    more = _known_to(model, more)
    bindings = [
        f"INIT_FROM='<pretrained {model}>'", f"SEED={seed}",
        f"INPUTS_LENGTH={task.inputs}", *task.bindings, *MODELS[model], *more,
    ]  # fmt: skip
    if task.gin_file is None:
        bindings.append("MANUAL_DIR='<data>'")
    if study.is_quick:
        bindings.append("TextEvaluation.max_examples=4")
    files = [
        "configs/runs/finetune_english.gin",
        f"configs/tasks/{task.gin_file or name_of_task}.gin",
    ]
    found = study.train(cells, name, files, bindings)
    (metrics,) = found["peaks"].values()
    score = statistics.mean(each["score"] for each in metrics.values())
    return Peaks(score, max(found["curve"].values()))


def run_of(model: str, task: str, seed: int, *more: str) -> str:
    """Folder of a run of `tuned`."""
    name = run_name(" ".join((model, task, *_known_to(model, more))), seed)
    return "".join(c if c.isalnum() or c in "_-" else "_" for c in name)


def _known_to(model: str, bindings: Sequence[str]) -> tuple[str, ...]:
    """Those of experts are not for a dense model."""
    is_dense = model == "dense"
    return tuple(b for b in bindings if not (is_dense and b.startswith("SwitchConfig.")))


def files_of(study: Study, tasks: Sequence[str]) -> dict[str, pathlib.Path]:
    """The tasks' data, the glossary's under the names that configs/tasks/templates.gin asks
    for."""
    files = study.files(*(TASKS[task].files for task in tasks))
    for name, path in files.items():
        if "/glossary." in name:
            link = study.runs / GLOSSARY / path.name.removeprefix("glossary.")
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(path)
    return files


def chosen_setting(study: Study, cells: Cells) -> tuple[str, list[dict[str, Any]]]:
    """The best of SETTINGS, and a row each."""
    tasks = CHOSEN_ON[:1] if study.is_quick else CHOSEN_ON
    rows, means = [], {}
    for name in list(SETTINGS)[-1:] if study.is_quick else SETTINGS:
        split = ("TRAIN_SPLIT='train[:90%]'", "EVALUATION_SPLIT='train[90%:]'")
        scores = {
            f"{model}, {task}": tuned(
                study, cells, model, task, 100, *SETTINGS[name], *split
            ).score
            for model in MODELS
            for task in tasks
        }
        means[name] = statistics.mean(scores.values())
        rows.append({"setting": name} | scores | {"mean": means[name]})
    return max(means, key=means.get), rows


def learnt(
    study: Study, cells: Cells, tasks: Sequence[str], *more: str
) -> dict[str, dict[str, list[Peaks]]]:
    """Peaks by task and model, one a seed."""
    return {
        task: {
            model: [
                tuned(study, cells, model, task, seed, *more)
                for seed in range(1 if study.is_quick else TASKS[task].seeds)
            ]
            for model in MODELS
        }
        for task in tasks
    }


def gains_of(
    peaks: dict[str, dict[str, list[Peaks]]], of: str = "score"
) -> dict[str, Interval]:
    """Experts over dense by task, paired by seed.

    Args:
        of: a field of Peaks.
    """
    gains = {}
    for task, by in peaks.items():
        values = {model: [getattr(each, of) for each in seen] for model, seen in by.items()}
        gains[task] = paired(values["32 experts"], values["dense"])
    return gains


def verdict(gains: dict[str, Interval]) -> dict[str, Any]:
    """Reproduced: more tasks have a gain whose interval leaves out 0 than a loss, and the mean
    of all tasks' gains is above 0 in its interval. Not reproduced: that mean is below 0 so.
    Otherwise undecided."""
    better = [task for task, gain in gains.items() if gain.low > 0]
    worse = [task for task, gain in gains.items() if gain.high < 0]
    mean = interval_of([gain.mean for gain in gains.values()])
    by_kind = ", ".join(
        f"{statistics.mean(gains[task].mean for task in of_kind):+.1f} in {kind}"
        for kind in (REASONING, KNOWLEDGE)
        if (of_kind := [task for task in gains if TASKS[task].kind == kind])
    )
    return {
        "verdict": verdict_of(mean.low > 0 and len(better) > len(worse), mean.high < 0),
        "because": f"Experts are ahead in {', '.join(better) or 'no task'} and behind in "
        f"{', '.join(worse) or 'none'}, by intervals that leave out 0; over all tasks "
        f"{mean.mean:+.1f} points, {by_kind}.",
        "effect": mean,
        "effect_of": "32 experts over dense, points",
    }


def judge(results: dict[str, Any]) -> dict[str, Any]:
    peaks = {
        task: {model: [Peaks(**each) for each in seen] for model, seen in by.items()}
        for task, by in results["peaks"].items()
    }
    gains, of_answers = gains_of(peaks), gains_of(peaks, "log_likelihood")
    rows = [
        {"task": task, "kind": TASKS[task].kind, "seeds": len(of_task["dense"])}
        | {model: statistics.mean(each.score for each in of_task[model]) for model in MODELS}
        | {
            "gain (95%)": dataclasses.asdict(gains[task]),
            "right answers, gain in nats per token (95%)": dataclasses.asdict(of_answers[task]),
        }
        for task, of_task in peaks.items()
    ]
    tables = [
        {"title": f"Chosen on held-out parts: {results['chosen']}.", "rows": results["sweep"]},
        {"title": "Peaks of the mean of each task's metrics, of the texts that the models "
         "write; differences are paired by seed:", "rows": rows},
        {"title": "From every kept checkpoint, on one seed: scores, and the log-likelihood of "
         "right answers; upstream is the validation negative log perplexity of pretraining:",
         "rows": results["upstream"]},
    ]  # fmt: skip
    return verdict(gains) | {"tables": tables, "intervals": gains}


def run(study: Study) -> None:
    cells = study.cells()
    tasks = ("trec",) if study.is_quick else tuple(TASKS)
    files = files_of(study, tasks)
    chosen, sweep = chosen_setting(study, cells)
    peaks = learnt(study, cells, tasks, *SETTINGS[chosen])
    study.publish(
        cells,
        files,
        judge,
        seeds=[0, 1, 2, 3, 4],
        chosen=chosen,
        sweep=sweep,
        peaks=peaks,
        upstream=[] if study.is_quick else upstream(study, cells, SETTINGS[chosen]),
    )


def upstream(study: Study, cells: Cells, setting: Sequence[str]) -> list[dict[str, Any]]:
    """Quality in pretraining against that of fine-tuning, by kept checkpoint (Figure 13)."""
    rows = []
    for model in MODELS:
        for step in KEPT_STEPS:
            evaluated = study.command(
                cells, f"{model.replace(' ', '_')}_step_{step}",
                "eval", f"--model_dir=<pretrained {model}>", f"--step={step}",
                f"--gin.FILES=<data {' '.join(ENGLISH)}>",
            )  # fmt: skip
            row = {"model": model, "pretraining step": step}
            row["upstream"] = evaluated["neg_log_perplexity"]
            begins = () if step == KEPT_STEPS[-1] else (f"INIT_STEP={step}",)
            for task in UPSTREAM_TASKS:
                found = tuned(study, cells, model, task, 0, *setting, *begins)
                row |= {task: found.score, f"{task}, nats": found.log_likelihood}
            rows.append(row)
    return rows


if __name__ == "__main__":
    main(__file__, __doc__, run)
