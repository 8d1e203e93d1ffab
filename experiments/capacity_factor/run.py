# SPDX-License-Identifier: Apache-2.0
"""Switch (top-1), MoE (top-2) and dense at capacity factors 1.0, 1.25 and 2.0.

make experiments EXPERIMENT=capacity_factor DATA=FOLDER
"""

from experiments.comparison import Trained, first_step_at, judge_of, run_comparison
from experiments.experiment import Comparison, Contender
from experiments.measured import Ratio, interval_of
from experiments.study import main

FACTORS = (1.0, 1.25, 2.0)


def _sparse(name: str, factor: float, selected: int) -> Contender:
    """A factor of the paper's eq. 3, slots over tokens; `SwitchConfig` counts choices."""
    gate = "softmax" if selected == 1 else "normalized"
    return Contender(
        f"{name} {factor}",
        (
            f"SwitchConfig.capacity_factor={factor / selected}",
            f"RouterConfig.num_selected={selected}",
            f"RouterConfig.gate='{gate}'",
        ),
    )


COMPARISON = Comparison(
    contenders=(
        Contender("dense", ("ModelConfig.switch=None",)),
        *(_sparse("Switch", factor, 1) for factor in FACTORS),
        *(_sparse("MoE", factor, 2) for factor in FACTORS),
    )
)


def time_over(trained: Trained, name: str, other: str) -> Ratio | None:
    """Time of `name` to the dense model's final quality over that of `other`, paired by seed,
    its bounds by the timings that are farthest; None where a seed of either never has that
    quality."""
    ratios = []
    for seed, dense in enumerate(trained.curves["dense"]):
        quality = dense[max(dense)]
        steps = [first_step_at(trained.curves[each][seed], quality) for each in (name, other)]
        if None in steps:
            return None
        ratios.append(steps[0] / steps[1])
    steps, time = interval_of(ratios), trained.step_time(name, other)
    return Ratio(steps.mean * time.mean, steps.low * time.low, steps.high * time.high)


def found(trained: Trained) -> dict:
    """What was found."""
    over_moe = {f: time_over(trained, f"Switch {f}", f"MoE {f}") for f in FACTORS}
    lower = time_over(trained, "Switch 1.0", "Switch 2.0")

    def said(ratio: Ratio | None) -> str:
        if ratio is None:
            return "an unknown multiple"
        return f"{ratio.mean:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"

    by_factor = ", ".join(f"{said(over_moe[f])} at {f}" for f in FACTORS)
    return {
        "because": f"To the dense model's quality Switch takes, of MoE's time, {by_factor}; at "
        f"factor 1.0, of its own at 2.0, {said(lower)}.",
        "effect": over_moe[1.0] or Ratio(1.0, 1.0, 1.0),
        "effect_of": "time of Switch over that of MoE, to the dense model's quality, factor 1.0"
        + " (unknown)" * (over_moe[1.0] is None),
    }


judge = judge_of(found)


if __name__ == "__main__":
    main(__file__, __doc__, lambda study: run_comparison(study, COMPARISON, judge))
