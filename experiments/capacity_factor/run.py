# SPDX-License-Identifier: Apache-2.0
"""Switch (top-1), MoE (top-2) and dense at capacity factors 1.0 and 2.0.

make experiments EXPERIMENT=capacity_factor DATA=FOLDER
"""

from experiments.comparison import Comparison, Contender, Trained, run_comparison
from experiments.study import main

FACTORS = (1.0, 2.0)


def _sparse(name: str, factor: float, selected: int) -> Contender:
    gate = "softmax" if selected == 1 else "normalized"
    return Contender(
        f"{name} {factor}",
        (
            f"SwitchConfig.capacity_factor={factor}",
            f"SwitchConfig.eval_capacity_factor={max(factor, 2.0)}",
            f"RouterConfig.num_selected={selected}",
            f"RouterConfig.gate='{gate}'",
        ),
    )


COMPARISON = Comparison(
    contenders=(
        Contender("dense", ("ModelConfig.switch=None",)),
        *(_sparse("Switch", factor, 1) for factor in FACTORS),
        *(_sparse("MoE", factor, 2) for factor in FACTORS),
    ),
)


def verdict(trained: Trained) -> dict:
    """Reproduced: at factor 1.0 Switch has the dense model's quality in less time than MoE,
    and by time factor 1.0 is no slower than 2.0."""

    def in_time(name: str) -> float:
        return trained.speedup_in_steps(name, "dense") / trained.step_times[name]

    ahead = [f for f in FACTORS if in_time(f"Switch {f}") > in_time(f"MoE {f}")]
    lower = in_time("Switch 1.0") / in_time("Switch 2.0")
    is_reproduced = 1.0 in ahead and lower >= 1
    where = ", ".join(map(str, ahead)) or "none"
    return {
        "verdict": "reproduced" if is_reproduced else "not reproduced",
        "because": f"By time to the dense model's quality Switch is ahead of MoE at factors "
        f"{where}, and at 1.0 {lower:.2f} times as fast as at 2.0.",
        "effect": trained.gain("Switch 1.0", "MoE 1.0"),
        "effect_of": "Switch over MoE at factor 1.0, nats a token at equal steps",
    }


if __name__ == "__main__":
    main(__file__, __doc__, lambda study: run_comparison(study, COMPARISON, verdict))
