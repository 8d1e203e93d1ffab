# SPDX-License-Identifier: Apache-2.0
"""Run folders of random models, for what reads one, and what a run has saved."""

import dataclasses
import json
import pathlib

import jax.numpy as jnp

from switchx.checkpoint.checkpointer import Checkpointer, Retention
from switchx.checkpoint.run_folder import RunFolder
from switchx.models.config import ModelConfig, SwitchConfig
from switchx.training.resume import write_run_config
from switchx.training.step import init_state
from tests.training.jobs import make_job, make_params

MODEL = ModelConfig("encoder_decoder", 384, 8, 8, 1, 8, 2, 2, switch=SwitchConfig(2, every=1))


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


def steps_in(path) -> list[int]:
    """Steps of the lines of a log."""
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def saved_steps(run) -> set[int]:
    return {int(path.name) for path in run.checkpoints.iterdir() if path.name.isdecimal()}


def kept(folder) -> list[int]:
    """Steps of the checkpoints in a folder, sorted."""
    return sorted(int(p.name) for p in (folder / "checkpoints").iterdir() if p.name.isdecimal())


def losses_of(run: RunFolder) -> list[float]:
    return [json.loads(line)["loss"] for line in run.metrics.read_text().splitlines()]
