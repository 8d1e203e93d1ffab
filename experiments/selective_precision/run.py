# SPDX-License-Identifier: Apache-2.0
"""float32, bfloat16 everywhere, and bfloat16 with a float32 router.

make experiments EXPERIMENT=selective_precision DATA=FOLDER
"""

from experiments.comparison import Comparison, Contender, Trained, run_comparison
from experiments.study import main


def _precision(name: str, params: str, compute: str, router: str) -> Contender:
    return Contender(
        name,
        (
            "ModelConfig.precision=@config.Precision()",
            f"config.Precision.params='{params}'",
            f"config.Precision.compute='{compute}'",
            f"config.Precision.router='{router}'",
        ),
    )


COMPARISON = Comparison(
    contenders=(
        _precision("float32", "float32", "float32", "float32"),
        _precision("selective", "float32", "bfloat16", "float32"),
        _precision("bfloat16", "bfloat16", "bfloat16", "bfloat16"),
    ),
    # A run that diverges is a result.
    bindings=("TrainingJob.max_skipped_in_a_row=1000000",),
    times=False,
)


def verdict(trained: Trained) -> dict:
    """Reproduced: bfloat16 skips steps or ends below float32, and selective precision neither
    ends below float32 nor differs from it by more than bfloat16 does."""
    low = trained.gain("bfloat16", "float32")
    selective = trained.gain("selective", "float32")
    is_worse = trained.skipped["bfloat16"] > 0 or low.high < 0
    is_equal = selective.high >= 0 and abs(selective.mean) < abs(low.mean)
    word = "reproduced" if is_worse and is_equal else "not reproduced"
    if not is_worse and low.high >= 0 > low.low:
        word = "undecided"
    return {
        "verdict": word,
        "because": f"bfloat16 ends {low.mean:+.3f} nats from float32 and skips "
        f"{trained.skipped['bfloat16']} steps; selective precision {selective.mean:+.3f}.",
        "effect": selective,
        "effect_of": "selective precision over float32, nats a token",
    }


if __name__ == "__main__":
    main(__file__, __doc__, lambda study: run_comparison(study, COMPARISON, verdict))
