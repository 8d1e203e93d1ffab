# SPDX-License-Identifier: Apache-2.0
"""Argmax, sampling from the softmax, dropout and jitter of the router's inputs.

make experiments EXPERIMENT=exploration DATA=FOLDER
"""

from experiments.comparison import Comparison, Contender, Trained, run_comparison
from experiments.study import main

NAMES = {"argmax": "none", "sampling": "sample", "input dropout": "dropout", "jitter": "jitter"}

COMPARISON = Comparison(
    contenders=tuple(
        Contender(name, (f"RouterConfig.exploration='{kind}'",)) for name, kind in NAMES.items()
    ),
    times=False,
)


def verdict(trained: Trained) -> dict:
    """Reproduced: jitter is significantly worse than none of the others."""
    gains = {name: trained.gain("jitter", name) for name in NAMES if name != "jitter"}
    worse_than = [name for name, gain in gains.items() if gain.high < 0]
    better_than = [name for name, gain in gains.items() if gain.low > 0]
    return {
        "verdict": "not reproduced" if worse_than else "reproduced",
        "because": f"Jitter is better than {', '.join(better_than) or 'none'} and worse than "
        f"{', '.join(worse_than) or 'none'} with an interval that leaves out 0.",
        "effect": gains["argmax"],
        "effect_of": "jitter over argmax, nats a token",
    }


if __name__ == "__main__":
    main(__file__, __doc__, lambda study: run_comparison(study, COMPARISON, verdict))
