# SPDX-License-Identifier: Apache-2.0
"""Writers of metrics beside the run folder: a function, Weights & Biases, and its absence."""

import json
import sys
from unittest import mock

import jax
import pytest

from switchx.checkpoint.run_folder import RunFolder
from switchx.training.loop import train
from switchx.training.telemetry.metric_writers import WeightsAndBiases
from switchx.training.telemetry.metrics import flat_scalars
from tests.data.refusals import refused
from tests.training.jobs import DENSE, Events, make_job, tiny_job

pytestmark = pytest.mark.usefixtures("steps_traced_once")

WRITTEN: list[tuple[int, dict]] = []


def keep(step, metrics):
    """A writer of a user's module."""
    WRITTEN.append((step, metrics))


def test_writers_get_what_the_run_folder_has(tmp_path, monkeypatch):
    WRITTEN.clear()
    monkeypatch.setitem(sys.modules, "wandb", wandb := mock.Mock(id="abc123"))
    wandb.init.return_value = wandb
    run = RunFolder(tmp_path / "run")
    writers = (keep, WeightsAndBiases("mine", name="first", mode="offline"))
    for steps in (1, 2):
        job = tiny_job(train_steps=steps, eval_every=1, metric_writers=writers)
        train(job, run, Events(), devices=jax.devices()[:1])
    expected = {}
    for kind, path in (("train", run.metrics), ("validation", run.validation)):
        for line in map(json.loads, path.read_text().splitlines()):
            step = line.pop("step")
            expected[kind, step] = flat_scalars(line, f"{kind}/")
    got = {(next(iter(each)).split("/")[0], step): each for step, each in WRITTEN}
    assert got.keys() == expected.keys() == {
        ("train", 1), ("train", 2), ("validation", 0), ("validation", 1), ("validation", 2)
    }  # fmt: skip
    for key, metrics in expected.items():
        assert got[key] == pytest.approx(metrics), key
    logged = [(call.kwargs["step"], *call.args) for call in wandb.log.call_args_list]
    assert logged == WRITTEN and wandb.finish.call_count == 2
    first, second = (call.kwargs for call in wandb.init.call_args_list)
    assert (first["project"], first["name"], first["mode"]) == ("mine", "first", "offline")
    assert first["id"] is None and second["id"] == "abc123"  # it goes on
    assert first["config"]["batch_size"] == 8


def test_what_cannot_write_is_refused_before_the_folder_is_made(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    job = make_job(DENSE, metric_writers=(WeightsAndBiases("mine"),))
    with refused("wandb cannot be imported ") as caught:
        train(job, RunFolder(tmp_path / "run"), Events())
    assert "pip install 'switchx[wandb]'" in str(caught.value)
    assert not (tmp_path / "run").exists()
    with refused("TrainingJob.metric_writers: 'wandb' cannot be called"):
        make_job(DENSE, metric_writers=("wandb",))
    with refused("WeightsAndBiases.mode='on' is unknown"):
        WeightsAndBiases("mine", mode="on")
    job = make_job(DENSE, metric_writers=(lambda step, metrics: None,))
    with refused("job.metric_writers.0=<any> cannot be written into a run folder"):
        train(job, RunFolder(tmp_path / "other"), Events())
