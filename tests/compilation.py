# SPDX-License-Identifier: Apache-2.0
"""Programs that tests compile again and again: compiled once, small, for few devices."""

import contextlib
import pathlib
from collections.abc import Iterator

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

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
def compiled_once(folder: pathlib.Path) -> Iterator[None]:
    """Keeps whatever is compiled in this process in `folder`, however quickly it was."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    for name, value in zip(names, (str(folder), 0), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@contextlib.contextmanager
def on_devices(number: int) -> Iterator[None]:
    """A mesh that takes all devices takes so many of those that are simulated."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *backend: ALL_DEVICES(*backend)[:number])
        yield
