# SPDX-License-Identifier: Apache-2.0
"""512, 256, 128 and 128 rows of four tasks on 4 and 8 devices (SE-MoE, Figure 6 and Table 3).

    make experiments EXPERIMENT=elastic_tasks

The devices are simulated: what a device has to do is counted, and not timed.
"""

import contextlib
import dataclasses
from typing import Any

import jax
import numpy as np

from experiments.measured import Ratio, interval_of
from experiments.study import Study, main
from switchx.bench.small_job import TASK, small_job
from switchx.cli.arguments import simulate_devices
from switchx.compiled.collectives import executed_collectives, total_bytes
from switchx.compiled.flops import matrix_flops
from switchx.data.loader import TrainLoader
from switchx.data.mixtures import Mixture
from switchx.models.config import ModelConfig, RouterConfig, SwitchConfig
from switchx.partitioning.mesh import MeshSpec
from switchx.training.job import TrainingJob
from switchx.training.programs import compiled_program

ROWS = (512, 256, 128, 128)
EXPERTS_A_TASK, LENGTH, STEPS = 2, 16, 3
ALONE, REFERENCE = "a device a task, the busiest", "one device, all tasks"
DEVICES = {ALONE: 1, REFERENCE: 1, "elastic, 4 devices": 4, "elastic, 8 devices": 8}


def job_of(rows: tuple[int, ...], devices: int) -> TrainingJob:
    """Tasks of so many rows, and nothing random in training."""
    tasks = tuple(dataclasses.replace(TASK, name=f"task_{t}") for t in range(len(rows)))
    is_one = len(rows) == 1
    router = RouterConfig(
        "top_k" if is_one else "task", num_tasks=len(rows), exploration="none"
    )
    switch = SwitchConfig(
        EXPERTS_A_TASK * len(rows), every=1, group_size=LENGTH, expert_dropout_rate=0.0,
        router=router,
    )  # fmt: skip
    model = ModelConfig(
        "decoder_only", 384, 32, 128, 4, 8, num_decoder_layers=2, switch=switch,
        dropout_rate=0.0,
    )  # fmt: skip
    mesh = MeshSpec(data=1, expert=devices)
    source = tasks[0] if is_one else Mixture(tasks, rows=rows)
    return small_job(model, mesh, sum(rows), LENGTH, source=source, train_steps=STEPS)


def measured(rows: tuple[int, ...], devices: int) -> dict[str, Any]:
    """What a device of the compiled step has to do, and the losses of some steps."""
    job = job_of(rows, devices)
    program = compiled_program(job, jax.devices()[:devices])
    shape = (sum(rows),)
    index = program.batch_sharding.devices_indices_map(shape).values()
    losses = []
    compiled = None
    state = program.init_state()
    loader = TrainLoader(job.source, job.batches, seed=job.seed, data_dir=job.data_dir)
    with contextlib.closing(loader), program.scope():
        for _ in range(STEPS):
            batch = program.place(next(loader))
            if compiled is None:
                lowered = program.train_step.lower(state, batch, *program.beside)
                compiled = lowered.compile()
            state, metrics = compiled(state, batch, *program.beside)
            losses.append(float(metrics.loss))
    text, memory = compiled.as_text(), compiled.memory_analysis()
    return {
        "rows": max(len(range(*each[0].indices(*shape))) for each in index),
        "flops": matrix_flops(text),
        "memory_bytes": memory.argument_size_in_bytes + memory.temp_size_in_bytes,
        "collective_bytes": total_bytes(executed_collectives(text)),
        "losses": losses,
    }


def verdict(found: dict[str, dict]) -> dict[str, Any]:
    """Reproduced: on 4 devices the busiest has half the rows of a device a task's busiest, and
    losses equal those of one device to 0.00001. FLOPs and memory are reported."""
    alone, four, eight = (found[name] for name in (ALONE, *list(DEVICES)[2:]))
    want = np.array(found[REFERENCE]["losses"])
    differing = max(
        float(np.max(np.abs(np.array(each["losses"]) / want - 1))) for each in (four, eight)
    )
    flops, memory = (four[key] / alone[key] for key in ("flops", "memory_bytes"))
    is_even = 2 * four["rows"] == alone["rows"]
    return {
        "verdict": "reproduced" if is_even and differing <= 1e-5 else "not reproduced",
        "because": f"On 4 devices the busiest has {four['rows']} rows instead of "
        f"{alone['rows']}, {flops:.2f} of the FLOPs and {memory:.2f} of the memory; on 8, "
        f"{eight['rows']} rows and {eight['flops'] / alone['flops']:.2f} of the FLOPs. Losses "
        f"differ by {differing:.1e} from those of one device.",
        "effect": interval_of([flops], Ratio),
        "effect_of": "FLOPs of the busiest of 4 devices, a device a task's over",
    }


def judge(results: dict[str, Any]) -> dict[str, Any]:
    found = results["layouts"]
    rows = [
        {
            "layout": name,
            "rows a device": each["rows"],
            "MFLOPs a device": each["flops"] / 1e6,
            "MiB a device": each["memory_bytes"] / 2**20,
            "MiB of collectives a device": each["collective_bytes"] / 2**20,
            f"loss at step {STEPS}": each["losses"][-1],
        }
        for name, each in found.items()
    ]
    return verdict(found) | {
        "tables": [{"title": "", "rows": rows}],
        "intervals": over_alone(rows),
        "intervals_of": "of the busiest device, over a device a task",
    }


def run(study: Study) -> None:
    simulate_devices(max(DEVICES.values()))
    cells = study.cells()
    rows_of_tasks = tuple(n // 16 for n in ROWS) if study.is_quick else ROWS
    found = {}
    for name, devices in DEVICES.items():
        rows = rows_of_tasks[:1] if name == ALONE else rows_of_tasks
        cell = {"layout": name, "rows": list(rows), "devices": devices}
        found[name] = cells.get(cell, lambda rows=rows, n=devices: measured(rows, n))
    study.publish(cells, {}, judge, seeds=[0], layouts=found)


def over_alone(table: list[dict[str, Any]]) -> dict[str, Ratio]:
    """Rows, FLOPs and memory of a device over those of a device a task, for the picture."""
    alone, _, *elastic = table
    return {
        f"{name} on {row['layout'].removeprefix('elastic, ')}": interval_of(
            [row[key] / alone[key]], Ratio
        )
        for row in elastic
        for name, key in (
            ("rows", "rows a device"),
            ("FLOPs", "MFLOPs a device"),
            ("memory", "MiB a device"),
        )
    }


if __name__ == "__main__":
    main(__file__, __doc__, run)
