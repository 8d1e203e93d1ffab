# SPDX-License-Identifier: Apache-2.0
"""`switchx check elastic`: a run that loses devices against one that keeps those it began with.

Shen et al. 2022 (SE-MoE, arXiv:2205.10034), section 4.1. Each part of the run is a new start
from the checkpoint before it, on the devices that are left and the mesh that the planner
chooses for them; the devices are simulated on CPU.
"""

import contextlib
import dataclasses
import itertools
import json
import pathlib
import tempfile
from collections.abc import Callable

import jax
import numpy as np

from switchx.bench.planned_bytes import NUM_DEVICES, small_job
from switchx.bench.report import Check, Report
from switchx.checkpoint.items import read_data_states
from switchx.checkpoint.run_folder import RunFolder
from switchx.data.loader import TrainLoader, merge_states
from switchx.models.config import ModelConfig, RouterConfig, SwitchConfig
from switchx.partitioning.mesh import MeshSpec
from switchx.planner.hardware import load_hardware
from switchx.training.elastic import ElasticJob, job_for_devices
from switchx.training.job import TrainingJob
from switchx.training.loop import Reporter, train


class _Silent(Reporter):
    """Says nothing."""


# Devices that are left, and the step to which they train.
PARTS = ((NUM_DEVICES, 3), (6, 6), (2, 9))
ROWS, LENGTH = 24, 16
HARDWARE = "v5e"


def run(note: Callable[[str], None] = lambda text: None) -> Report:
    """Trains both runs and compares them."""
    job = make_job()
    with tempfile.TemporaryDirectory() as folder:
        whole = RunFolder(pathlib.Path(folder) / "whole")
        elastic = RunFolder(pathlib.Path(folder) / "elastic")
        note(f"training on {NUM_DEVICES} devices")
        _train_on(NUM_DEVICES, PARTS[-1][1], job, whole)
        rows = []
        for count, step in PARTS:
            note(f"training on {count} devices to step {step}")
            here = _train_on(count, step, job, elastic)
            rows.append(
                {
                    "devices": count,
                    "to_step": step,
                    "mesh": here.plan.layout.name,
                    "idle": here.num_idle,
                }
            )
        losses, expected = _losses(elastic), _losses(whole)
        difference = np.max(np.abs(losses / expected - 1))
        differing = _token_ids_differing(job, elastic)
    for row, part in zip(rows, np.split(losses, [step for _, step in PARTS[:-1]]), strict=True):
        row["last_loss"] = float(part[-1])
    return Report(
        "check elastic",
        rows,
        [
            Check("loss_after_losing_devices", float(difference), "<=1e-6"),
            Check("token_ids_differing", differing, "==0"),
        ],
    )


def make_job() -> TrainingJob:
    """Experts in every other block, nothing random but dropout and the router's jitter."""
    switch = SwitchConfig(
        8,
        every=2,
        group_size=LENGTH,
        min_capacity=1,
        expert_dropout_rate=0.0,  # explicit dispatchers draw theirs on every device
        router=RouterConfig(jitter=0.01),
    )
    model = ModelConfig(
        "decoder_only", 384, 16, 32, 4, 4, num_decoder_layers=4, switch=switch,
        dropout_rate=0.1, scan_layers=True, remat="full",
    )  # fmt: skip
    steps = dict.fromkeys(("eval_every", "checkpoint_every", "train_steps"), PARTS[-1][1])
    return small_job(model, MeshSpec(), ROWS, LENGTH, eval_batches=1, **steps)


def _train_on(count: int, step: int, job: TrainingJob, folder: RunFolder) -> ElasticJob:
    here = job_for_devices(job, load_hardware(HARDWARE), jax.devices()[:count])
    part = dataclasses.replace(here.job, train_steps=step)
    train(part, folder, _Silent(), devices=here.devices)
    return here


def _losses(folder: RunFolder) -> np.ndarray:
    lines = map(json.loads, folder.metrics.read_text().splitlines())
    return np.array([line["loss"] for line in lines if "loss" in line])


def _token_ids_differing(job: TrainingJob, folder: RunFolder) -> int:
    """Token ids of the batches from each checkpoint on that are not those of one that began."""
    differing, begun = 0, _loader(job)
    with contextlib.closing(begun):
        for first, last in itertools.pairwise([0, *(step for _, step in PARTS)]):
            with contextlib.closing(_loader(job)) as resumed:
                if first:
                    states = read_data_states(folder.checkpoints / str(first))
                    resumed.restore(merge_states(states))
                for _ in range(last - first):
                    got, want = next(resumed), next(begun)
                    differing += sum(int(np.sum(got[name] != want[name])) for name in want)
    return differing


def _loader(job: TrainingJob) -> TrainLoader:
    return TrainLoader(job.source, job.batches, seed=job.seed, data_dir=job.data_dir)
