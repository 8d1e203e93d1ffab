# SPDX-License-Identifier: Apache-2.0
"""What `switchx bench storage` trains: jobs, batches, and programs with and without a disk.

Records are in the system's folder for temporary files: give TMPDIR another disk to measure
that one.
Dims: B rows, L tokens of a row
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from switchx.bench.step_cases import small_job
from switchx.checkpoint.run_folder import RunFolder
from switchx.data.features import DecoderOnlyFeatures, EncoderDecoderFeatures, Example
from switchx.models.config import ModelConfig, SwitchConfig
from switchx.optim.adamw import AdamW
from switchx.optim.schedules import Constant
from switchx.own_code import python_words
from switchx.partitioning.mesh import MeshSpec
from switchx.storage.cache import StorageSpec
from switchx.storage.snapshot import Snapshot
from switchx.training.job import TrainingJob
from switchx.training.layered import LayeredProgram
from switchx.training.program import TrainingProgram
from switchx.training.step import StepConfig

ROWS, LENGTH, LAYERS, EXPERTS = 8, 8, 10, 16
# A step has 64 tokens, so some of the 16 experts of a layer have none.
MODEL = ModelConfig(
    "decoder_only", 384, 16, 32, 2, 8, num_decoder_layers=LAYERS, activation="relu",
    dropout_rate=0.1, scan_layers=True, remat="full",
    switch=SwitchConfig(EXPERTS, every=1, min_capacity=1, group_size=LENGTH),
)  # fmt: skip
DISK = StorageSpec("disk")
ADAMW = AdamW(weight_decay=0.1, epsilon=1e-4)


def make_job(
    model: ModelConfig = MODEL,
    storage: StorageSpec = DISK,
    rows: int = ROWS,
    length: int = LENGTH,
    **changes,
) -> TrainingJob:
    """A job of one device, with AdamW."""
    fields = dict(
        optimizer=ADAMW,
        schedule=Constant(2e-3),
        step=StepConfig(num_microbatches=2, clip_norm=1.0),
    )
    return small_job(model, MeshSpec(data=1), rows, length, storage=storage, **fields | changes)


def make_batch(model: ModelConfig, seed: int, rows: int = ROWS, length: int = LENGTH):
    """Rows without padding whose tokens follow a rule, one in eight at random.

    Each token is 5 times the one before it plus 1, modulo 31: that is learned, and the loss
    falls to what the random ones leave.
    """
    rng, nothing = np.random.default_rng(seed), np.zeros(0, np.int32)
    token_BL = np.empty((rows, length), np.int32)
    token_BL[:, 0] = rng.integers(31, size=rows)
    for at in range(1, length):
        follows = (5 * token_BL[:, at - 1] + 1) % 31
        is_random = rng.random(rows) < 1 / 8
        token_BL[:, at] = np.where(is_random, rng.integers(31, size=rows), follows)
    token_BL += 3  # past the vocabulary's special ones
    if model.is_encoder_decoder:
        features = EncoderDecoderFeatures(length, length)
        return features.batch([[Example(token_L, token_L)] for token_L in token_BL])
    return DecoderOnlyFeatures(length).batch([[Example(nothing, t_L)] for t_L in token_BL])


@contextlib.contextmanager
def opened(job: TrainingJob) -> Iterator[tuple[LayeredProgram, pathlib.Path]]:
    """A job's program within its scope, and its run's folder, which is deleted afterwards."""
    with tempfile.TemporaryDirectory(prefix="switchx-bench-") as folder:
        program = LayeredProgram(job, RunFolder(folder), jax.devices()[:1])
        with program.scope():
            yield program, pathlib.Path(folder)


@contextlib.contextmanager
def opened_resident(job: TrainingJob) -> Iterator[TrainingProgram]:
    """The same job's program with all experts on the device."""
    job = dataclasses.replace(job, storage=StorageSpec())
    program = TrainingProgram(job, jax.devices()[:1])
    with program.scope():
        yield program


def trained(program, num_steps: int, after_step: Callable[[], None] = lambda: None):
    """The state after some steps, and the loss of each."""
    state, losses = program.init_state(), []
    for step in range(num_steps):
        batch = program.place(make_batch(program.job.model, step))
        state, metrics = program.train_step(state, batch)
        losses.append(float(metrics.loss))
        after_step()
    return state, np.array(losses, np.float32)


def records_of(program: LayeredProgram, folder: pathlib.Path) -> dict[str, np.ndarray]:
    """All arrays of all records by name, after all updates."""
    program.experts.save(folder)
    snapshot = Snapshot(folder)
    return {
        f"{snapshot.layout.name(key)} {name}": array
        for key in range(snapshot.layout.num_keys)
        for name, array in snapshot.read(key).arrays.items()
    }


def differing_bits(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> int:
    """In arrays of the same names, shapes and dtypes.

    Raises:
        ValueError: these differ.
    """
    if {n: (a.shape, a.dtype) for n, a in one.items()} != {
        n: (a.shape, a.dtype) for n, a in other.items()
    }:
        raise ValueError("arrays of other names, shapes or dtypes cannot be compared")
    pairs = (
        (np.frombuffer(array.tobytes(), np.uint8), np.frombuffer(other[n].tobytes(), np.uint8))
        for n, array in one.items()
    )
    return sum(int(np.unpackbits(a ^ b).sum()) for a, b in pairs)


@contextlib.contextmanager
def programs_compiled_once() -> Iterator[pathlib.Path]:
    """Keeps what is compiled in a folder, as every cell and child has the same programs."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    with tempfile.TemporaryDirectory(prefix="switchx-compiled-") as folder:
        for name, value in zip(names, (folder, 0), strict=True):
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        try:
            yield pathlib.Path(folder)
        finally:
            for name, value in zip(names, before, strict=True):
                jax.config.update(name, value)
            compilation_cache.reset_cache()


def record_bytes(job: TrainingJob) -> int:
    """Bytes of an expert's weights and of what the optimizer keeps for it."""
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
        raise RuntimeError(f"a process of bench storage failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def child_environment() -> dict[str, str]:
    """Of a process that runs the same switchx, and shares what is compiled."""
    root = str(pathlib.Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path}
    if (compiled := jax.config.jax_compilation_cache_dir) is not None:
        environment |= {
            "JAX_COMPILATION_CACHE_DIR": compiled,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
    return environment
