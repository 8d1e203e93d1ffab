# SPDX-License-Identifier: Apache-2.0
"""2 to 64 experts at equal FLOPs, and a dense model of about 3.5 times the FLOPs.

make experiments EXPERIMENT=switch_vs_dense DATA=FOLDER
"""

import statistics

from experiments.comparison import Trained, judge_of, run_comparison
from experiments.experiment import Comparison, Contender
from experiments.measured import Interval, paired
from experiments.study import main

EXPERTS = (2, 4, 8, 16, 32, 64)
LARGE = "dense, 3.5 times the FLOPs"
_LARGE_SIZES = {"d_model": 160, "d_ff": 640, "num_heads": 5, "d_head": 32}

COMPARISON = Comparison(
    contenders=(
        Contender("dense", ("ModelConfig.switch=None",)),
        *(Contender(f"{n} experts", (f"NUM_EXPERTS={n}",)) for n in EXPERTS),
        Contender(
            LARGE,
            (
                "ModelConfig.switch=None",
                *(f"ModelConfig.{name}={size}" for name, size in _LARGE_SIZES.items()),
            ),
        ),
    ),
    steps=400,
)


def of_a_doubling(trained: Trained) -> Interval:
    """What one gains on average, paired by seed."""
    fewest, most = (trained.final(f"{EXPERTS[i]} experts") for i in (0, -1))
    doublings = len(EXPERTS) - 1
    return paired([each / doublings for each in most], [each / doublings for each in fewest])


def found(trained: Trained) -> dict:
    """What was found."""
    names = ["dense", *(f"{n} experts" for n in EXPERTS)]
    gains = [trained.gain(b, a) for a, b in zip(names, names[1:], strict=False)]
    until = next((i for i, gain in enumerate(gains) if gain.low <= 0), len(gains))
    worse = [names[i + 1] for i in range(until, len(gains)) if gains[i].high < 0]
    best = max(names[1:], key=lambda name: statistics.mean(trained.final(name)))
    over_dense = trained.gain(best, "dense")
    in_time, large_in_time = (trained.speedup_in_time(name, "dense") for name in (best, LARGE))
    over_large = trained.gain(best, LARGE).mean
    # How far the larger model is when the sparse one has ended.
    step = COMPARISON.steps * trained.step_time(best, LARGE).mean
    by_time = statistics.mean(trained.final(best)) - trained.quality_at(LARGE, step)
    return {
        "because": f"A doubling is better up to {names[until]} and worse at "
        f"{', '.join(worse) or 'none'}; {best} have the dense "
        f"model's quality {in_time.mean:.2f} times as fast by time ({in_time.low:.2f} to "
        f"{in_time.high:.2f}) and end {over_dense.mean:.3f} nats ahead. Over a dense model of "
        f"3.5 times the FLOPs (Figure 6: ahead) they end {over_large:+.3f} nats, and "
        f"{by_time:+.3f} where it has had as much time; it has the small one's quality "
        f"{large_in_time.mean:.2f} times as fast.",
        "effect": of_a_doubling(trained),
        "effect_of": f"a doubling, the mean from {EXPERTS[0]} to {EXPERTS[-1]} experts, nats "
        "per token",
    }


judge = judge_of(found)


if __name__ == "__main__":
    main(__file__, __doc__, lambda study: run_comparison(study, COMPARISON, judge))
