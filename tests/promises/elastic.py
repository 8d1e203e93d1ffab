# SPDX-License-Identifier: Apache-2.0
"""Lost devices and copies of experts change no number, and divide the load evenly.

Shen et al. 2022 (SE-MoE, arXiv:2205.10034), section 4.1. A run that loses devices is compared
with one that keeps those it began with: each part is a new start from the checkpoint before it,
on the devices that are left and the mesh that the planner chooses for them. Layers with
copies are compared with the one-hot einsum on one device, and the load of devices is computed
for experts whose loads follow Zipf's law. The devices are simulated on CPU.
Dims: N layers, E experts, R slots for experts
"""

import contextlib
import dataclasses
import itertools
import json
import pathlib
import tempfile
from collections.abc import Iterator

import jax
import numpy as np

from switchx.bench import equivalence
from switchx.bench.small_job import small_job
from switchx.checkpoint.items import read_data_states
from switchx.checkpoint.run_folder import RunFolder
from switchx.compiled.elastic import ElasticJob, job_for_devices
from switchx.data.loader import TrainLoader, merge_states
from switchx.data.mixtures import Mixture, as_mixture
from switchx.hardware.spec import load_hardware
from switchx.models.config import ModelConfig, RouterConfig, SwitchConfig
from switchx.moe.copy_placement import imbalance, loads_of_devices, place_copies
from switchx.moe.dispatcher_traits import DISPATCHERS
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.placement import Placement
from switchx.progress import SilentReporter
from switchx.training.job import TrainingJob
from switchx.training.loop import train
from switchx.training.programs import compiled_program
from tests.promises.compiled_steps import NUM_DEVICES

# Devices that are left, and the step to which they train.
PARTS = ((NUM_DEVICES, 3), (6, 6), (2, 9))
ROWS, LENGTH = 24, 16
HARDWARE = "v5e"
# For the check of the balance of copies.
ZIPF_EXPERTS, ZIPF_COPIES = 64, 8
# Rows of SE-MoE's four tasks (UFO, Table 3).
UFO_ROWS = (512, 256, 128, 128)


def lost_devices() -> Iterator[tuple]:
    """Losses and token ids of a run that loses devices against those of one that does not."""
    job = make_job()
    with tempfile.TemporaryDirectory() as folder:
        whole = RunFolder(pathlib.Path(folder) / "whole")
        elastic = RunFolder(pathlib.Path(folder) / "elastic")
        _train_on(NUM_DEVICES, PARTS[-1][1], job, whole)
        for count, step in PARTS:
            here = _train_on(count, step, job, elastic)
            what = f"{count} devices to step {step}, {here.plan.layout.name}"
            yield "idle_devices", what, here.num_idle
        difference = np.max(np.abs(_losses(elastic) / _losses(whole) - 1))
        yield "loss_after_losing_devices", f"{PARTS[-1][1]} steps", difference
        differing = token_ids_differing(job, elastic)
        yield "token_ids_differing", f"{PARTS[-1][1]} steps", differing


def copied_experts() -> Iterator[tuple]:
    """A layer with copies on a mesh, for every dispatcher, against one without on one device.

    The error is that of all raw gradients together: the norm of their difference over theirs.
    """
    load_E = 1 / np.arange(1, equivalence.NUM_EXPERTS + 1)
    table_R = place_copies([load_E], NUM_DEVICES, NUM_DEVICES)[0]
    want = equivalence.run_on_one_device("top 1")["gradient"]
    cells, _ = equivalence.all_cells()
    for dispatcher in DISPATCHERS:
        # The mesh that splits experts over the most devices, and something else if it can.
        cell = max(
            (each for each in cells if (each.router, each.dispatcher) == ("top 1", dispatcher)),
            key=lambda cell: (_split(cell), cell.mesh_name),
        )
        got = equivalence.run_cell(cell, table_R)["gradient"]
        error = _norm(jax.tree.map(np.subtract, got, want)) / _norm(want)
        yield "replica_gradient_error", f"{dispatcher} on {cell.mesh_name}", error


def _split(cell: equivalence.Cell) -> int:
    place = Placement.on(cell.mesh.build(), cell.mesh.rules)
    return min(place.size(place.experts), NUM_DEVICES // 2)


def _norm(arrays) -> float:
    squares = (np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(arrays))
    return float(np.sqrt(sum(squares)))


def balanced_experts() -> Iterator[tuple]:
    """The largest load of eight devices over their mean, by placement of experts."""
    load_NE = 1 / np.arange(1, ZIPF_EXPERTS + 1)[None]
    tables = {
        "imbalance_in_order": np.arange(ZIPF_EXPERTS)[None],
        "imbalance_packed": place_copies(load_NE, 0, NUM_DEVICES),
        "imbalance_zipf1": place_copies(load_NE, ZIPF_COPIES, NUM_DEVICES),
    }
    for name, table in tables.items():
        found = imbalance(loads_of_devices(load_NE, table, NUM_DEVICES))[0]
        yield name, f"{ZIPF_EXPERTS} experts, {table.size - ZIPF_EXPERTS} copies", found


def rows_of_tasks() -> Iterator[tuple]:
    """The most rows on a device when SE-MoE's four tasks (Table 3) are trained."""
    for devices in (4, 8):
        program = compiled_program(_tasks_job(devices), jax.devices()[:devices])
        shape = (sum(UFO_ROWS),)
        index = program.batch_sharding.devices_indices_map(shape).values()
        most = max(len(range(*each[0].indices(*shape))) for each in index)
        yield f"ufo_rows_per_device_{devices}", "/".join(map(str, UFO_ROWS)), most


def _tasks_job(devices: int) -> TrainingJob:
    """Two experts per task, and rows of four tasks."""
    job = make_job()
    task = as_mixture(job.source).tasks[0]
    tasks = tuple(dataclasses.replace(task, name=f"task_{t}") for t in range(len(UFO_ROWS)))
    router = RouterConfig("task", num_tasks=len(UFO_ROWS))
    switch = dataclasses.replace(job.model.switch, router=router)
    return dataclasses.replace(
        job,
        model=dataclasses.replace(job.model, switch=switch),
        source=Mixture(tasks, rows=UFO_ROWS),
        mesh=MeshSpec(data=1, expert=devices),
        batch_size=sum(UFO_ROWS),
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
    train(part, folder, SilentReporter(0), devices=here.devices)
    return here


def _losses(folder: RunFolder) -> np.ndarray:
    lines = map(json.loads, folder.metrics.read_text().splitlines())
    return np.array([line["loss"] for line in lines if "loss" in line])


def token_ids_differing(job: TrainingJob, folder: RunFolder) -> int:
    """How many token ids of batches resumed from checkpoints differ from unbroken ones."""
    differing, begun = 0, loader(job)
    with contextlib.closing(begun):
        for first, last in itertools.pairwise([0, *(step for _, step in PARTS)]):
            with contextlib.closing(loader(job)) as resumed:
                if first:
                    states = read_data_states(folder.checkpoints / str(first))
                    resumed.restore(merge_states(states))
                for _ in range(last - first):
                    got, want = next(resumed), next(begun)
                    differing += sum(int(np.sum(got[name] != want[name])) for name in want)
    return differing


def loader(job: TrainingJob) -> TrainLoader:
    return TrainLoader(job.source, job.batches, seed=job.seed, data_dir=job.data_dir)
