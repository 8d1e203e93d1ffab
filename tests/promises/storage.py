# SPDX-License-Identifier: Apache-2.0
"""Training with experts on a disk against the resident program: gradients, bits and losses.

SE-MoE (Shen et al. 2022, arXiv:2205.10034), section 2.
Dims: B rows, E experts
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from switchx import tree
from switchx.bench.small_job import small_job
from switchx.bench.storage import opened, opened_resident, record_bytes
from switchx.data.features import DecoderOnlyFeatures, EncoderDecoderFeatures, Example
from switchx.models.config import ModelConfig, RouterConfig, SwitchConfig
from switchx.optim.adafactor import Adafactor
from switchx.optim.adamw import AdamW
from switchx.optim.schedules import Constant
from switchx.partitioning.mesh import MeshSpec
from switchx.storage.simulation import POLICIES
from switchx.storage.snapshot import Snapshot
from switchx.training.job import TrainingJob
from switchx.training.offload.disk_program import LayeredProgram
from switchx.training.offload.disk_step import LayeredGradients
from switchx.training.offload.storage_spec import StorageSpec
from switchx.training.step import StepConfig, gradients

ROWS, LENGTH, LAYERS, EXPERTS = 8, 8, 10, 16
# A step has 64 tokens, so some of the 16 experts of a layer have none.
MODEL = ModelConfig(
    "decoder_only", 384, 16, 32, 2, 8, num_decoder_layers=LAYERS, activation="relu",
    dropout_rate=0.1, scan_layers=True, remat="full",
    switch=SwitchConfig(EXPERTS, every=1, min_capacity=1, group_size=LENGTH),
)  # fmt: skip
DISK = StorageSpec("disk")
ADAMW = AdamW(weight_decay=0.1, epsilon=1e-4)
OPTIMIZERS = {
    "adamw": ADAMW,
    "adafactor": Adafactor(min_dim_size_to_factor=8),
    "adafactor, momentum": Adafactor(
        min_dim_size_to_factor=8, beta1=0.9, weight_decay_rate=0.01
    ),
}
# Shares of the records that are cached. The smallest is one layer's experts.
FRACTIONS = (1.0, 0.5, 0.25, 0.1)
BIT_STEPS, LOSS_STEPS = 20, 50


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


def trained(program, num_steps: int, after_step: Callable[[], None] = lambda: None):
    """The state after some steps, and the loss of each."""
    state, losses = program.init_state(), []
    for step in range(num_steps):
        batch = program.place(make_batch(program.job.model, step, ROWS, LENGTH))
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
    """Number of bits that differ between arrays of the same names, shapes and dtypes.

    Raises:
        ValueError: names, shapes or dtypes differ.
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


# Raw gradients, dropout on.


def gradient_models() -> dict[str, ModelConfig]:
    """Kinds of models and routers; stacks of four blocks."""
    small = dataclasses.replace(MODEL, num_decoder_layers=4)
    both = dataclasses.replace(small, architecture="encoder_decoder", num_encoder_layers=4)

    def routed(model, router, **switch):
        switch = dataclasses.replace(model.switch, router=router, **switch)
        return dataclasses.replace(model, switch=switch)

    return {
        "decoder only": small,
        "encoder and decoder": both,
        "expert choice": routed(
            both, RouterConfig("expert_choice", exploration="none"), stacks="encoder"
        ),
        "hash": routed(small, RouterConfig("hash", exploration="none")),
        "two experts, biased": routed(
            small, RouterConfig(num_selected=2, bias_update_rate=1e-3)
        ),
    }


class KeptGradients:
    """The banks of a run's records, which also keep the gradients of experts.

    Attributes:
        grads: `[N, E, ...]` by path, as of the whole step.
    """

    def __init__(self, banks, params: Mapping[str, np.ndarray]):
        self._banks = banks
        self.grads = {name: np.zeros_like(leaf) for name, leaf in params.items()}

    def __getattr__(self, name: str):
        return getattr(self._banks, name)

    def keep_gradients(self, period, used_JE, bank) -> None:
        for name, gradient in bank.items():
            self.grads[name][period.number] += np.asarray(gradient)
        self._banks.keep_gradients(period, used_JE, bank)


def gradient_errors(models: Mapping[str, ModelConfig] | None = None) -> Iterator[tuple]:
    """The distance of all raw gradients over the norm of the resident ones, by model."""
    for name, model in (models or gradient_models()).items():
        yield "layered_gradient_error", name, gradient_error(model)


def gradient_error(model: ModelConfig) -> float:
    """The error with experts read from records, in two microbatches, against resident ones."""
    job, batch = make_job(model), make_batch(model, 0, ROWS, LENGTH)
    with opened_resident(job) as resident:
        state = resident.init_state()
        compute = jax.jit(functools.partial(gradients, model, job.loss, job.step))
        want = tree.named_leaves(compute(state.params, batch, key=state.key)[0])
        params = jax.device_get(state.params)
    with opened(job) as (program, _):
        state = program.init_state(params)
        leaves = tree.named_leaves(params)
        prefix = "params/"
        on_disk = {name.removeprefix(prefix) for name in program.experts.abstract}
        banks = KeptGradients(
            program.experts, {n: leaf for n, leaf in leaves.items() if n in on_disk}
        )
        program.experts.begin_sweeps(is_training=True)
        layered = LayeredGradients(model, job.loss, job.step.num_microbatches, slots=2)
        grads, _ = layered.gradients(state.params, batch, banks, key=state.key)
    return _relative_distance(tree.named_leaves(grads) | banks.grads, want)


def _relative_distance(got: Mapping[str, Any], want: Mapping[str, Any]) -> float:
    if got.keys() != want.keys():
        raise ValueError(f"gradients of {sorted(got.keys() ^ want.keys())} on one side alone")
    pairs = [(np.asarray(got[n], np.float64), np.asarray(want[n], np.float64)) for n in want]
    distance = sum(np.sum(np.square(a - b)) for a, b in pairs)
    return float(np.sqrt(distance / sum(np.sum(np.square(b)) for _, b in pairs)))


# Neither how many records are cached nor which changes a bit.


def bits_by_cache(
    fractions=FRACTIONS, num_steps: int = BIT_STEPS, policies=POLICIES
) -> Iterator[tuple]:
    """Bits that differ from the run with all records cached, by policy and capacity."""
    expected = None
    for policy in policies:
        for fraction in fractions:
            found, hit_rate = everything(policy, fraction, num_steps)
            expected = expected or found
            what = f"{fraction:.0%} cached, {policy}"
            yield "hit_rate", what, hit_rate
            yield "bits_differing_by_cache", what, differing_bits(found, expected)


def everything(policy: str, fraction: float, num_steps: int):
    """All that a run produced: losses, state, records; and its cache's hit rate."""
    host_bytes = round(fraction * LAYERS * EXPERTS) * record_bytes(make_job())
    job = make_job(storage=StorageSpec("disk", host_bytes=host_bytes, policy=policy))
    with opened(job) as (program, folder):
        state, losses = trained(program, num_steps)
        hit_rate = program.experts.metrics()["hit_rate"]
        parts = {"params": state.params, "opt_state": state.opt_state, "losses": losses}
        arrays = tree.named_leaves(jax.device_get(parts))
        arrays = {name: np.asarray(leaf) for name, leaf in arrays.items()}
        return arrays | records_of(program, folder / "saved"), hit_rate


def late_updates(optimizers=OPTIMIZERS, num_steps: int = BIT_STEPS) -> Iterator[tuple]:
    """Bits that differ between records updated when they are used and in every step."""
    for name, optimizer in optimizers.items():
        found = []
        job = make_job(optimizer=optimizer)
        for settles in (False, True):
            with opened(job) as (program, folder):
                trained(program, num_steps, *([program.experts.settle] if settles else []))
                late_NE = program.experts._updates_NE < program.experts.updates
                assert late_NE.any() != settles
                if not settles:
                    yield "touched_share", name, program.experts.metrics()["touched_share"]
                found.append(records_of(program, folder / "saved"))
        yield "lazy_vs_dense_bits_differing", name, differing_bits(*found)


def losses(num_steps: int = LOSS_STEPS) -> Iterator[tuple]:
    """Losses with experts on a disk, and of a control, against the resident program's.

    The control is the resident program without remat: what rounding alone does.
    """
    job = make_job()
    with opened_resident(job) as program:
        _, expected = trained(program, num_steps)
    with opened(job) as (program, _):
        _, on_disk = trained(program, num_steps)
    control = dataclasses.replace(job, model=dataclasses.replace(MODEL, remat="none"))
    with opened_resident(control) as program:
        _, without_remat = trained(program, num_steps)
    for name, found in (("loss_vs_resident", on_disk), ("control_vs_resident", without_remat)):
        yield name, f"{num_steps} steps", np.max(np.abs(found / expected - 1))


def make_batch(model: ModelConfig, seed: int, rows: int, length: int):
    """Rows without padding whose tokens follow a rule, one in eight at random.

    Each token is 5 times the one before it plus 1, modulo 31. The model learns this rule, and
    the loss falls to that of the random tokens.
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
