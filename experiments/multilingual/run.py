# SPDX-License-Identifier: Apache-2.0
"""Dense against 32 experts on 14 languages: steps to equal quality by language.

    make experiments EXPERIMENT=multilingual DATA=FOLDER

Validation has one language a batch, whose tokens ask for the same few experts: experts are
evaluated with a slot for every token. What factor 2.0 makes of the same models is told beside.
"""

import dataclasses
import statistics
from typing import Any

from experiments.comparison import Comparison, Contender, first_step_at, judged_quick
from experiments.measured import Cells, bootstrap, paired
from experiments.study import Study, main, run_name

GIN_FILE = "configs/runs/pretrain_languages.gin"
LANGUAGES = tuple("en uk es zh_cn ja pt_br ko fr zh_tw tr it ro pl id".split())
SPARSE, FEW_SLOTS = "32 experts", 2.0
SPEEDUP = "speed-up in steps (95%)"
COMPARISON = Comparison(
    contenders=(Contender("dense", ("ModelConfig.switch=None",)), Contender(SPARSE)),
    steps=600,
)
Curves = dict[str, list[dict[int, float]]]


def _seeds(study: Study) -> tuple[int, ...]:
    return COMPARISON.seeds[:1] if study.is_quick else COMPARISON.seeds


def by_language(study: Study, cells: Cells, contender: Contender) -> Curves:
    """Validation curves by language, one a seed."""
    every = max(COMPARISON.steps // 10, 1)
    languages = LANGUAGES[-2:] if study.is_quick else LANGUAGES
    curves = {}
    for seed in _seeds(study):
        bindings = [
            "FOLDER='<data>/python_docs'", f"LANGUAGES={languages}", f"SEED={seed}",
            f"TRAIN_STEPS={COMPARISON.steps}", f"EVAL_EVERY={every}", *contender.bindings,
        ]  # fmt: skip
        found = study.train(cells, run_name(contender.name, seed), [GIN_FILE], bindings)
        for task, curve in found["tasks"].items():
            of_language = curves.setdefault(task.removeprefix("text_"), [])
            of_language.append({int(step): value for step, value in curve.items()})
    return curves


def with_few_slots(study: Study, cells: Cells) -> dict[str, list[float]]:
    """Experts' final quality by language at capacity factor FEW_SLOTS, one a seed."""
    finals = {}
    for seed in _seeds(study):
        name = run_name(SPARSE, seed)
        factor = f"--gin.SwitchConfig.eval_capacity_factor={FEW_SLOTS}"
        arguments = ("eval", f"--model_dir=<run {name}>", factor)
        found = study.command(cells, f"{name}_evaluated", *arguments)
        for task, metrics in found["tasks"].items():
            of_language = finals.setdefault(task.removeprefix("text_"), [])
            of_language.append(metrics["neg_log_perplexity"])
    return finals


def final(curves: list[dict[int, float]]) -> list[float]:
    return [curve[max(curve)] for curve in curves]


def row_of(language: str, dense: list[float], sparse: list[float]) -> dict[str, Any]:
    """Of final qualities: means over seeds, and the gain paired by seed."""
    return {
        "language": language,
        "dense": statistics.mean(dense),
        SPARSE: statistics.mean(sparse),
        "gain, nats a token (95%)": dataclasses.asdict(paired(sparse, dense)),
    }


def speedup_in_steps(dense: dict[int, float], sparse: dict[int, float]) -> float:
    """Steps of both over those after which one of them has the other's final quality (Figure
    8): above 1 where that is the experts, below 1, its inverse, where it is the dense model; 1
    where neither comes to it."""
    (theirs,), (mine,) = final([dense]), final([sparse])
    if step := first_step_at(sparse, theirs):
        return max(sparse) / step
    return (first_step_at(dense, mine) or max(dense)) / max(dense)


def verdict(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Reproduced: in more than half of the languages experts have the dense model's final
    quality in fewer steps, by intervals that leave out 1, and so on average over languages.
    Not reproduced: in more than half, or on average, in more steps, by such intervals.
    Otherwise undecided."""
    speedups = {row["language"]: row[SPEEDUP] for row in rows}
    faster = sum(each["low"] > 1 for each in speedups.values())
    slower = sum(each["high"] < 1 for each in speedups.values())
    means = {language: each["mean"] for language, each in speedups.items()}
    least, most = min(means, key=means.get), max(means, key=means.get)
    mean = bootstrap(list(means.values()))
    word = "undecided"
    if 2 * faster > len(rows) and mean.low > 1:
        word = "reproduced"
    elif 2 * slower > len(rows) or mean.high < 1:
        word = "not reproduced"
    return {
        "verdict": word,
        "because": f"Experts have the dense model's final quality in fewer steps in {faster} "
        f"of {len(rows)} languages and in more in {slower}, by intervals that leave out 1: in "
        f"{mean.mean:.2f} times fewer on average, from {means[least]:.2f} ({least}) to "
        f"{means[most]:.2f} ({most}).",
        "effect": mean,
        "effect_of": "speed-up of 32 experts over dense in steps, over languages",
    }


def run(study: Study) -> None:
    cells = study.cells()
    files = study.files("python_docs/*.txt.gz")
    dense, sparse = (by_language(study, cells, each) for each in COMPARISON.contenders)
    few = with_few_slots(study, cells)
    rows, rows_of_few = [], []
    for language in dense:
        curves = dense[language], sparse[language]
        speedups = bootstrap([speedup_in_steps(*pair) for pair in zip(*curves, strict=True)])
        row = row_of(language, *map(final, curves))
        rows.append(row | {SPEEDUP: dataclasses.asdict(speedups)})
        rows_of_few.append(row_of(language, final(dense[language]), few[language]))
    rows.sort(key=lambda row: -row[SPEEDUP]["mean"])
    gains = [row["gain, nats a token (95%)"] for row in rows_of_few]
    title = (
        f"The same models evaluated at capacity factor {FEW_SLOTS}: experts end ahead in "
        f"{sum(each['low'] > 0 for each in gains)} languages and behind in "
        f"{sum(each['high'] < 0 for each in gains)}, by intervals that leave out 0:"
    )
    study.publish(
        cells,
        files,
        **(judged_quick() if study.is_quick else verdict(rows)),
        seeds=list(COMPARISON.seeds),
        steps=COMPARISON.steps,
        tables=[{"title": "", "rows": rows}, {"title": title, "rows": rows_of_few}],
        intervals={row["language"]: row[SPEEDUP] for row in rows},
        no_effect=1.0,
    )


if __name__ == "__main__":
    main(__file__, __doc__, run)
