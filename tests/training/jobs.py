# SPDX-License-Identifier: Apache-2.0
"""Small models, batches and jobs for the tests of training, and a reporter of what happens."""

import dataclasses
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np

from switchx import tree
from switchx.data.features import DecoderOnlyFeatures, EncoderDecoderFeatures, Example
from switchx.data.objectives import CausalLM
from switchx.data.tasks import Task
from switchx.data.tokenizers import ByteVocabulary
from switchx.models.config import ModelConfig, RouterConfig, SwitchConfig
from switchx.models.params import abstract_params, forward
from switchx.optim.adafactor import Adafactor
from switchx.optim.schedules import Constant
from switchx.training.job import TrainingJob
from switchx.training.losses import LossConfig
from tests.data.fakes import text_corpus

LENGTH = 8
LOSS = LossConfig(layer_reduction="mean")
# The auxiliary losses weigh enough to be seen in a wrong gradient.
WEIGHTY = dataclasses.replace(LOSS, balance_weight=0.5, router_z_weight=0.1)
# One row of a batch is one routing group.
SWITCH = SwitchConfig(
    8,
    every=2,
    capacity_factor=2.0,
    min_capacity=1,
    group_size=LENGTH,
    router=RouterConfig(jitter=0.0),
)
DENSE = ModelConfig("decoder_only", 384, 16, 24, 2, 8, 2, activation="relu")
# The block of Qwen3: two heads of keys for four of queries.
MODERN = ModelConfig(
    "decoder_only", 384, 16, 24, 4, 8, 2, activation="swiglu", positions="rotary",
    num_kv_heads=2, qk_norm="head", attention_bias="qkv", scale_attention=True,
    switch=dataclasses.replace(
        SWITCH, shared_d_ff=16, shared_gate=True,
        router=RouterConfig(num_selected=2, gate="normalized", exploration="none"),
    ),
)  # fmt: skip
TINY = dataclasses.replace(DENSE, d_model=8, d_ff=8, num_heads=1, num_decoder_layers=1)
SPARSE = dataclasses.replace(DENSE, switch=SWITCH)
ENCODER_DECODER = dataclasses.replace(
    SPARSE, architecture="encoder_decoder", num_encoder_layers=2
)
TASK = Task("letters", text_corpus(*["abcdefgh" * 20] * 4), ByteVocabulary(), CausalLM())


def with_padded_rows(batch: dict, *rows: int) -> dict:
    """The batch, these of its rows all padding."""
    kept = np.isin(np.arange(len(batch["decoder_segment_ids"])), rows, invert=True)
    return {name: np.where(kept[:, None], x, 0) for name, x in batch.items()}


def make_batch(config: ModelConfig, rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Rows of one example each, all of different lengths of 1 to LENGTH tokens."""
    rng = np.random.default_rng(seed)

    def tokens():
        return rng.integers(3, config.vocab_size, rng.integers(1, LENGTH + 1))

    features = (
        EncoderDecoderFeatures(LENGTH, LENGTH)
        if config.is_encoder_decoder
        else DecoderOnlyFeatures(LENGTH)
    )
    nothing = np.zeros(0, int)
    return features.batch(
        [
            [Example(tokens() if config.is_encoder_decoder else nothing, tokens())]
            for _ in range(rows)
        ]
    )


def make_job(model: ModelConfig = SPARSE, **changes) -> TrainingJob:
    """Four steps on `TASK` with Adafactor, everything on one device."""
    fields = dict(
        model=model,
        source=TASK,
        optimizer=Adafactor(min_dim_size_to_factor=8),
        schedule=Constant(1e-2),
        loss=LOSS,
        inputs_length=LENGTH // 2,
        targets_length=LENGTH // 2,
        train_steps=4,
        batch_size=8,
        seed=0,
        log_every=1,
        eval_every=2,
        checkpoint_every=2,
        eval_batches=2,
    )
    return TrainingJob(**(fields | changes))


def make_params(config: ModelConfig, seed: int = 0) -> dict:
    """Parameters from NumPy: nothing to compile, and the same in every release of JAX."""
    rng = np.random.default_rng(seed)

    def draw(name, leaf):
        values = rng.normal(size=leaf.shape) * 0.3 + ("scale" in name)
        return jnp.asarray(values, leaf.dtype)

    return tree.map_named(draw, abstract_params(config))


# `(config, params, batch, *, is_training, key)`: operation by operation a model takes seconds.
run_model = jax.jit(forward, static_argnums=0, static_argnames="is_training")


def tiny_job(**changes) -> TrainingJob:
    return make_job(TINY, **changes)


def with_switch(config: ModelConfig, **changes) -> ModelConfig:
    """The configuration with other settings of its Switch layers."""
    return dataclasses.replace(config, switch=dataclasses.replace(config.switch, **changes))


def stacked(config, layers=4, **switch):
    """The configuration with scanned stacks of so many blocks, and dropout."""
    if config.is_encoder_decoder:
        config = dataclasses.replace(config, num_encoder_layers=layers)
    return dataclasses.replace(
        config,
        num_decoder_layers=layers,
        scan_layers=True,
        dropout_rate=0.1,
        switch=config.switch and dataclasses.replace(config.switch, **switch),
    )


def killed_after(last_step: int):
    """What `Events` calls so that a run ends after a step, before its state is saved."""

    def end(step):
        if step == last_step:
            raise MemoryError

    return end


def signalled_after(last_step: int):
    """What `Events` calls so that this process gets a SIGTERM after a step."""

    def stop(step):
        if step == last_step:
            os.kill(os.getpid(), signal.SIGTERM)

    return stop


@dataclasses.dataclass(frozen=True)
class OwnConfig(ModelConfig):
    """A model configuration of a class of one's own."""

    width: int = 3
    widths: tuple[tuple[int, ...], ...] = ((2, 3), (4,))


class Events(list):
    """A reporter that writes down what it is told; `at(step)` is called after each step."""

    def __init__(self, at=lambda step: None):
        self._at = at

    def begin(self, first_step, last_step):
        self.append(("begin", first_step, last_step))

    def stepped(self, step):
        self.append(("stepped", step))
        self._at(step)

    def logged(self, step, metrics):
        self.append(("logged", step))

    def evaluated(self, step, metrics):
        self.append(("evaluated", step))

    def note(self, text):
        self.append(("note", text))

    @property
    def notes(self):
        return [event[1] for event in self if event[0] == "note"]
