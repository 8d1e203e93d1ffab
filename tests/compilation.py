# SPDX-License-Identifier: Apache-2.0
"""Programs that tests compile again and again: once, small, for few devices."""

import contextlib
import pathlib
from collections.abc import Iterator

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from switchx.training.offload.disk_program import LayeredProgram
from switchx.training.offload.host_program import HostProgram
from switchx.training.pipelined_program import PipelinedProgram
from switchx.training.program import TrainingProgram

ALL_DEVICES = jax.devices

# The commands of pages train models that take seconds; a later flag wins over an earlier one.
# All of one size, so that they share programs.
GPT = tuple(
    f"--gin.{each}"
    for each in (
        "TRAIN_STEPS=2", "TrainingJob.eval_batches=1", "VOCAB_SIZE=500",
        "ModelConfig.d_model=32", "ModelConfig.d_ff=64", "ModelConfig.num_decoder_layers=1",
        "SwitchConfig.every=1",
    )
)  # fmt: skip
T5 = (*GPT, "--gin.ModelConfig.num_encoder_layers=1")
T5_OF_2 = (
    *GPT,
    "--gin.ModelConfig.num_encoder_layers=2",
    "--gin.ModelConfig.num_decoder_layers=2",
)
# What `make train` runs.
TINY_RUN = ("train", "--gin_file=configs/runs/pretrain_tiny.gin")


@contextlib.contextmanager
def compiled_once(folder: pathlib.Path | None) -> Iterator[None]:
    """Keeps whatever is compiled in this process in `folder`, however quickly it was.

    None is for what names a folder itself.
    """
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    for name, value in zip(names, (folder and str(folder), 0), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@contextlib.contextmanager
def traced_once() -> Iterator[None]:
    """Jobs with the same step share what JAX has traced and compiled of it.

    Not for tests that change what is traced, as by a monkeypatch.
    """
    with pytest.MonkeyPatch.context() as patch:
        for program in (TrainingProgram, HostProgram, PipelinedProgram):
            for name in ("_abstract_state", "_steps"):
                if name in vars(program):
                    patch.setattr(program, name, _once_a_step(getattr(program, name)))
        draw = _once_a_step(TrainingProgram._jitted_init.fget)
        patch.setattr(TrainingProgram, "_jitted_init", property(draw))
        # A program with experts on a disk calls these with records of its own.
        parts, begin = _once_a_step(vars), LayeredProgram.__init__

        def share(program, *arguments):
            begin(program, *arguments)
            first = parts(program)
            for name in ("_layered", "_take", "_measure", "_draw"):
                setattr(program, name, first[name])

        patch.setattr(LayeredProgram, "__init__", share)
        yield


def _once_a_step(method):
    """A method of programs that is called for the first of those with the same step."""
    found = []

    def call(program):
        job = program.job
        step = (
            type(program), program.mesh, job.mesh.rules, job.model, job.loss, job.step,
            job.optimizer, job.schedule, job.pipeline, job.compiler, job.distillation, job.seed,
            job.batch_size, job.sequence_lengths, job.storage.experts, job.storage.slots,
        )  # fmt: skip
        for other, result in found:
            if other == step:
                return result
        found.append((step, result := method(program)))
        return result

    return call


@contextlib.contextmanager
def on_devices(number: int) -> Iterator[None]:
    """A mesh that takes all devices takes so many of those that are simulated."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *backend: ALL_DEVICES(*backend)[:number])
        yield
