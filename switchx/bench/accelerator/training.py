# SPDX-License-Identifier: Apache-2.0
"""The part of `check accelerator` about training: a Switch-Base-like model's step on the card.

Dispatchers against the dense model of equal FLOPs, PyTorch's Switch Transformer, losses against
those of the machine's CPU, and cuDNN's attention.
"""

import concurrent.futures
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from pallas_kernels.bench.timing import Contender, speedup, take_turns
from switchx.bench.accelerator.parts import Session, row
from switchx.bench.peers import torch_peer
from switchx.bench.train import CompiledStep, compiled, make_batch
from switchx.interop.huggingface import describe
from switchx.models.config import ModelConfig, Precision, SwitchConfig
from switchx.models.flops import train_flops
from switchx.optim.adamw import AdamW
from switchx.optim.protocol import Optimizer

# Switch-Base as released (configs/models/switch_base_released.gin), dense, remat as its runs.
DENSE = ModelConfig(
    "encoder_decoder",
    vocab_size=32128,
    d_model=768,
    d_ff=3072,
    num_heads=12,
    d_head=64,
    num_encoder_layers=12,
    num_decoder_layers=12,
    activation="relu",
    init_scale=0.1,
    scan_layers=True,
    remat="full",
    precision=Precision(compute="bfloat16"),
)
TINY = dataclasses.replace(
    DENSE,
    vocab_size=256,
    d_model=64,
    d_ff=128,
    num_heads=2,
    d_head=32,
    num_encoder_layers=2,
    num_decoder_layers=2,
)
CAPACITY_FACTOR = 1.25
NUM_EXPERTS, DISPATCHERS = (8, 64), ("gather", "dropless")
STEPS_OF_LOSSES, ROUNDS, STEPS = 20, 5, 2


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Rows of a batch and lengths of both sides."""

    rows: int
    inputs: int
    targets: int

    @property
    def tokens(self) -> int:
        return self.rows * (self.inputs + self.targets)

    def batch(self, config: ModelConfig) -> dict:
        return make_batch(config.vocab_size, self.rows, self.inputs, self.targets)


def sparse(dense: ModelConfig, num_experts: int, dispatcher: str) -> ModelConfig:
    """Every other FFN a Switch layer; `dropless` drops no token."""
    switch = SwitchConfig(
        num_experts,
        every=2,
        capacity_factor=CAPACITY_FACTOR,
        group_size=8192,
        dispatcher=dispatcher,
    )
    return dataclasses.replace(dense, switch=switch)


def training(session: Session) -> Iterator[dict[str, Any]]:
    """Rows of the losses, of PyTorch's step and ours, of the dense model and each sparse one.

    What a comparison needs is compiled before it is measured, and nothing meanwhile: compiling
    needs the card, too, and takes most of the time.
    """
    model = session.sized(DENSE, TINY)
    shapes = session.sized(Shapes(16, 512, 128), Shapes(2, 32, 8))
    few, *many = session.sized(NUM_EXPERTS, (2,))
    with concurrent.futures.ThreadPoolExecutor() as pool:

        def begin(name: str, config: ModelConfig, *optimizer: Optimizer):
            return pool.submit(compiled, name, config, shapes.batch(config), *optimizer)

        yield from losses(session)
        if session.is_wanted(name := f"{few} experts, AdamW"):
            adamw = begin(name, sparse(model, few, "gather"), AdamW())
            yield from against_torch(session, shapes, adamw.result())
        begun = begin("dense", model)
        for num_experts in (few, *many):
            ways = {f"{num_experts} experts, {way}": way for way in DISPATCHERS}
            others = [
                begin(name, sparse(model, num_experts, way))
                for name, way in ways.items()
                if session.is_wanted(name)
            ]
            others = [each.result() for each in others]
            dense = begun.result()
            if num_experts == few and session.is_wanted("dense"):
                yield _row(session, model, shapes, dense)
            yield from _against(session, shapes, dense, others)
    yield from by_cudnn(session, shapes, dense)


def _against(session, shapes, dense: CompiledStep, others) -> Iterator[dict[str, Any]]:
    """A row for each of the others, in turns with the dense model, one after another: the
    states of all of them may not fit the card together."""
    for each in others:
        baseline, contender = dense.contender(), each.contender()
        take_turns([baseline, contender], session.sized(ROUNDS, 1), STEPS)
        yield _row(
            session, each.config, shapes, each, contender, vs_dense=speedup(contender, baseline)
        )


def _row(
    session: Session, config, shapes: Shapes, step: CompiledStep, contender=None, **more
) -> dict[str, Any]:
    if contender is None:
        contender = step.contender()
        take_turns([contender], session.sized(ROUNDS, 1), STEPS)
    flops = train_flops(config, shapes.inputs, shapes.targets) * shapes.rows
    per_s = flops / contender.median_s / 1e12
    rate = session.rates.get("bfloat16 product")
    return row(
        step.name,
        shapes.tokens / contender.median_s,
        "tokens/s",
        step_ms=1e3 * contender.median_s,
        model_tflop_per_s=per_s,
        share_of_matrix_rate=per_s / rate if rate else None,
        peak_gib=contender.peak_bytes / 2**30,
        compile_s=step.compile_s,
        **more,
    )


def against_torch(session: Session, shapes: Shapes, ours: CompiledStep):
    """Ours and transformers' with AdamW, bfloat16 products and float32 parameters."""
    if not torch_peer.is_available():
        yield row("transformers, AdamW", None, "tokens/s", why="no torch and transformers here")
        return
    num_experts = ours.config.switch.num_experts
    capacity = max(int(CAPACITY_FACTOR * shapes.inputs / num_experts), 1)
    settings = {
        "task": "train",
        "device": session.sized("cuda", "cpu"),
        "dtype": "bfloat16",
        "config": describe(ours.config)[0] | {"expert_capacity": capacity},
        "batch": shapes.rows,
        "inputs": shapes.inputs,
        "targets": shapes.targets,
    }
    with torch_peer.TorchPeer(torch_peer.PROGRAM, settings) as peer:
        step = functools.partial(peer.ask, "step")
        theirs = Contender("transformers, AdamW", step)
        step()  # its first two steps allocate
        contender = ours.contender()
        take_turns([contender, theirs], session.sized(ROUNDS, 1), STEPS)
    ratio = speedup(contender, theirs)
    yield _row(session, ours.config, shapes, ours, contender, vs_torch=ratio)
    yield row(theirs.name, shapes.tokens / theirs.median_s, "tokens/s")


def losses(session: Session) -> Iterator[dict[str, Any]]:
    """The largest difference of the losses of 20 steps from those of the CPU."""
    small = dataclasses.replace(
        session.sized(DENSE, TINY), num_encoder_layers=2, num_decoder_layers=2, remat="none"
    )
    shapes = session.sized(Shapes(4, 128, 32), Shapes(2, 16, 8))
    for way in session.sized(DISPATCHERS, DISPATCHERS[1:]):
        if not session.is_wanted(f"losses, {way}"):
            continue
        config = sparse(small, session.sized(8, 2), way)
        found = {}
        for device in (jax.devices()[0], jax.devices("cpu")[0]):
            # It determines which kernels are chosen while the step is traced.
            with jax.default_device(device):
                step = compiled(way, config, shapes.batch(config))
                found[device.platform] = _losses(session, step)
        on_card, on_cpu = list(found.values())[0], list(found.values())[-1]
        largest = _largest_difference(on_card, on_cpu)
        yield row(f"losses, {way}", largest, "nats", on_card=on_card, on_cpu=on_cpu)


def _largest_difference(losses: list[float], others: list[float]) -> float:
    """The largest difference; NaN if any loss is NaN."""
    return float(np.max(np.abs(np.subtract(losses, others))))


def _losses(session: Session, step: CompiledStep) -> list[float]:
    state = step.init()
    batch = jax.device_put(step.batch)
    values = []
    for _ in range(session.sized(STEPS_OF_LOSSES, 3)):
        state, metrics = step.step(state, batch)
        values.append(float(metrics.loss))
    return values


def by_cudnn(session: Session, shapes: Shapes, dense: CompiledStep) -> Iterator[dict[str, Any]]:
    """The dense model's step and losses with cuDNN's attention; last, as no card has run it."""
    name = "cuDNN's attention"
    if session.is_rehearsal:
        yield row(f"dense, {name}", None, "tokens/s", why="there is no NVIDIA GPU")
        return
    config = dataclasses.replace(dense.config, training_attention="cudnn")
    try:
        step = compiled(f"dense, {name}", config, shapes.batch(config))
    except (ValueError, RuntimeError) as error:  # cuDNN's own refusal, or XLA's
        yield row(f"dense, {name}", None, "tokens/s", why=f"refused: {str(error)[:500]}")
        return
    yield from _against(session, shapes, dense, [step])
    largest = _largest_difference(_losses(session, step), _losses(session, dense))
    yield row(f"losses, {name}", largest, "nats")
