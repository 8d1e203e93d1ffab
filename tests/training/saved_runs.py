# SPDX-License-Identifier: Apache-2.0
"""Run folders of random models, for what reads one, and what a run has saved."""

import dataclasses
import json
import pathlib

import jax.numpy as jnp
import numpy as np

from switchx import tree
from switchx.checkpoint.checkpointer import Checkpointer, Retention
from switchx.checkpoint.items import read_items
from switchx.checkpoint.run_folder import RunFolder
from switchx.data.objectives import SpanCorruption
from switchx.models.config import ModelConfig, SwitchConfig
from switchx.training.resume import write_run_config
from switchx.training.step import init_state
from tests.training.jobs import TASK, make_job, make_params

MODEL = ModelConfig("encoder_decoder", 384, 8, 8, 1, 8, 2, 2, switch=SwitchConfig(2, every=1))
# The source of a run that learnt span corruption.
SPANS = dataclasses.replace(TASK, objective=SpanCorruption())


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


def lines(path) -> list[dict]:
    """The lines of a log."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps_in(path) -> list[int]:
    return [line["step"] for line in lines(path)]


def saved_steps(run) -> set[int]:
    return {int(path.name) for path in run.checkpoints.iterdir() if path.name.isdecimal()}


def kept(folder) -> list[int]:
    """Steps of the checkpoints in a folder, sorted."""
    return sorted(int(p.name) for p in (folder / "checkpoints").iterdir() if p.name.isdecimal())


def losses_of(run: RunFolder) -> list[float]:
    return [line["loss"] for line in lines(run.metrics)]


def arrays_of(run: RunFolder, step: int) -> dict[str, np.ndarray]:
    """All arrays of a checkpoint by name, wherever the experts are."""
    items = {"params": None, "train_state": None}
    leaves = tree.named_leaves(read_items(run.checkpoints / str(step), items))
    return {name: np.asarray(leaf) for name, leaf in leaves.items()}
