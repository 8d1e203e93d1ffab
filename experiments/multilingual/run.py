# SPDX-License-Identifier: Apache-2.0
"""Dense against 32 experts on 14 languages: steps to equal quality by language.

    make experiments EXPERIMENT=multilingual DATA=FOLDER

Validation has one language a batch, whose tokens ask for the same few experts: experts are
evaluated with a slot for every token. What factor 2.0 makes of the same models is told beside.
"""

import dataclasses
import statistics
from typing import Any

from experiments.experiment import Contender, run_name
from experiments.measured import Cells, Ratio, interval_of, paired, verdict_of
from experiments.study import Study, main

GIN_FILE = "configs/runs/pretrain_languages.gin"
LANGUAGES = tuple("en uk es zh_cn ja pt_br ko fr zh_tw tr it ro pl id".split())
SPARSE = "32 experts"
FEW_SLOTS = 2.0
SPEEDUP = "speed-up in steps (95%)"
FEW_GAIN = f"gain at factor {FEW_SLOTS} (95%)"
CONTENDERS = (Contender("dense", ("ModelConfig.switch=None",)), Contender(SPARSE))
SEEDS, STEPS = (0, 1, 2), 600
Curves = dict[str, list[dict[int, float]]]


def _seeds(study: Study) -> tuple[int, ...]:
    return SEEDS[:1] if study.is_quick else SEEDS


def by_language(study: Study, cells: Cells, contender: Contender) -> Curves:
    """Validation curves by language, one a seed."""
    every = max(STEPS // 10, 1)
    languages = LANGUAGES[-2:] if study.is_quick else LANGUAGES
    curves = {}
    for seed in _seeds(study):
        bindings = [
            "FOLDER='<data>/python_docs'", f"LANGUAGES={languages}", f"SEED={seed}",
            f"TRAIN_STEPS={STEPS}", f"EVAL_EVERY={every}", *contender.bindings,
        ]  # fmt: skip
        found = study.train(cells, run_name(contender.name, seed), [GIN_FILE], bindings)
        for task, curve in found["tasks"].items():
            of_language = curves.setdefault(task.removeprefix("text_"), [])
            of_language.append({int(step): value for step, value in curve.items()})
    return curves


def with_few_slots(study: Study, cells: Cells) -> dict[str, list[tuple[float, float]]]:
    """Experts' final quality at capacity factor FEW_SLOTS and the fraction of tokens that it
    drops, by language, one a seed."""
    found = {}
    for seed in _seeds(study):
        name = run_name(SPARSE, seed)
        factor = f"--gin.SwitchConfig.eval_capacity_factor={FEW_SLOTS}"
        arguments = ("eval", f"--model_dir=<run {name}>", factor)
        evaluated = study.command(cells, f"{name}_evaluated", *arguments)
        for task, metrics in evaluated["tasks"].items():
            of_seed = metrics["neg_log_perplexity"], metrics["dropped_fraction"]
            found.setdefault(task.removeprefix("text_"), []).append(of_seed)
    return found


def final(curves: list[dict[int, float]]) -> list[float]:
    return [curve[max(curve)] for curve in curves]


def speedup_in_steps(dense: dict[int, float], sparse: dict[int, float]) -> float:
    """Steps after which the dense model first has a quality over those of the experts (Figure
    8): the final quality of the dense model, or that of the experts where they end behind it,
    which gives a number below 1."""
    quality = min(*final([dense]), *final([sparse]))
    return first_step_at(dense, quality) / first_step_at(sparse, quality)


def first_step_at(curve: dict[int, float], quality: float) -> float | None:
    """Step at which a curve first reaches a quality, interpolated between evaluations; None
    where it never does."""
    points = sorted(curve.items())
    if points[0][1] >= quality:
        return points[0][0]
    for (step_0, value_0), (step_1, value_1) in zip(points, points[1:], strict=False):
        if value_0 < quality <= value_1:
            return step_0 + (quality - value_0) / (value_1 - value_0) * (step_1 - step_0)
    return None


def row_of(
    language: str,
    dense: list[dict[int, float]],
    sparse: list[dict[int, float]],
    few: list[tuple[float, float]],
) -> dict[str, Any]:
    """Of curves and of what FEW_SLOTS makes of their ends: means over seeds, intervals of
    what is paired by seed."""
    speedups = [speedup_in_steps(*pair) for pair in zip(dense, sparse, strict=True)]
    of_few, dropped = zip(*few, strict=True)
    return {
        "language": language,
        "dense": statistics.mean(final(dense)),
        SPARSE: statistics.mean(final(sparse)),
        "gain, nats per token (95%)": dataclasses.asdict(paired(final(sparse), final(dense))),
        SPEEDUP: dataclasses.asdict(interval_of(speedups, kind=Ratio)),
        FEW_GAIN: dataclasses.asdict(paired(of_few, final(dense))),
        "dropped there": statistics.mean(dropped),
    }


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
    mean = interval_of(list(means.values()), kind=Ratio)
    few = [row[FEW_GAIN] for row in rows]
    return {
        "verdict": verdict_of(
            2 * faster > len(rows) and mean.low > 1, 2 * slower > len(rows) or mean.high < 1
        ),
        "because": f"Experts have the dense model's final quality in fewer steps in {faster} "
        f"of {len(rows)} languages and in more in {slower}, by intervals that leave out 1; the "
        f"mean speed-up is {mean.mean:.2f}, from {means[least]:.2f} ({least}) to "
        f"{means[most]:.2f} ({most}). At capacity factor {FEW_SLOTS} the same models are ahead "
        f"in {sum(each['low'] > 0 for each in few)} and behind in "
        f"{sum(each['high'] < 0 for each in few)}.",
        "effect": mean,
        "effect_of": "speed-up of 32 experts over dense, in steps",
    }


def judge(results: dict[str, Any]) -> dict[str, Any]:
    dense, sparse = (
        {
            language: [{int(step): value for step, value in curve.items()} for curve in curves]
            for language, curves in results["by_language"][name].items()
        }
        for name in ("dense", SPARSE)
    )
    few = results["with_few_slots"]
    rows = [row_of(name, dense[name], sparse[name], few[name]) for name in dense]
    rows.sort(key=lambda row: -row[SPEEDUP]["mean"])
    return verdict(rows) | {
        "tables": [{"title": "", "rows": rows}],
        "intervals": {row["language"]: row[SPEEDUP] for row in rows},
    }


def run(study: Study) -> None:
    cells = study.cells()
    files = study.files("python_docs/*.txt.gz")
    dense, sparse = (by_language(study, cells, each) for each in CONTENDERS)
    study.publish(
        cells,
        files,
        judge,
        seeds=list(SEEDS),
        steps=STEPS,
        by_language={"dense": dense, SPARSE: sparse},
        with_few_slots=with_few_slots(study, cells),
    )


if __name__ == "__main__":
    main(__file__, __doc__, run)
