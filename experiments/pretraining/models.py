# SPDX-License-Identifier: Apache-2.0
"""The models that are pretrained: dense, 32, 8 and 64 experts."""

from experiments.contenders import ENGLISH, Comparison, Contender

COMPARISON = Comparison(
    contenders=(
        Contender("dense", ("ModelConfig.switch=None",)),
        *(Contender(f"{n} experts", (f"NUM_EXPERTS={n}",)) for n in (32, 8, 64)),
    ),
    steps=1000,
    seeds=(0,),
    # Figure 13 fine-tunes what was kept on the way.
    bindings=("checkpointer.Retention.keep_period=250", "TrainingJob.eval_batches=20"),
    data=ENGLISH,
)
