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
import sys
import tempfile
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from switchx.checkpoint.checkpointer import Checkpointer, Retention
from switchx.checkpoint.run_folder import RunFolder
from switchx.own_code import python_words
from switchx.tree import Tree, num_bytes
from tests.processes import free_port, run_together

NUM_DEVICES = 4
PROCESSES = (1, 2, 4)
# float32[1024, 1024] each: by experts, by both axes, and whole on every device, as parameters
# and Adafactor's factors are. Random numbers, which compression leaves as large as they are.
SPECS = {
    "by_expert": PartitionSpec("expert"),
    "by_both": PartitionSpec("expert", "data"),
    "by_data": PartitionSpec(None, "data"),
    "whole": PartitionSpec(),
}
SHAPE = (1024, 1024)
# A quarter of an array is 1 MiB; zstd takes a tenth of random float32.
CHUNK_BYTES = 1 << 19


def by_processes() -> Iterator[tuple]:
    """What the busiest process hashes, over an equal share, and what all read back."""
    for count in PROCESSES:
        with tempfile.TemporaryDirectory() as folder:
            yield from shares(_counts(count, pathlib.Path(folder)))


def shares(counts: list[dict[str, int]]) -> Iterator[tuple]:
    """The rows of what each process counted.

    Raises:
        RuntimeError: They hashed less than they saved, so something was not counted.
    """
    if sum(each["hashed_bytes"] for each in counts) < counts[0]["saved_bytes"]:
        raise RuntimeError(f"less was hashed than saved: {counts}")
    what = f"{len(counts)} processes"
    hashed = max(each["hashed_bytes"] for each in counts)
    share = counts[0]["saved_bytes"] / len(counts)
    yield "checkpoint_hashed_bytes_vs_share", what, hashed / share
    read = sum(each["read_bytes"] // CHUNK_BYTES * CHUNK_BYTES for each in counts)
    yield "checkpoint_bytes_read_back", what, read


def _counts(count: int, folder: pathlib.Path) -> list[dict[str, int]]:
    """What each of `count` processes prints on its last line."""
    flags = f"--xla_force_host_platform_device_count={NUM_DEVICES // count}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    words = [*python_words(), "-m", "tests.promises.saves", f"localhost:{free_port()}"]
    commands = [[*words, str(count), str(index), str(folder)] for index in range(count)]
    outcomes = run_together(commands, environment)
    if any(status for status, _ in outcomes):
        raise RuntimeError(f"a process that saves failed: {outcomes}")
    return [json.loads(output.splitlines()[-1]) for _, output in outcomes]


def save_and_count(coordinator: str, count: int, index: int, folder: str) -> dict[str, int]:
    """One process of several: saves twice, and counts in the second save."""
    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(coordinator, count, index)
    state = random_state()
    with Checkpointer(RunFolder(folder), Retention()) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()  # by now everything is imported and compiled
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
