# SPDX-License-Identifier: Apache-2.0
"""Dropout 0.1, 0.2, 0.3, and 0.1 with expert dropout 0.4, in fine-tuning (Table 4).

make experiments EXPERIMENT=expert_dropout DATA=FOLDER
"""

import statistics
from typing import Any

from experiments.fine_tuning.run import files_of, tuned
from experiments.measured import Interval, mean_of_tasks, paired
from experiments.study import Study, main

# Half of what fine_tuning takes, its texts as long for all tasks.
SHORT = ("TRAIN_STEPS=100", "EVAL_EVERY=50", "CHECKPOINT_EVERY=100", "INPUTS_LENGTH=80")
TASKS = ("glue_cola", "glue_sst2", "trec")
PAIR = "0.1, experts 0.4"
RATES = {"0.1": (0.1, 0.1), "0.2": (0.2, 0.2), "0.3": (0.3, 0.3), PAIR: (0.1, 0.4)}


def gains_over(means: dict[str, dict[str, list[float]]]) -> dict[str, Interval]:
    """Of the pair over each single rate, in points, on average over the tasks."""
    of_seeds = {name: mean_of_tasks(scores) for name, scores in means.items()}
    pair = of_seeds.pop(PAIR)
    return {name: paired(pair, each) for name, each in of_seeds.items()}


def found(means: dict[str, dict[str, list[float]]]) -> dict:
    """What was found."""
    gains = gains_over(means)
    ahead = [name for name, gain in gains.items() if gain.high < 0]
    alone = gains["0.1"]
    return {
        "because": f"Ahead of 0.1 with expert dropout 0.4 by intervals that leave out 0: "
        f"{', '.join(ahead) or 'none'}. Over 0.1 alone the pair is {alone.low:+.1f} to "
        f"{alone.high:+.1f} points.",
        "effect": alone,
        "effect_of": "expert dropout 0.4 over dropout 0.1, points",
    }


def judge(results: dict[str, Any]) -> dict[str, Any]:
    scores = results["scores"]
    rows = [
        {"dropout": name} | {task: round(statistics.mean(of), 1) for task, of in each.items()}
        for name, each in scores.items()
    ]
    return found(scores) | {
        "tables": [{"title": "", "rows": rows}],
        "intervals": {f"over {name}": gain for name, gain in gains_over(scores).items()},
        "intervals_of": "dropout 0.1 with expert dropout 0.4 over one rate for all, points",
    }


def run(study: Study) -> None:
    cells = study.cells()
    tasks, seeds = (("trec",), (0,)) if study.is_quick else (TASKS, (0, 1, 2))
    files = files_of(study, tasks)
    scores = {
        name: {
            task: [
                tuned(
                    study, cells, "32 experts", task, seed, *SHORT,
                    f"ModelConfig.dropout_rate={rate}",
                    f"SwitchConfig.expert_dropout_rate={expert_rate}",
                ).score
                for seed in seeds
            ]
            for task in tasks
        }
        for name, (rate, expert_rate) in RATES.items()
    }  # fmt: skip
    study.publish(cells, files, judge, seeds=list(seeds), scores=scores)


if __name__ == "__main__":
    main(__file__, __doc__, run)
