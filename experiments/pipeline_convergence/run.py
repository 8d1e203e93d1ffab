# SPDX-License-Identifier: Apache-2.0
"""A GPT, dense and with experts, trained by Pipeline MoE's two stages (4.2, Figure 5).

    make experiments EXPERIMENT=pipeline_convergence DATA=FOLDER

Eight simulated devices: two stages, experts inside of tensor-parallel groups of two, two groups
of data parallelism (configs/meshes/pipeline_moe_stages.gin). First a learning rate is chosen
for both models: of RATES the one with which the backbone ends best on a seed of its own.
"""

import dataclasses
from typing import Any

from experiments.comparison import (
    GIN_FILE,
    Comparison,
    Contender,
    Trained,
    judge_of,
    run_comparison,
)
from experiments.measured import Cells
from experiments.study import Study, main, run_name
from switchx.cli.arguments import simulate_devices

MOE, BACKBONE = "8 experts", "dense backbone"
# Nats by which a loss may rise between evaluations.
STABLE = 0.05

RATES = (0.0003, 0.001, 0.003)
CHOSEN_ON_SEED = 100

COMPARISON = Comparison(
    contenders=(
        Contender(BACKBONE, ("ModelConfig.switch=None",)),
        # Groups of tokens that divide over the devices and the microbatches.
        Contender(MOE, ("SwitchConfig.group_size=128",)),
    ),
    steps=200,
    # Two stages of one dense and one sparse block each. The betas are the paper's, the clipping
    # that of Megatron-LM, which it builds on.
    bindings=(
        "ModelConfig.num_decoder_layers=4", "ModelConfig.d_model=128", "ModelConfig.d_ff=512",
        "ModelConfig.d_head=32", "BATCH_SIZE=32", "WARMUP_STEPS=40", "COSINE_STEPS=200",
        "AdamW.beta2=0.95", "StepConfig.clip_norm=1.0",
    ),
    gin_files=(
        GIN_FILE, "configs/models/gpt_tiny_moe.gin", "configs/optimizers/adamw.gin",
        "configs/meshes/pipeline_moe_stages.gin",
    ),
    times=False,
)  # fmt: skip


def verdict(trained: Trained) -> dict[str, Any]:
    """Reproduced: experts train stably (no step is skipped, no validation curve rises by more
    than STABLE between evaluations), and end ahead of the backbone by an interval that leaves
    out 0. Not reproduced: they are not stable where the backbone is, or end behind it by such
    an interval. Otherwise undecided."""
    gain = trained.gain(MOE, BACKBONE)
    rises = {name: largest_rise(trained, name) for name in (MOE, BACKBONE)}
    is_stable = {
        name: trained.skipped[name] == 0 and rise <= STABLE for name, rise in rises.items()
    }
    word = "undecided"
    if gain.high < 0 or (is_stable[BACKBONE] and not is_stable[MOE]):
        word = "not reproduced"
    elif is_stable[MOE] and gain.low > 0:
        word = "reproduced"
    return {
        "verdict": word,
        "because": "Between two evaluations the loss on validation text rises by at most "
        f"{rises[MOE]:.3f} nats with experts and {rises[BACKBONE]:.3f} in the backbone "
        f"({STABLE} would be stable). Experts end {gain.mean:+.3f} nats over it.",
        "effect": gain,
        "effect_of": f"{MOE} over their dense backbone, nats per token",
    }


def largest_rise(trained: Trained, name: str) -> float:
    """Of the loss between two evaluations, over all seeds; 0 where it never rises."""
    curves = [[curve[step] for step in sorted(curve)] for curve in trained.curves[name]]
    rises = [a - b for values in curves for a, b in zip(values, values[1:], strict=False)]
    return max(0.0, *rises)


def judge(results: dict[str, Any]) -> dict[str, Any]:
    judged = judge_of(verdict)(results)
    title = f"The backbone's end by learning rate, seed {CHOSEN_ON_SEED}:"
    judged["tables"].append({"title": title, "rows": results["rates"]})
    return judged


def rate_row(study: Study, cells: Cells, rate: float) -> dict[str, float]:
    """What quality the backbone ends with."""
    backbone, bound = COMPARISON.contenders[0], f"LEARNING_RATE={rate}"
    bindings = [*COMPARISON.bindings_of(backbone, CHOSEN_ON_SEED), bound]
    name = run_name(f"rate {rate}", CHOSEN_ON_SEED)
    curve = study.train(cells, name, COMPARISON.gin_files, bindings)["curve"]
    return {"learning rate": rate, "negative log perplexity": curve[max(curve, key=int)]}


def run(study: Study) -> None:
    simulate_devices(8)
    study.files(*COMPARISON.data)
    cells = study.cells()
    rates = RATES[:1] if study.is_quick else RATES
    rows = [rate_row(study, cells, rate) for rate in rates]
    chosen = max(rows, key=lambda row: row["negative log perplexity"])["learning rate"]
    bindings = (*COMPARISON.bindings, f"LEARNING_RATE={chosen}")
    comparison = dataclasses.replace(COMPARISON, bindings=bindings)
    run_comparison(study, comparison, judge, rates=rows)


if __name__ == "__main__":
    main(__file__, __doc__, run)
