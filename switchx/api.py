# SPDX-License-Identifier: Apache-2.0
"""`switchx.load`: a trained model in a notebook."""

import dataclasses
import os
from typing import Literal

from switchx.data.saved_vocabulary import load_vocabulary
from switchx.data.tokenizers import Vocabulary
from switchx.models.config import ModelConfig
from switchx.models.params import abstract_params
from switchx.training.restore import choose_step, restore_params
from switchx.training.run_config import read_model_config
from switchx.training.run_folder import RunFolder
from switchx.tree import num_elements


@dataclasses.dataclass(frozen=True)
class Model:
    """A trained model.

    Attributes:
        config: what it is.
        params: its parameters, a nested dictionary of arrays named by their dimensions.
        vocabulary: what its token ids mean.
        step: training step of the checkpoint it was read from.
    """

    config: ModelConfig
    params: dict = dataclasses.field(repr=False)
    vocabulary: Vocabulary = dataclasses.field(repr=False)
    step: int

    @property
    def num_params(self) -> int:
        return num_elements(self.params)


def load(model_dir: str | os.PathLike, step: int | Literal["best"] | None = None) -> Model:
    """The model in a run folder, on the default device.

    Args:
        step: of the checkpoint; None is the newest complete one, "best" the one with the
            best validation.

    Raises:
        ValueError: the folder is not a run's, has no complete checkpoint, or its parameters
            are not those of its configuration (all that differ are named).
    """
    run = RunFolder(model_dir)
    config = read_model_config(run)
    step = choose_step(run, step)
    params = restore_params(run.root, step, target=abstract_params(config))
    return Model(config, params, load_vocabulary(run.root), step)
