# SPDX-License-Identifier: Apache-2.0
"""Experts in the FFN, in the attention, in both; those in the attention in bfloat16, too.

make experiments EXPERIMENT=switch_attention DATA=FOLDER
"""

from experiments.comparison import Comparison, Contender, Trained, run_comparison
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
            for w in _WHERE[1:]
        ),
    ),
    steps=250,
    # A run that diverges is a result.
    bindings=("TrainingJob.max_skipped_in_a_row=1000000",),
)


def verdict(trained: Trained) -> dict:
    """Reproduced (Table 10): in float32 both > FFN and attention > FFN in quality at equal
    steps, and with attention experts bfloat16 diverges or ends below float32."""
    both = trained.gain("both float32", "ffn float32")
    attention = trained.gain("attention float32", "ffn float32")
    names = ("attention", "both")
    lower = {w: trained.gain(f"{w} bfloat16", f"{w} float32") for w in names}
    is_unstable = any(trained.skipped[f"{w} bfloat16"] > 0 or lower[w].high < 0 for w in names)
    is_ordered = both.low > 0 and attention.low > 0
    return {
        "verdict": "reproduced" if is_ordered and is_unstable else "not reproduced",
        "because": f"Over experts in the FFN: in the attention {attention.mean:+.3f} nats, in "
        f"both {both.mean:+.3f}; bfloat16 with experts in the attention "
        f"{'diverges or is worse' if is_unstable else 'trains as float32 does'}.",
        "effect": both,
        "effect_of": "experts in both over experts in the FFN, nats a token",
    }


if __name__ == "__main__":
    main(__file__, __doc__, lambda study: run_comparison(study, COMPARISON, verdict))
