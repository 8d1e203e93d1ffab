# SPDX-License-Identifier: Apache-2.0
"""Run folders of random models, for what reads one."""

import dataclasses
import pathlib

import jax.numpy as jnp

from switchx.checkpoint.checkpointer import Checkpointer, Retention
from switchx.checkpoint.run_folder import RunFolder
from switchx.models.config import ModelConfig
from switchx.training.resume import write_run_config
from switchx.training.step import init_state
from tests.training.jobs import make_job, make_params


def save_run(path, model: ModelConfig, **changes) -> pathlib.Path:
    """A run with checkpoints 5, the best, and 9, whose parameters are of these seeds.

    Args:
        changes: to the job.
    """
    folder, job = RunFolder(path).create(), make_job(model, **changes)
    write_run_config(folder, job)
    optimizer = job.optimizer.build(job.schedule)
    with Checkpointer(folder, Retention()) as checkpointer:
        for step, score in ((5, -1.0), (9, -2.0)):
            params = make_params(model, seed=step)
            state = init_state(model, optimizer, seed=0, params=params)
            state = dataclasses.replace(state, step=jnp.asarray(step, jnp.int32))
            checkpointer.save(step, state, metrics={"neg_log_perplexity": score})
    return folder.root
