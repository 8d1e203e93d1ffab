# SPDX-License-Identifier: Apache-2.0
"""Dense against 32 experts on 14 languages: steps to equal quality by language.

make experiments EXPERIMENT=multilingual DATA=FOLDER
"""

import statistics

from experiments.comparison import Comparison, Contender, first_step_at
from experiments.pages import publish_page
from experiments.study import Study, bootstrap, main, run_name

GIN_FILE = "configs/runs/pretrain_languages.gin"
LANGUAGES = tuple("en uk es zh_cn ja pt_br ko fr zh_tw tr it ro pl id".split())
COMPARISON = Comparison(
    contenders=(Contender("dense", ("ModelConfig.switch=None",)), Contender("32 experts")),
    steps=1500,
    seeds=(0,),
)


def by_language(study: Study, cells, contender: Contender) -> dict[str, dict[int, float]]:
    """Validation curves of one seed."""
    every = max(COMPARISON.steps // 10, 1)
    bindings = ["FOLDER='<data>/python_docs'", f"TRAIN_STEPS={COMPARISON.steps}"]
    bindings += [f"EVAL_EVERY={every}", f"LANGUAGES={LANGUAGES}", *contender.bindings]
    if study.is_quick:
        bindings += [f"LANGUAGES={LANGUAGES[-2:]}"]
    found = study.train(cells, run_name(contender.name, 0), [GIN_FILE], bindings)
    return {
        task.removeprefix("text_"): {int(step): value for step, value in curve.items()}
        for task, curve in found["tasks"].items()
    }


def verdict(rows: list[dict]) -> dict:
    """Reproduced: experts end ahead in more than half of the languages, and the mean speedup in
    steps is above 1 in its interval over languages."""
    gains = bootstrap([row["gain, nats a token"] for row in rows])
    ahead = sum(row["gain, nats a token"] > 0 for row in rows)
    known = [row["speedup in steps"] for row in rows if row["speedup in steps"] is not None]
    speedup = statistics.mean(known) if known else 0.0
    is_ahead = 2 * ahead > len(rows) and gains.low > 0
    return {
        "verdict": "reproduced" if is_ahead else "not reproduced",
        "because": f"Experts end ahead in {ahead} of {len(rows)} languages, and have the dense "
        f"model's quality in {speedup:.2f} times fewer steps on average over the {len(known)} "
        "languages where they reach it.",
        "effect": gains,
        "effect_of": "32 experts over dense, nats a token, over languages",
    }


def run(study: Study) -> None:
    cells = study.cells()
    dense, sparse = (by_language(study, cells, each) for each in COMPARISON.contenders)
    rows, gains = [], {}
    for language, curve in sparse.items():
        last, theirs = max(curve), dense[language]
        gains[language] = curve[last] - theirs[last]
        step = first_step_at(curve, theirs[last])
        rows.append(
            {
                "language": language,
                "dense": theirs[last],
                "32 experts": curve[last],
                "gain, nats a token": gains[language],
                "speedup in steps": last / step if step else None,
            }
        )
    study.publish(
        cells,
        study.files("python_docs/*.txt.gz"),
        **verdict(rows),
        seeds=[0],
        tables=[{"title": "", "rows": rows}],
        intervals={name: {"mean": g, "low": g, "high": g} for name, g in gains.items()},
    )
    if not study.is_quick:
        publish_page(study.folder)


if __name__ == "__main__":
    main(__file__, __doc__, run)
