# SPDX-License-Identifier: Apache-2.0
"""`switchx bench train`: a Switch T5's training step against the same model when dense.

One step is forward, backward and the optimizer; the contenders take turns. A step with experts
on a disk takes turns with its resident program, in a separate process (storage.py).
"""

import dataclasses
import functools
import time
from typing import Any

import jax
import numpy as np

from pallas_kernels.bench.timing import Contender, speedup, take_turns
from switchx.bench.peers import torch_peer
from switchx.interop.huggingface import describe
from switchx.models.config import ModelConfig, SwitchConfig
from switchx.optim.adafactor import Adafactor
from switchx.optim.adamw import AdamW
from switchx.optim.protocol import Optimizer
from switchx.optim.schedules import Constant
from switchx.results import Check, Report
from switchx.training.losses import LossConfig
from switchx.training.step import StepConfig, init_state, train_step

BATCH, INPUTS, TARGETS = 16, 128, 32
TOKENS_PER_STEP = BATCH * (INPUTS + TARGETS)
DENSE = ModelConfig(
    "encoder_decoder",
    vocab_size=8192,
    d_model=256,
    d_ff=1024,
    num_heads=4,
    d_head=64,
    num_encoder_layers=4,
    num_decoder_layers=4,
    activation="relu",
    init_scale=0.1,
)
NUM_EXPERTS = (8, 16, 32, 64)
NUM_STEPS = 2  # per turn
MEBIBYTE = 2**20


def switch_model(num_experts: int) -> ModelConfig:
    """`DENSE` in which every other FFN is a Switch layer with capacity factor 1.0."""
    switch = SwitchConfig(num_experts, every=2, capacity_factor=1.0)
    return dataclasses.replace(DENSE, switch=switch)


def make_batch(
    vocab_size: int = DENSE.vocab_size,
    rows: int = BATCH,
    inputs: int = INPUTS,
    targets: int = TARGETS,
) -> dict[str, np.ndarray]:
    """A batch without padding; token ids are random, as speed does not depend on them."""
    rng = np.random.default_rng(0)

    def side(prefix: str, length: int) -> dict[str, np.ndarray]:
        return {
            f"{prefix}_input_tokens": rng.integers(3, vocab_size, (rows, length)),
            f"{prefix}_segment_ids": np.ones((rows, length)),
            f"{prefix}_positions": np.tile(np.arange(length), (rows, 1)),
        }

    features = side("encoder", inputs) | side("decoder", targets)
    features["decoder_target_tokens"] = rng.integers(3, vocab_size, (rows, targets))
    batch = {name: value.astype(np.int32) for name, value in features.items()}
    return batch | {"decoder_loss_weights": np.ones((rows, targets), np.float32)}


@dataclasses.dataclass
class CompiledStep:
    """A compiled training step; `contender` makes its state.

    Attributes:
        bytes: bytes of arguments and temporaries.
    """

    name: str
    config: ModelConfig
    bytes: int
    compile_s: float
    init: Any
    step: Any
    batch: dict

    def contender(self) -> Contender:
        """Makes the state and a contender for it; takes two steps."""
        batch = jax.device_put(self.batch)
        found = Contender.stepping(
            self.name, lambda state: self.step(state, batch), self.init(), peak_bytes=self.bytes
        )
        for _ in range(2):
            if found.step().is_skipped:
                raise RuntimeError(f"{self.name}: the step is not finite; nothing to measure")
        return found


def compiled(
    name: str, config: ModelConfig, batch: dict, optimizer: Optimizer = Adafactor()
) -> CompiledStep:
    """A model's step, lowered and compiled without making its state."""
    start = time.perf_counter()
    transformation = optimizer.build(Constant(1e-3))
    loss = LossConfig(layer_reduction="mean")
    init = functools.partial(init_state, config, transformation, seed=0)

    def one_step(state, batch):
        return train_step(config, loss, StepConfig(), transformation, state, batch)

    state = jax.eval_shape(init)
    step = jax.jit(one_step, donate_argnums=0).lower(state, batch).compile()
    made = jax.jit(init).lower().compile()
    compile_s = time.perf_counter() - start
    return CompiledStep(name, config, needed_bytes(step), compile_s, made, step, batch)


def needed_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes of a program's arguments and temporaries."""
    memory = compiled.memory_analysis()
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes


def contender(name: str, config: ModelConfig, optimizer: Optimizer = Adafactor()) -> Contender:
    """A model's training step on `make_batch`."""
    return compiled(name, config, make_batch(config.vocab_size), optimizer).contender()


def in_ms(each: Contender) -> dict[str, float]:
    """Median, smallest and largest time of a step, as columns of a row."""
    return {
        "step_ms": 1e3 * each.median_s,
        "min_ms": 1e3 * min(each.times_s),
        "max_ms": 1e3 * max(each.times_s),
    }


def run(rounds: int) -> Report:
    """Measures a dense model against 8 to 64 experts, and PyTorch where it is installed."""
    # First, as another process may need the device that this one will hold. Its job reads data;
    # a card's machine, whose programs import this file, too, may lack the packages for that.
    from switchx.bench import storage

    parts = [storage.measured(rounds)]
    dense = contender("dense", DENSE)
    switches = {n: contender(f"switch {n}", switch_model(n)) for n in NUM_EXPERTS}
    take_turns([dense, *switches.values()], rounds, NUM_STEPS)
    rows = [_row(each, dense) for each in (dense, *switches.values())]
    checks = [
        Check("switch8_vs_dense", speedup(switches[8], dense), ">=0.93"),
        Check("switch64_vs_dense", speedup(switches[64], dense), ">=0.68"),
    ]
    if torch_peer.is_available():
        parts.append(against_torch(rounds))
    for found, more in parts:
        rows, checks = rows + found, checks + more
    return Report("bench train", rows, checks)


def against_torch(rounds: int) -> tuple[list[dict[str, Any]], list[Check]]:
    """Measures both with AdamW, in turns; PyTorch's process waits while ours runs."""
    rows, checks = [], []
    for num_experts, bound in ((8, ">=0.95"), (64, ">=1.0")):
        ours = contender(f"switch {num_experts}, AdamW", switch_model(num_experts), AdamW())
        settings = {
            "task": "train",
            "config": describe(switch_model(num_experts))[0]
            # Number of a sequence's tokens that an expert takes: a capacity factor of 1.0.
            | {"expert_capacity": max(INPUTS // num_experts, 1)},
            "batch": BATCH,
            "inputs": INPUTS,
            "targets": TARGETS,
        }
        with torch_peer.TorchPeer(torch_peer.PROGRAM, settings) as peer:
            step = functools.partial(peer.ask, "step")
            theirs = Contender(f"transformers {num_experts}, AdamW", step)
            step()  # its first two steps allocate
            take_turns([ours, theirs], rounds, NUM_STEPS)
        rows += [_row(theirs, theirs), _row(ours, theirs)]
        checks.append(Check(f"switch{num_experts}_vs_torch", speedup(ours, theirs), bound))
    return rows, checks


def _row(each: Contender, baseline: Contender) -> dict[str, Any]:
    return {
        "model": each.name,
        **in_ms(each),
        "tokens_per_s": TOKENS_PER_STEP / each.median_s,
        "peak_mib": each.peak_bytes / MEBIBYTE or None,
        "baseline": baseline.name,
        "vs_baseline": speedup(each, baseline),
    }
