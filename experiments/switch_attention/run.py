# SPDX-License-Identifier: Apache-2.0
"""Experts in the FFN, in the attention, in both; in float32 and in bfloat16.

make experiments EXPERIMENT=switch_attention DATA=FOLDER
"""

from experiments.comparison import Trained, judge_of, run_comparison
from experiments.experiment import Comparison, Contender
from experiments.study import main

_WHERE = ("ffn", "attention", "both")
_SELECTIVE = (
    "ModelConfig.precision=@config.Precision()",
    "config.Precision.compute='bfloat16'",
)

COMPARISON = Comparison(
    contenders=(
        *(Contender(f"{w} float32", (f"SwitchConfig.sublayers='{w}'",)) for w in _WHERE),
        *(
            Contender(f"{w} bfloat16", (f"SwitchConfig.sublayers='{w}'", *_SELECTIVE))
            for w in _WHERE
        ),
    ),
    steps=250,
    # A run that diverges is a result.
    bindings=("TrainingJob.max_skipped_in_a_row=1000000",),
)


def found(trained: Trained) -> dict:
    """What was found."""
    order = [("attention", "ffn"), ("both", "ffn"), ("both", "attention")]
    gains = {pair: trained.gain(*(f"{where} float32" for where in pair)) for pair in order}
    said = ", ".join(f"{a} over {b} {gain.mean:+.3f}" for (a, b), gain in gains.items())
    lower = []
    for where in _WHERE:
        name = f"{where} bfloat16"
        gain = trained.gain(name, f"{where} float32")
        lower.append(f"{where} {str(gain)[:-1]}, {trained.skipped[name]} steps skipped)")
    return {
        "because": f"Nats per token, float32: {said}; bfloat16 over float32: "
        f"{', '.join(lower)}.",
        "effect": gains["both", "ffn"],
        "effect_of": "experts in both over experts in the FFN, nats per token",
    }


judge = judge_of(found)


if __name__ == "__main__":
    main(__file__, __doc__, lambda study: run_comparison(study, COMPARISON, judge))
