# SPDX-License-Identifier: Apache-2.0
"""Dense against 16 experts on 14 languages, nothing dropped: the gain in each and in the mean.

make experiments EXPERIMENT=multilingual DATA=FOLDER
"""

import itertools
from typing import Any

from experiments import rules
from experiments.experiment import run_name
from experiments.ladder import R1, OnLadder, bindings_of, wall_seconds
from experiments.rules import Rule
from experiments.side_by_side import on_each_core
from experiments.statistics import difference, finite_mean, interval_over
from experiments.study import Study, main
from experiments.switch_vs_dense.run import SECOND, SEEDS

LANGUAGES = tuple("en uk es zh_cn ja pt_br ko fr zh_tw tr it ro pl id".split())
GIN_FILE = "configs/runs/ladder_languages.gin"
DENSE, SPARSE = (each.name for each in SECOND.contenders)
RULES = (
    Rule(
        "16 experts are ahead of the dense model in the mean over languages",
        difference(SPARSE, DENSE),
        "ahead",
        margin=None,  # that of the ladder is of other tokens
        looks=(4,),
        seeds=SEEDS[:4],
        expected=0.04,
    ),
)


def judge(results: dict[str, Any]) -> dict[str, Any]:
    """By the rule; beside it the gain in each language, which judges nothing."""
    gains = {
        language: interval_over(by, SPARSE, DENSE)
        for language, by in results["languages"].items()
    }
    rows = [
        {"language": language}
        | {model: finite_mean(qualities) for model, qualities in by.items()}
        | {"gain, nats per token (95%)": gains[language]}
        for language, by in results["languages"].items()
    ]
    return rules.judged(RULES, results) | {
        "tables": [{"title": "", "rows": rows}],
        "intervals": {name: each for name, each in gains.items() if each},
        "intervals_of": "16 experts over dense, nats per token",
    }


def run(study: Study) -> None:
    cells, files = study.cells(), study.files("python_docs/*.txt.gz")
    seeds = (0,) if study.is_quick else RULES[0].seeds_at(study.look)
    languages = LANGUAGES[-2:] if study.is_quick else LANGUAGES

    def trained(pair: tuple[int, OnLadder]) -> dict[str, float]:
        """Quality after the last step, by language."""
        seed, contender = pair
        asked = bindings_of(study, R1, contender, seed)
        ours = [each for each in asked if not each.startswith("FILES=")]
        ours += [f"LANGUAGES={languages}", "FOLDER='<data>/python_docs'"]
        found = study.train(cells, run_name(contender.name, seed), [GIN_FILE], ours)
        ends = {task: curve[max(curve, key=int)] for task, curve in found["tasks"].items()}
        return {task.removeprefix("text_"): quality for task, quality in ends.items()}

    pairs = [*itertools.product(seeds, SECOND.contenders)]
    ends = list(zip(pairs, on_each_core(trained, pairs), strict=True))
    by_language = {
        language: {
            each.name: [end[language] for (_, one), end in ends if one == each]
            for each in SECOND.contenders
        }
        for language in languages
    }
    curves = {
        each.name: [
            {"1": finite_mean([*end.values()])} for (_, one), end in ends if one == each
        ]
        for each in SECOND.contenders
    }
    study.publish(cells, files, judge, seeds=list(seeds), curves=curves,
                  languages=by_language, wall_seconds=wall_seconds(cells))  # fmt: skip


if __name__ == "__main__":
    main(__file__, __doc__, run)
