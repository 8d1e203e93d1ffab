# SPDX-License-Identifier: Apache-2.0
"""A GPT, dense and with experts, trained by Pipeline MoE's two stages (4.2, Figure 5).

    make experiments EXPERIMENT=pipeline_convergence DATA=FOLDER

Eight simulated devices: two stages, experts inside of tensor-parallel groups of two, two groups
of data parallelism (configs/meshes/pipeline_moe_stages.gin).
"""

from typing import Any

from experiments.comparison import GIN_FILE, Comparison, Contender, Trained, run_comparison
from experiments.study import Study, main
from switchx.cli.arguments import simulate_devices

MOE = "8 experts"

COMPARISON = Comparison(
    contenders=(
        Contender("dense backbone", ("ModelConfig.switch=None",)),
        # Groups of tokens that divide over the devices and the microbatches.
        Contender(MOE, ("SwitchConfig.group_size=128",)),
    ),
    steps=200,
    # Two stages of one dense and one sparse block each.
    bindings=(
        "ModelConfig.num_decoder_layers=4", "BATCH_SIZE=32", "LEARNING_RATE=0.001",
        "WARMUP_STEPS=40", "COSINE_STEPS=200",
    ),
    gin_files=(
        GIN_FILE, "configs/models/gpt_tiny_moe.gin", "configs/optimizers/adamw.gin",
        "configs/meshes/pipeline_moe_stages.gin",
    ),
    times=False,
)  # fmt: skip


def verdict(trained: Trained) -> dict[str, Any]:
    """Reproduced: no step is skipped, no validation curve of experts rises by more than 0.05
    nats between evaluations, and they end below the backbone's loss by an interval that leaves
    out 0."""
    gain = trained.gain(MOE, "dense backbone")
    rises = max(
        before - after
        for curve in trained.curves[MOE]
        for before, after in zip(_values(curve), _values(curve)[1:], strict=False)
    )
    is_stable = trained.skipped[MOE] == 0 and rises <= 0.05
    word = "reproduced" if is_stable and gain.low > 0 else "not reproduced"
    if is_stable and not gain.excludes(0):
        word = "undecided"
    return {
        "verdict": word,
        "because": f"Training is {'stable' if is_stable else 'not stable'}: the loss on "
        f"validation text rises by {max(rises, 0):.3f} nats at most between evaluations. "
        f"Experts end {gain.mean:+.3f} nats from their backbone.",
        "effect": gain,
        "effect_of": f"{MOE} over their dense backbone, nats a token",
    }


def _values(curve: dict[int, float]) -> list[float]:
    return [curve[step] for step in sorted(curve)]


def run(study: Study) -> None:
    simulate_devices(8)
    run_comparison(study, COMPARISON, verdict)


if __name__ == "__main__":
    main(__file__, __doc__, run)
