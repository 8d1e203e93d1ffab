# SPDX-License-Identifier: Apache-2.0
"""What one, two and four processes hash and read while they save the same state. No times.

Each process counts in a real save of a `Checkpointer`: bytes that it gives to CRC-32, and bytes
that the operating system says it has read from anywhere (`rchar` of /proc/self/io, so Linux
alone). Of those, the lists of the other processes and Orbax' index are a few kilobytes; the
smallest chunk of an array is more than half a megabyte. So bytes are counted as read back in
whole chunks: with none, no value has been read again.
"""

import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from switchx.bench.report import Check, Report
from switchx.checkpoint.checkpointer import Checkpointer, Retention
from switchx.checkpoint.run_folder import RunFolder
from switchx.own_code import python_words
from switchx.tree import Tree, num_bytes

NUM_DEVICES = 4
PROCESSES = (1, 2, 4)
# float32[1024, 1024] each: by experts, by both axes, and whole on every device, as parameters
# and Adafactor's factors are. Numbers at random, which compression leaves as large as they are.
SPECS = {
    "by_expert": PartitionSpec("expert"),
    "by_both": PartitionSpec("expert", "data"),
    "by_data": PartitionSpec(None, "data"),
    "whole": PartitionSpec(),
}
SHAPE = (1024, 1024)
# A quarter of an array is 1 MiB; zstd takes a tenth of random float32.
CHUNK_BYTES = 1 << 19


def run(note: Callable[[str], None] = lambda text: None) -> Report:
    """A row for each number of processes, and the checks.

    Raises:
        RuntimeError: a process failed; its last line.
    """
    rows = []
    for count in PROCESSES:
        note(f"saving with {count} process{'es' * (count > 1)}")
        with tempfile.TemporaryDirectory() as folder:
            counts = _counts(count, pathlib.Path(folder))
        rows.append(
            {
                "processes": count,
                "saved_bytes": counts[0]["saved_bytes"],
                "hashed_bytes": [each["hashed_bytes"] for each in counts],
                "read_bytes": [each["read_bytes"] for each in counts],
            }
        )
    busiest = max(
        max(row["hashed_bytes"]) * row["processes"] / row["saved_bytes"] for row in rows
    )
    read = sum(size // CHUNK_BYTES * CHUNK_BYTES for row in rows for size in row["read_bytes"])
    return Report(
        "bench scale",
        rows,
        [
            Check("checkpoint_hashed_bytes_vs_share", busiest, "<=1.1"),
            Check("checkpoint_bytes_read_back", read, "==0"),
        ],
    )


def _counts(count: int, folder: pathlib.Path) -> list[dict[str, int]]:
    """What each of so many processes says on its last line."""
    with socket.create_server(("localhost", 0)) as listener:
        port = listener.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={NUM_DEVICES // count}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    words = [*python_words(), "-m", "switchx.bench.saves", f"localhost:{port}", str(count)]
    processes = [
        subprocess.Popen(
            [*words, str(index), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]
    try:
        said = [process.communicate(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, said, strict=True):
        if process.returncode:
            raise RuntimeError(f"a process that saves failed: {errors.strip()[-1000:]}")
    return [json.loads(output.splitlines()[-1]) for output, _ in said]


def save_and_count(coordinator: str, count: int, index: int, folder: str) -> dict[str, int]:
    """One process of several: saves twice, and counts in the second save."""
    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(coordinator, count, index)
    state = random_state()
    with Checkpointer(RunFolder(folder), Retention()) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()  # what is imported and compiled is, then
        hashed, crc32 = [], zlib.crc32

        def counted(data: Any, *start: int) -> int:
            hashed.append(memoryview(data).nbytes)
            return crc32(data, *start)

        zlib.crc32 = counted
        before = _read_bytes()
        checkpointer.save(2, state)
        checkpointer.wait()
        after = _read_bytes()
        zlib.crc32 = crc32
    return {
        "saved_bytes": num_bytes(state),
        "hashed_bytes": sum(hashed),
        "read_bytes": after - before,
    }


def random_state() -> Tree:
    """The same in every process and on every call: parameters, and a step."""
    axes = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, NUM_DEVICES // 2), ("data", "expert"), axis_types=axes)
    rng = np.random.default_rng(0)
    arrays = {}
    for name, spec in SPECS.items():
        values = rng.standard_normal(SHAPE, np.float32)
        sharding = NamedSharding(mesh, spec)
        arrays[name] = jax.make_array_from_callback(SHAPE, sharding, lambda at, x=values: x[at])
    step = jax.make_array_from_callback(
        (), NamedSharding(mesh, PartitionSpec()), lambda at: np.zeros((), np.int32)
    )
    return {"params": arrays, "step": step}


def _read_bytes() -> int:
    lines = pathlib.Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


if __name__ == "__main__":
    address, *numbers, where = sys.argv[1:]
    print(json.dumps(save_and_count(address, *map(int, numbers), where)))
