# SPDX-License-Identifier: Apache-2.0
"""`switchx check elastic`: lost devices and replicas of experts change no number.

Shen et al. 2022 (SE-MoE, arXiv:2205.10034), section 4.1. A run that loses devices is compared
with one that keeps those it began with: each part is a new start from the checkpoint before it,
on the devices that are left and the mesh that the planner chooses for them. Layers with
replicas are compared with the one-hot einsum on one device, and the load of devices is computed
for experts whose loads follow Zipf's law. The devices are simulated on CPU.
Dims: N layers, E experts, R slots for experts
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

from switchx.bench import equivalence
from switchx.bench.report import Check, Report
from switchx.bench.step_cases import NUM_DEVICES, small_job
from switchx.checkpoint.items import read_data_states
from switchx.checkpoint.run_folder import RunFolder
from switchx.data.loader import TrainLoader, merge_states
from switchx.data.mixtures import Mixture, as_mixture
from switchx.models.config import ModelConfig, RouterConfig, SwitchConfig
from switchx.moe.config import DISPATCHERS
from switchx.moe.copy_placement import imbalance, loads_of_devices, place_copies
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.placement import Placement
from switchx.planner.hardware import load_hardware
from switchx.training.elastic import ElasticJob, job_for_devices
from switchx.training.job import TrainingJob
from switchx.training.loop import Reporter, train
from switchx.training.program import TrainingProgram


class _Silent(Reporter):
    """Says nothing."""


# Devices that are left, and the step to which they train.
PARTS = ((NUM_DEVICES, 3), (6, 6), (2, 9))
ROWS, LENGTH = 24, 16
HARDWARE = "v5e"
# Of the check of replicas' balance.
ZIPF_EXPERTS, ZIPF_REPLICAS = 64, 8
# Rows of SE-MoE's four tasks (UFO, Table 3).
UFO_ROWS = (512, 256, 128, 128)


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
    replicated, gradient_error = _check_replicas(note)
    balance, evened = _check_balance()
    tasks, most_rows = _check_tasks()
    return Report(
        "check elastic",
        rows + replicated + balance + tasks,
        [
            Check("replica_gradient_error", gradient_error, "<=1e-6"),
            Check("imbalance_zipf1", evened, "<=1.05"),
            Check("ufo_rows_per_device_4", most_rows[4], "==256"),
            Check("ufo_rows_per_device_8", most_rows[8], "==128"),
            Check("loss_after_losing_devices", float(difference), "<=1e-6"),
            Check("token_ids_differing", differing, "==0"),
        ],
    )


def _check_replicas(note: Callable[[str], None]) -> tuple[list[dict], float]:
    """One layer on a mesh for every dispatcher, with replicas, against one without on one.

    The error is that of all raw gradients together: the norm of their difference over theirs.
    """
    table_R = place_copies(
        [1 / np.arange(1, equivalence.EXPERTS + 1)], NUM_DEVICES, NUM_DEVICES
    )[0]
    want = equivalence.run_on_one_device("top 1")["gradient"]
    cells, _ = equivalence.all_cells()
    rows = []
    for dispatcher in DISPATCHERS:
        of_dispatcher = [
            cell for cell in cells if (cell.router, cell.dispatcher) == ("top 1", dispatcher)
        ]
        # The mesh that splits experts over the most devices, and something else if it can.
        cell = max(of_dispatcher, key=lambda cell: (_split(cell), cell.mesh_name))
        note(f"replicas with {dispatcher} on {cell.mesh_name}")
        got = equivalence.run_cell(cell, table_R)["gradient"]
        error = _norm(jax.tree.map(np.subtract, got, want)) / _norm(want)
        rows.append({"dispatcher": dispatcher, "mesh": cell.mesh_name, "gradient_error": error})
    return rows, max(row["gradient_error"] for row in rows)


def _split(cell: equivalence.Cell) -> int:
    place = Placement.on(cell.mesh.build(), cell.mesh.rules)
    return min(place.size(place.experts), NUM_DEVICES // 2)


def _norm(arrays) -> float:
    squares = (np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(arrays))
    return float(np.sqrt(sum(squares)))


def _check_balance() -> tuple[list[dict], float]:
    """The largest load of eight devices over their mean, in three placements of experts."""
    load_NE = 1 / np.arange(1, ZIPF_EXPERTS + 1)[None]
    tables = {
        "in order": np.arange(ZIPF_EXPERTS)[None],
        "packed": place_copies(load_NE, 0, NUM_DEVICES),
        f"{ZIPF_REPLICAS} replicas": place_copies(load_NE, ZIPF_REPLICAS, NUM_DEVICES),
    }
    rows = [
        {
            "experts": name,
            "imbalance": float(imbalance(loads_of_devices(load_NE, table, NUM_DEVICES))[0]),
        }
        for name, table in tables.items()
    ]
    return rows, rows[-1]["imbalance"]


def _check_tasks() -> tuple[list[dict], dict[int, int]]:
    """The most rows of a device that training of SE-MoE's four tasks has (Table 3)."""
    rows, most = [], {}
    for devices in (4, 8):
        program = TrainingProgram(_tasks_job(devices), jax.devices()[:devices])
        shape = (sum(UFO_ROWS),)
        index = program.batch_sharding.devices_indices_map(shape).values()
        held = [range(*each[0].indices(*shape)) for each in index]
        owner = np.repeat(range(len(UFO_ROWS)), UFO_ROWS)
        tasks = [sorted({int(t) for t in owner[part.start : part.stop]}) for part in held]
        most[devices] = max(map(len, held))
        used = [sum(t in each for each in tasks) for t in range(len(UFO_ROWS))]
        rows.append(
            {
                "tasks_rows": "/".join(map(str, UFO_ROWS)),
                "task_devices": "/".join(map(str, used)),
                "rows_per_device": most[devices],
                "a_device_a_task": max(UFO_ROWS),
            }
        )
    return rows, most


def _tasks_job(devices: int) -> TrainingJob:
    """Two experts a task, and rows of four tasks."""
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
