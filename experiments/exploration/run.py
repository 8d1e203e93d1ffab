# SPDX-License-Identifier: Apache-2.0
"""Argmax, sampling from the softmax, dropout and jitter of the router's inputs.

make experiments EXPERIMENT=exploration DATA=FOLDER
"""

from experiments.comparison import Trained, judge_of, run_comparison
from experiments.experiment import Comparison, Contender
from experiments.study import main

NAMES = {"argmax": "none", "sampling": "sample", "input dropout": "dropout", "jitter": "jitter"}

COMPARISON = Comparison(
    contenders=tuple(
        Contender(name, (f"RouterConfig.exploration='{kind}'",)) for name, kind in NAMES.items()
    ),
    times=False,
)


def found(trained: Trained) -> dict:
    """What was found."""
    gains = {name: trained.gain("jitter", name) for name in NAMES if name != "jitter"}
    said = ", ".join(f"{gain} over {name}" for name, gain in gains.items())
    return {
        "because": f"Jitter is {said}, nats per token.",
        "effect": gains["argmax"],
        "effect_of": "jitter over argmax, nats per token",
    }


judge = judge_of(found)


if __name__ == "__main__":
    main(__file__, __doc__, lambda study: run_comparison(study, COMPARISON, judge))
