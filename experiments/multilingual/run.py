# SPDX-License-Identifier: Apache-2.0
"""Dense against 32 experts on 14 languages: steps to equal quality by language.

Validation has one language a batch, whose tokens ask for the same few experts: capacity
factor 2.0 drops many of them. Each sparse run is therefore evaluated again with slots for all.

make experiments EXPERIMENT=multilingual DATA=FOLDER
"""

import dataclasses
import statistics
from typing import Any

from experiments.comparison import Comparison, Contender, first_step_at
from experiments.measured import Cells, bootstrap, paired
from experiments.study import Study, main, run_name

GIN_FILE = "configs/runs/pretrain_languages.gin"
LANGUAGES = tuple("en uk es zh_cn ja pt_br ko fr zh_tw tr it ro pl id".split())
NUM_EXPERTS = 32
SPARSE = f"{NUM_EXPERTS} experts"
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


def with_slots_for_all(study: Study, cells: Cells, contender: Contender) -> Curves:
    """The last step's quality by language with a slot for every token, as curves of a point."""
    curves = {}
    for seed in _seeds(study):
        name = run_name(contender.name, seed)
        factor = f"--gin.SwitchConfig.eval_capacity_factor={NUM_EXPERTS}"
        arguments = ("eval", f"--model_dir=<run {name}>", factor)
        found = study.command(cells, f"{name}_evaluated", *arguments)
        for task, metrics in found["tasks"].items():
            of_language = curves.setdefault(task.removeprefix("text_"), [])
            of_language.append({found["step"]: metrics["neg_log_perplexity"]})
    return curves


def row_of(language: str, dense: list[dict], sparse: list[dict]) -> dict[str, Any]:
    """Of one language: means over seeds, and the gain paired by seed."""
    finals = [[curve[max(curve)] for curve in curves] for curves in (dense, sparse)]
    gain = paired(finals[1], finals[0])
    return {
        "language": language,
        "dense": statistics.mean(finals[0]),
        SPARSE: statistics.mean(finals[1]),
        "gain, nats a token (95%)": dataclasses.asdict(gain),
    }


def speedup_in_steps(dense: list[dict], sparse: list[dict]) -> float | None:
    """Steps over those after which experts have the dense model's final quality, a mean over
    seeds; None where they have it not on all."""
    pairs = zip(sparse, dense, strict=True)
    steps = [first_step_at(mine, theirs[max(theirs)]) for mine, theirs in pairs]
    if None in steps:
        return None
    return statistics.mean(max(curve) / step for curve, step in zip(sparse, steps, strict=True))


def verdict(rows: list[dict]) -> dict[str, Any]:
    """Reproduced: experts end ahead in more than half of the languages by intervals that leave
    out 0, and the mean gain over languages is above 0 in its interval."""
    gains = {row["language"]: row["gain, nats a token (95%)"] for row in rows}
    ahead = [name for name, gain in gains.items() if gain["low"] > 0]
    behind = [name for name, gain in gains.items() if gain["high"] < 0]
    known = [row["speedup in steps"] for row in rows if row["speedup in steps"] is not None]
    mean = bootstrap([gain["mean"] for gain in gains.values()])
    word = "reproduced" if 2 * len(ahead) > len(rows) and mean.low > 0 else "not reproduced"
    if not mean.excludes_zero:
        word = "undecided"
    fewer = f"{statistics.mean(known):.2f} times fewer" if known else "no fewer"
    return {
        "verdict": word,
        "because": f"Of {len(rows)} languages experts end ahead in {len(ahead)} and behind in "
        f"{len(behind)}, by intervals that leave out 0. They have the dense model's quality in "
        f"{fewer} steps on average over the {len(known)} languages where all seeds reach it.",
        "effect": mean,
        "effect_of": "32 experts over dense, nats a token, over languages",
    }


def run(study: Study) -> None:
    cells = study.cells()
    files = study.files("python_docs/*.txt.gz")
    dense, sparse = (by_language(study, cells, each) for each in COMPARISON.contenders)
    slots = with_slots_for_all(study, cells, COMPARISON.contenders[1])
    rows, rows_of_slots = [], []
    for language, theirs in dense.items():
        speedup = speedup_in_steps(theirs, sparse[language])
        rows.append(row_of(language, theirs, sparse[language]) | {"speedup in steps": speedup})
        rows_of_slots.append(row_of(language, theirs, slots[language]))
    gains = [row["gain, nats a token (95%)"] for row in rows_of_slots]
    ahead = sum(gain["low"] > 0 for gain in gains)
    mean = statistics.mean(gain["mean"] for gain in gains)
    title = (
        f"With slots for all tokens in evaluation experts end ahead in {ahead} of "
        f"{len(gains)} languages by intervals that leave out 0, by {mean:.3f} nats a token on "
        "average:"
    )
    study.publish(
        cells,
        files,
        **verdict(rows),
        seeds=list(COMPARISON.seeds),
        tables=[{"title": "", "rows": rows}, {"title": title, "rows": rows_of_slots}],
        intervals={
            f"{row['language']}{how}": row["gain, nats a token (95%)"]
            for each in zip(rows, rows_of_slots, strict=True)
            for row, how in zip(each, ("", ", slots for all"), strict=True)
        },
    )


if __name__ == "__main__":
    main(__file__, __doc__, run)
