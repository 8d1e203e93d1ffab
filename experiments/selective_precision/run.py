# SPDX-License-Identifier: Apache-2.0
"""float32, and bfloat16 with a float32 router, with a bfloat16 one, and in the parameters too.

make experiments EXPERIMENT=selective_precision DATA=FOLDER
"""

from experiments.comparison import Comparison, Contender, Trained, run_comparison
from experiments.study import main

# Nats a token that count as equal: an eighth of what 32 experts gain over a dense model.
EQUAL = 0.02


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
        # The router alone differs from `selective`.
        _precision("bfloat16", "float32", "bfloat16", "bfloat16"),
        _precision("bfloat16 parameters", "bfloat16", "bfloat16", "bfloat16"),
    ),
    # A run that diverges is a result.
    bindings=("TrainingJob.max_skipped_in_a_row=1000000",),
    times=False,
)


def verdict(trained: Trained) -> dict:
    """Reproduced: bfloat16 with a bfloat16 router skips steps or ends below float32 by an
    interval without 0, and selective precision is within `EQUAL` of float32.

    Not reproduced: bfloat16 skips nothing and is no more than `EQUAL` below, or selective
    precision is further below than that, by whole intervals. Otherwise undecided.
    """
    names = ("selective", "bfloat16", "bfloat16 parameters")
    gains = {name: trained.gain(name, "float32") for name in names}
    selective, low = gains["selective"], gains["bfloat16"]
    skipped = trained.skipped["bfloat16"]
    is_worse = skipped > 0 or low.high < 0
    is_equal = selective.low > -EQUAL and selective.high < EQUAL
    word = "undecided"
    if is_worse and is_equal:
        word = "reproduced"
    elif (not is_worse and low.low > -EQUAL) or selective.high < -EQUAL:
        word = "not reproduced"
    said = ", ".join(
        f"{name} {gain.mean:+.3f} ({gain.low:+.3f} to {gain.high:+.3f}, "
        f"{trained.skipped[name]} steps skipped)"
        for name, gain in gains.items()
    )
    return {
        "verdict": word,
        "because": f"Nats a token from float32: {said}.",
        "effect": selective,
        "effect_of": "selective precision over float32, nats a token",
    }


if __name__ == "__main__":
    main(__file__, __doc__, lambda study: run_comparison(study, COMPARISON, verdict))
