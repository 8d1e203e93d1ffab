# SPDX-License-Identifier: Apache-2.0
"""The part of `switchx bench train` with experts on a disk, against the resident program.

A step can be no faster than the longer of two times: its computation, which is that of the
resident program with the same remat, and its bytes over the disk's bandwidth. The bandwidth is
measured with one large file, written and flushed, and read again. The system may have pages of
it in memory, just as of records that were written a moment ago.

Records are in the system's folder for temporary files; TMPDIR can name another disk.
`python -m switchx.bench.storage ROUNDS` is the process of `measured`.
Dims: B rows, L tokens of a row
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from pallas_kernels.bench.timing import Contender, speedup, take_turns
from switchx.bench.small_job import small_job
from switchx.checkpoint.run_folder import RunFolder
from switchx.data.features import Example
from switchx.malloc import keep_freed_memory
from switchx.models.config import ModelConfig, SwitchConfig
from switchx.own_code import python_words
from switchx.partitioning.mesh import MeshSpec
from switchx.results import Check
from switchx.training.job import TrainingJob
from switchx.training.offload.disk_program import LayeredProgram
from switchx.training.offload.storage_spec import StorageSpec
from switchx.training.program import TrainingProgram

ROWS, LENGTH = 16, 128
MODEL = ModelConfig(
    "decoder_only",
    4096,
    256,
    1024,
    4,
    64,
    num_decoder_layers=8,
    activation="relu",
    scan_layers=True,
    remat="full",
    switch=SwitchConfig(8, every=2, capacity_factor=1.0, group_size=LENGTH),
)
CACHED = 0.25  # share of the records in memory, where the disk is used
FILE_BYTES = 2**28
MEBIBYTE = 2**20


def measured(rounds: int) -> tuple[list[dict[str, Any]], list[Check]]:
    """The results of `run` in a new process, since a memory bound reconfigures its malloc."""
    found = of_child("switchx.bench.storage", rounds)
    return found["rows"], [Check(**check) for check in found["checks"]]


def main(rounds: int) -> None:
    keep_freed_memory()
    rows, checks = run(rounds)
    print(json.dumps({"rows": rows, "checks": [dataclasses.asdict(each) for each in checks]}))


def make_job() -> TrainingJob:
    return small_job(MODEL, MeshSpec(data=1), ROWS, LENGTH, storage=StorageSpec("disk"))


def run(rounds: int) -> tuple[list[dict[str, Any]], list[Check]]:
    """Rows, and the checks `layered_vs_resident_tokens_per_s` and `step_vs_bound`."""
    job = make_job()
    switch, layers = job.model.switch, job.model.num_sparse_layers
    records = max(round(CACHED * layers * switch.num_experts), switch.num_experts)
    part = StorageSpec("disk", host_bytes=records * record_bytes(job))
    with opened(job) as (whole, folder), opened_resident(job) as resident:
        fast = contender("resident", resident)
        cached = contender("on a disk, all cached", whole)
        take_turns([fast, cached], rounds)
        # A bound on host memory changes how malloc works from here on.
        with opened(dataclasses.replace(job, storage=part)) as (small, _):
            beside = contender("resident, beside that on a disk", resident)
            on_disk = contender(f"on a disk, {records} experts cached", small)
            on_disk.step()
            small.experts.metrics()
            take_turns([beside, on_disk], rounds)
            moved = small.experts.metrics()
        disk = bandwidths(folder)
    steps = rounds + 1  # including the first one of `take_turns`
    pairs = (fast, fast), (cached, fast), (beside, beside), (on_disk, beside)
    rows = [_row(each, against, job) for each, against in pairs]
    disk_s = sum(moved[f"{way}_bytes"] / steps / disk[way] for way in ("read", "written"))
    rows.append(
        {
            "bound": on_disk.name,
            "compute_ms": 1e3 * beside.median_s,
            "disk_ms": 1e3 * disk_s,
            "step_vs_all_cached": on_disk.median_s / max(cached.median_s, disk_s),
            **{f"{way}_mib_per_step": moved[f"{way}_bytes"] / steps / MEBIBYTE for way in disk},
            **{f"{way}_mib_per_s": each / MEBIBYTE for way, each in disk.items()},
        }
    )
    ratio = on_disk.median_s / max(beside.median_s, disk_s)
    return rows, [
        Check("layered_vs_resident_tokens_per_s", speedup(cached, fast), ">=0.85"),
        Check("step_vs_bound", ratio, "<=1.3"),
    ]


def contender(name: str, program) -> Contender:
    """Training steps of a program whose scope has been entered."""
    token_BL = np.random.default_rng(0).integers(3, MODEL.vocab_size, (ROWS, LENGTH))
    rows = [[Example(token_L[:0], token_L)] for token_L in token_BL]
    batch = program.place(program.job.features.batch(rows))
    return Contender.stepping(
        name, lambda state: program.train_step(state, batch), program.init_state()
    )


def bandwidths(folder: pathlib.Path) -> dict[str, float]:
    """Bytes per second of a large file: `written` and flushed, and `read`."""
    path = folder / "bandwidth"
    data = np.random.default_rng(0).bytes(FILE_BYTES)
    found: dict[str, list[float]] = {"read": [], "written": []}
    for _ in range(3):
        with contextlib.closing(path.open("wb", buffering=0)) as file:
            begin = time.perf_counter()
            file.write(data)
            os.fsync(file.fileno())
            found["written"].append(time.perf_counter() - begin)
        begin = time.perf_counter()
        path.read_bytes()
        found["read"].append(time.perf_counter() - begin)
        path.unlink()
    return {way: FILE_BYTES / float(np.median(times)) for way, times in found.items()}


def _row(each: Contender, resident: Contender, job: TrainingJob) -> dict[str, Any]:
    return {
        "step": each.name,
        "step_ms": 1e3 * each.median_s,
        "min_ms": 1e3 * min(each.times_s),
        "max_ms": 1e3 * max(each.times_s),
        "tokens_per_s": job.batch_size * LENGTH / each.median_s,
        "vs_resident": speedup(each, resident),
    }


# Programs with and without a disk, and processes of their own, as promises have them, too.


@contextlib.contextmanager
def opened(job: TrainingJob) -> Iterator[tuple[LayeredProgram, pathlib.Path]]:
    """A job's program within its scope, and its run's folder, which is deleted afterwards."""
    with tempfile.TemporaryDirectory(prefix="switchx-bench-") as folder:
        program = LayeredProgram(job, RunFolder(folder), jax.devices()[:1])
        with program.scope():
            yield program, pathlib.Path(folder)


@contextlib.contextmanager
def opened_resident(job: TrainingJob) -> Iterator[TrainingProgram]:
    """Opens the job's program with all experts on the device."""
    job = dataclasses.replace(job, storage=StorageSpec())
    program = TrainingProgram(job, jax.devices()[:1])
    with program.scope():
        yield program


def record_bytes(job: TrainingJob) -> int:
    """Bytes of an expert's weights and of its optimizer state."""
    with tempfile.TemporaryDirectory() as folder:
        program = LayeredProgram(job, RunFolder(folder), jax.devices()[:1])
        return program.experts.layout.record_bytes


def of_child(module: str, argument: int, **environment: str) -> Any:
    """The JSON that a process `python -m MODULE ARGUMENT` prints as its last line."""
    done = subprocess.run(
        [*python_words(), "-m", module, str(argument)],
        env=child_environment() | environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"python -m {module} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def child_environment() -> dict[str, str]:
    """The environment of a process with the same switchx and the same compilation cache."""
    root = str(pathlib.Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path}
    if (compiled := jax.config.jax_compilation_cache_dir) is not None:
        environment |= {
            "JAX_COMPILATION_CACHE_DIR": compiled,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
    return environment


if __name__ == "__main__":
    main(int(sys.argv[1]))
