# SPDX-License-Identifier: Apache-2.0
"""Training steps compiled for devices that are simulated or only described."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence

import jax

from switchx.compiled.devices import describe_devices, json_of_child
from switchx.compiled.training_step import batch_shapes
from switchx.partitioning.topology import Topology
from switchx.training.job import TrainingJob
from switchx.training.program import TrainingProgram
from switchx.training.programs import compiled_program

NUM_DEVICES = 8
TOPOLOGY = Topology.parse("v5e:2x4")


def compile_step(
    job: TrainingJob, devices: Sequence
) -> tuple[TrainingProgram, jax.stages.Compiled]:
    """The program of a job on these devices, and its training step."""
    program = compiled_program(job, devices)
    with program.scope():
        step = program.train_step.lower(
            program.abstract_state, batch_shapes(program), *program.beside
        )
        # What is read off does not depend on LLVM's optimizations, which take long.
        is_cpu = devices[0].platform == "cpu"
        options = {"xla_backend_optimization_level": "0"} if is_cpu else {}
        return program, step.compile(compiler_options=options)


def on_tpu(module: str, *words: str) -> Iterator[tuple[str, str, float]]:
    """The rows that a module in this folder prints for a v5e."""
    return on_described(TOPOLOGY, module, *words)


def on_described(
    topology: Topology, module: str, *words: str
) -> Iterator[tuple[str, str, float]]:
    """The rows that a module in this folder prints in a process with a slice's compiler.

    There are none if that is not installed, as a line on standard error says.
    """
    try:
        rows = json_of_child(words, topology, module)
    except FileNotFoundError as error:
        print(f"{module} on {topology} left out: {error}", file=sys.stderr)
        return
    yield from map(tuple, rows)


def print_rows(
    rows: Callable[[Sequence], Iterator[tuple[str, str, float]]], topology: Topology = TOPOLOGY
) -> None:
    """Prints rows for described devices: the other side of `on_described`."""
    print(json.dumps(list(rows(describe_devices(topology)))))
