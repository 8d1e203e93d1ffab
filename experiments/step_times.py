# SPDX-License-Identifier: Apache-2.0
"""Times of a training step: contenders take turns in one process, so that they do not depend
on what else the machine did, in TIMINGS processes, in each of which a program's memory lies
elsewhere."""

import concurrent.futures
import multiprocessing
from collections.abc import Callable, Sequence

from experiments.measured import Cells
from experiments.pages import ROOT
from experiments.side_by_side import pin_to_one_core
from experiments.study import Study
from pallas_kernels.bench.timing import Contender as Timed
from pallas_kernels.bench.timing import speedup, take_turns
from switchx.data.loader import evaluation_batches
from switchx.data.mixtures import as_mixture
from switchx.gin_config.building import job_from_gin
from switchx.malloc import keep_freed_memory
from switchx.training.job import TrainingJob
from switchx.training.programs import compiled_program

# Processes that time steps.
TIMINGS = 5


def step_times(
    study: Study,
    cells: Cells,
    gin_files: Sequence[str],
    bindings: dict[str, Sequence[str]],
) -> dict[str, list[float]]:
    """Times of a step relative to the first contender's, one each of TIMINGS processes, each on
    one core, as the ladder's cells are.

    Args:
        bindings: all bindings of each contender, its places not yet placed.
    """
    quick = study.quick_bindings
    placed = {name: study.placed((*each, *quick)) for name, each in bindings.items()}
    cell = {"step_times": list(bindings), "bindings": list(map(list, bindings.values()))}
    rounds = 2 if study.is_quick else 9
    timings = [
        cells.get(
            cell | {"cores": 1, "timing": timing},
            lambda: _in_a_process(_step_times, gin_files, placed, rounds),
        )
        for timing in range(1 if study.is_quick else TIMINGS)
    ]
    return {name: [each[name] for each in timings] for name in bindings}


def _in_a_process(function: Callable, *arguments):
    """What a function returns that a process of its own calls, on one core."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, spawn, pin_to_one_core) as executor:
        return executor.submit(function, *arguments).result()


def _step_times(
    gin_files: Sequence[str], bindings: dict[str, Sequence[str]], rounds: int
) -> dict[str, float]:
    """Seconds of a training step relative to the first job's, measured in turns."""
    keep_freed_memory()  # as runs do
    files = [ROOT / file for file in gin_files]
    timed = {name: _timed(name, job_from_gin(files, each)) for name, each in bindings.items()}
    take_turns(list(timed.values()), rounds, num_steps=5)
    first = next(iter(timed.values()))
    return {name: 1 / speedup(each, first) for name, each in timed.items()}


def _timed(name: str, job: TrainingJob) -> Timed:
    """A job's own step on one of its batches, compiled and ready."""
    program = compiled_program(job)
    (task,) = as_mixture(job.source).tasks
    batch = program.place(next(evaluation_batches(task, job.batches, num_batches=1)))

    def step(state):
        with program.scope():
            return program.train_step(state, batch)

    return Timed.stepping(name, step, program.init_state())
