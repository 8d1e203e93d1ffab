# SPDX-License-Identifier: Apache-2.0
"""Dropout 0.1, 0.2, 0.3, and 0.1 with expert dropout 0.4, in fine-tuning (Table 4).

make experiments EXPERIMENT=expert_dropout DATA=FOLDER
"""

import dataclasses
import statistics

from experiments.fine_tuning.run import DATA, tuned
from experiments.pages import publish_page
from experiments.study import Study, bootstrap, main

TASKS = ("glue_cola", "glue_sst2", "trec")
RATES = {
    "0.1": (0.1, 0.1),
    "0.2": (0.2, 0.2),
    "0.3": (0.3, 0.3),
    "0.1, experts 0.4": (0.1, 0.4),
}


def verdict(means: dict[str, dict[str, list[float]]]) -> dict:
    """Reproduced: no single rate is ahead of the pair, over all tasks and seeds, by an interval
    that leaves out 0."""
    pair = means["0.1, experts 0.4"]
    gains = {
        name: bootstrap([p - o for t in pair for p, o in zip(pair[t], each[t], strict=True)])
        for name, each in means.items()
        if each is not pair
    }
    ahead = [name for name, gain in gains.items() if gain.high < 0]
    return {
        "verdict": "not reproduced" if ahead else "reproduced",
        "because": f"Ahead of 0.1 with expert dropout 0.4 by intervals that leave out 0: "
        f"{', '.join(ahead) or 'none'}.",
        "effect": gains["0.1"],
        "effect_of": "expert dropout 0.4 over dropout 0.1, points",
    }


def run(study: Study) -> None:
    cells = study.cells()
    tasks, seeds = (("trec",), (0,)) if study.is_quick else (TASKS, (0, 1, 2))
    files = study.files(*(DATA[task] for task in tasks))
    scores = {
        name: {
            task: [
                tuned(
                    study, cells, "32 experts", task, seed,
                    f"ModelConfig.dropout_rate={rate}",
                    f"SwitchConfig.expert_dropout_rate={expert_rate}",
                )
                for seed in seeds
            ]
            for task in tasks
        }
        for name, (rate, expert_rate) in RATES.items()
    }  # fmt: skip
    rows = [
        {"dropout": name} | {task: round(statistics.mean(each[task]), 1) for task in tasks}
        for name, each in scores.items()
    ]
    judged = verdict(scores)
    study.publish(
        cells, files, **judged, seeds=list(seeds), tables=[{"title": "", "rows": rows}],
        intervals={judged["effect_of"]: dataclasses.asdict(judged["effect"])},
    )  # fmt: skip
    if not study.is_quick:
        publish_page(study.folder)


if __name__ == "__main__":
    main(__file__, __doc__, run)
