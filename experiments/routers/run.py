# SPDX-License-Identifier: Apache-2.0
"""Other routers at equal FLOPs: hash, loss-free balancing, batch priority, dropless.

make experiments EXPERIMENT=routers DATA=FOLDER
"""

from experiments.comparison import Comparison, Contender, Trained, run_comparison
from experiments.study import main

COMPARISON = Comparison(
    contenders=(
        Contender("Switch"),
        Contender("hash", ("RouterConfig.kind='hash'", "RouterConfig.exploration='none'")),
        Contender("loss-free balancing", ("RouterConfig.bias_update_rate=0.001",)),
        Contender("batch priority", ("RouterConfig.priority='gate'",)),
        Contender("dropless", ("RouterConfig.overflow='dropless'",)),
    ),
)


def verdict(trained: Trained) -> dict:
    """The paper has no such table: reported, with what is better or worse than Switch."""
    gains = {name: trained.gain(name, "Switch") for name in trained.curves if name != "Switch"}
    better = [name for name, gain in gains.items() if gain.low > 0]
    worse = [name for name, gain in gains.items() if gain.high < 0]
    best = max(gains, key=lambda name: gains[name].mean)
    return {
        "verdict": "reported",
        "because": f"Better than Switch: {', '.join(better) or 'none'}; worse: "
        f"{', '.join(worse) or 'none'}.",
        "effect": gains[best],
        "effect_of": f"{best} over Switch, nats a token",
    }


if __name__ == "__main__":
    main(__file__, __doc__, lambda study: run_comparison(study, COMPARISON, verdict))
