# SPDX-License-Identifier: Apache-2.0
"""No-Token-Left-Behind: overflowing tokens are rerouted for 2 or 4 rounds, or dropped.

make experiments EXPERIMENT=no_token_left_behind DATA=FOLDER
"""

from experiments.comparison import Comparison, Contender, Trained, run_comparison
from experiments.study import main

COMPARISON = Comparison(
    contenders=(
        Contender("drop"),
        *(
            Contender(
                f"{n} rounds",
                ("RouterConfig.overflow='reroute'", f"RouterConfig.max_rounds={n}"),
            )
            for n in (2, 4)
        ),
        Contender("dropless", ("RouterConfig.overflow='dropless'",)),
    ),
    bindings=("SwitchConfig.capacity_factor=1.0",),
)


def verdict(trained: Trained) -> dict:
    """Reproduced: no number of rounds has a gain whose interval leaves out 0."""
    gains = {name: trained.gain(name, "drop") for name in ("2 rounds", "4 rounds")}
    two, four = (gain.mean for gain in gains.values())
    gained = [name for name, gain in gains.items() if gain.low > 0]
    return {
        "verdict": "not reproduced" if gained else "reproduced",
        "because": f"Over dropping at capacity factor 1.0: 2 rounds {two:+.3f} nats, "
        f"4 rounds {four:+.3f}.",
        "effect": gains["4 rounds"],
        "effect_of": "4 rounds over dropping, nats a token",
    }


if __name__ == "__main__":
    main(__file__, __doc__, lambda study: run_comparison(study, COMPARISON, verdict))
