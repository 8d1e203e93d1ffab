# SPDX-License-Identifier: Apache-2.0
"""A small training job, for programs that are compiled or timed and read no data."""

from switchx.data.corpora.python_stdlib import PythonStdlib
from switchx.data.objectives import CausalLM
from switchx.data.tasks import Task
from switchx.data.tokenizers import ByteVocabulary
from switchx.models.config import ModelConfig
from switchx.optim.adamw import AdamW
from switchx.optim.schedules import Constant
from switchx.partitioning.mesh import MeshSpec
from switchx.training.job import TrainingJob
from switchx.training.losses import LossConfig

TASK = Task("small", PythonStdlib(), ByteVocabulary(), CausalLM())


def small_job(
    model: ModelConfig, mesh: MeshSpec, rows: int, length: int, **changes
) -> TrainingJob:
    """A training job with rows of `length` tokens and AdamW; its data is never read.

    Args:
        changes: fields of `TrainingJob`.
    """
    half = length if model.is_encoder_decoder else length // 2
    fields = dict(
        source=TASK,
        optimizer=AdamW(),
        schedule=Constant(1e-3),
        loss=LossConfig(layer_reduction="mean"),
        train_steps=1,
        seed=0,
        log_every=1,
        eval_every=1,
        checkpoint_every=1,
    )
    return TrainingJob(
        model=model,
        mesh=mesh,
        batch_size=rows,
        inputs_length=half,
        targets_length=half,
        **fields | changes,
    )
