# SPDX-License-Identifier: Apache-2.0
"""What a comparison is of: models, as gin bindings, and the run that they have in common."""

import dataclasses

GIN_FILE = "configs/runs/pretrain_english.gin"
ENGLISH = ("openstax/*.txt.gz", "movie_reviews/*.txt.gz")


@dataclasses.dataclass(frozen=True)
class Contender:
    """A model, as gin bindings over the common run."""

    name: str
    bindings: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What is compared.

    Attributes:
        contenders: the first is the one that the others are compared with.
        gin_files: what contenders have in common, the later one wins.
        seeds: of initialization and order of the data; contenders of a seed share both.
        times: whether steps are timed; a precision's time on a CPU says nothing of a TPU's.
    """

    contenders: tuple[Contender, ...]
    steps: int = 300
    seeds: tuple[int, ...] = (0, 1, 2)
    bindings: tuple[str, ...] = ()
    gin_files: tuple[str, ...] = (GIN_FILE,)
    data: tuple[str, ...] = ENGLISH
    times: bool = True

    def quick(self) -> "Comparison":
        """Two contenders, a seed; `experiment.QUICK` says how many steps."""
        return dataclasses.replace(self, contenders=self.contenders[:2], seeds=self.seeds[:1])

    def bindings_of(self, contender: Contender, seed: int) -> list[str]:
        every = max(self.steps // 10, 1)
        return [
            f"TRAIN_STEPS={self.steps}",
            f"EVAL_EVERY={every}",
            f"LOG_EVERY={every}",
            f"CHECKPOINT_EVERY={max(self.steps // 4, 1)}",
            "checkpointer.Retention.keep_period=None",
            "TrainingJob.eval_batches=10",
            f"SEED={seed}",
            f"FILES=<data {' '.join(self.data)}>",
            *self.bindings,
            *contender.bindings,
        ]
