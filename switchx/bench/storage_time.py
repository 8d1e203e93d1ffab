# SPDX-License-Identifier: Apache-2.0
"""Steps a second with experts on a disk, against the resident program in the same run.

A step can be no faster than the longer of two: its computation, which is that of the resident
program with the same remat, and its bytes over the disk's bandwidth. That is measured with one
large file, written and flushed, and read again, of which the system may have pages in memory,
as it has of records that were written a moment ago.

`python -m switchx.bench.storage_time ROUNDS` is the process of `measured`.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import sys
import time
from typing import Any

import jax
import numpy as np

from pallas_kernels.bench.timing import Contender, speedup, take_turns
from switchx.bench.report import Check
from switchx.bench.step_cases import small_job
from switchx.bench.storage_runs import (
    make_batch,
    of_child,
    opened,
    opened_resident,
    record_bytes,
)
from switchx.models.config import ModelConfig, SwitchConfig
from switchx.partitioning.mesh import MeshSpec
from switchx.storage.cache import StorageSpec
from switchx.training.job import TrainingJob

ROWS, LENGTH = 16, 128
MODEL = ModelConfig(
    "decoder_only", 4096, 256, 1024, 4, 64, num_decoder_layers=8, activation="relu",
    scan_layers=True, remat="full",
    switch=SwitchConfig(8, every=2, capacity_factor=1.0, group_size=LENGTH),
)  # fmt: skip
CACHED = 0.25  # of the records, where the disk is used
FILE_BYTES = 2**28
MEBIBYTE = 2**20
# As `make train` has it (docs/command_line.md). Otherwise the step with all experts cached is
# a tenth slower: it maps twice the memory that the resident one does, and returns it.
MALLOC = (
    "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=100000000000"
    ":glibc.malloc.trim_threshold=100000000000:glibc.malloc.arena_max=1"
)


def measured(rounds: int) -> tuple[list[dict[str, Any]], list[Check]]:
    """What `run` gives, in a process of its own whose malloc is tuned as in `make train`."""
    found = of_child("switchx.bench.storage_time", rounds, GLIBC_TUNABLES=MALLOC)
    return found["rows"], [Check(**check) for check in found["checks"]]


def main(rounds: int) -> None:
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
        # A bound of host memory changes how malloc works, from here on.
        with opened(dataclasses.replace(job, storage=part)) as (small, _):
            beside = contender("resident, beside that on a disk", resident)
            on_disk = contender(f"on a disk, {records} experts cached", small)
            on_disk.step()
            small.experts.metrics()
            take_turns([beside, on_disk], rounds)
            moved = small.experts.metrics()
        disk = bandwidths(folder)
    steps = rounds + 1  # with the first one of `take_turns`
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
    """Training steps of a program that is within its scope."""
    held = [program.init_state()]
    batch = program.place(make_batch(program.job.model, 0, program.job.batch_size, LENGTH))

    def step() -> None:
        held[0], metrics = program.train_step(held[0], batch)
        jax.block_until_ready((held[0], metrics))

    return Contender(name, step)


def bandwidths(folder: pathlib.Path) -> dict[str, float]:
    """Bytes a second of a large file: `written` and flushed, and `read`."""
    path, data = folder / "bandwidth", np.random.default_rng(0).bytes(FILE_BYTES)
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


if __name__ == "__main__":
    main(int(sys.argv[1]))
