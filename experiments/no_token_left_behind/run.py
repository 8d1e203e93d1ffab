# SPDX-License-Identifier: Apache-2.0
"""No-Token-Left-Behind: overflowing tokens are rerouted for 2 or 4 rounds, or dropped.

make experiments EXPERIMENT=no_token_left_behind DATA=FOLDER
"""

from experiments.comparison import Trained, judge_of, run_comparison
from experiments.experiment import Comparison, Contender
from experiments.study import main

ROUNDS = (2, 4)

COMPARISON = Comparison(
    contenders=(
        Contender("drop"),
        *(
            Contender(
                f"{n} rounds",
                ("RouterConfig.overflow='reroute'", f"RouterConfig.max_rounds={n}"),
            )
            for n in ROUNDS
        ),
        # What there is to gain: nothing is dropped, and each token stays with its own expert.
        Contender(
            "dropless",
            ("RouterConfig.overflow='dropless'", "SwitchConfig.dispatcher='dropless'"),
        ),
    ),
    bindings=("SwitchConfig.capacity_factor=1.0",),
)


def found(trained: Trained) -> dict:
    """What was found."""
    gains = {f"{n} rounds": trained.gain(f"{n} rounds", "drop") for n in ROUNDS}
    said = ", ".join(f"{name} {gain}" for name, gain in gains.items())
    most = trained.gain("dropless", "drop")
    return {
        "because": f"Over dropping at capacity factor 1.0, nats per token: {said}; with slots "
        f"for all {most.mean:+.3f}.",
        "effect": gains["4 rounds"],
        "effect_of": "4 rounds over dropping, nats per token",
    }


judge = judge_of(found)


if __name__ == "__main__":
    main(__file__, __doc__, lambda study: run_comparison(study, COMPARISON, judge))
