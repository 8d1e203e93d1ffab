# SPDX-License-Identifier: Apache-2.0
"""`switchx bench offload`: decoding with a few experts of each layer on the device.

Tokens against the resident model, bytes on the device and bytes moved against what slots and
choices make of them. Everything is counted, nothing is timed: on a CPU the device's memory is
the host's, and a copy within it says nothing about a bus.
"""

import dataclasses
import functools
import gc
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from switchx.bench.report import Check, Report
from switchx.bench.train import MEBIBYTE, switch_model
from switchx.inference.chosen_experts import ChosenExperts, on_host
from switchx.inference.config import DecodingConfig
from switchx.inference.generate import Generator, for_decoding
from switchx.inference.quantize import quantize_experts
from switchx.models.config import ModelConfig, Precision
from switchx.models.params import init_params
from switchx.storage.simulation import run_policy
from switchx.storage.trace import Trace

NUM_EXPERTS = 16
SLOTS = (1, 4, 16)
BATCH, INPUTS, NEW_TOKENS = 4, 8, 12
BEAMS = (1, 4)
# Bits of a weight; bfloat16 is not quantized.
FORMATS = {"bf16": 16, "int8": 8, "int4": 4}
NO_END = -1


@dataclasses.dataclass(frozen=True)
class Case:
    """What one model with slots did.

    Attributes:
        tokens_differing: from the resident model's, of all hypotheses.
        device_vs_slots, moved_vs_formula: bytes over those that were to be expected.
    """

    weights: str
    beams: int
    slots: int
    tokens_differing: int
    device_bytes: int
    device_vs_slots: float
    moved_bytes: int
    moved_vs_formula: float
    hits: float

    def row(self) -> dict[str, Any]:
        return {
            "decoding": f"{self.weights}, {self.beams} beams",
            "slots": self.slots,
            "tokens_differing": self.tokens_differing,
            "hits": self.hits,
            "device_mib": self.device_bytes / MEBIBYTE,
            "moved_mib": self.moved_bytes / MEBIBYTE,
        }


def run(note: Callable[[str], None]) -> Report:
    """Decodes the same sentences with each format of weights, number of beams and of slots."""
    cases = []
    for weights in FORMATS:
        config, params = model(weights)
        for beams in BEAMS:
            resident = outputs(Generator(for_decoding(config), params, decoding(beams), BATCH))
            for slots in SLOTS:
                note(f"{weights}, {beams} beams, {slots} slots")
                cases.append(with_slots(config, params, weights, beams, slots, resident))
    moved = {
        weights: sum(each.moved_bytes for each in cases if each.weights == weights)
        for weights in FORMATS
    }
    worst = max(cases, key=lambda each: abs(math.log(each.moved_vs_formula)))
    checks = [
        Check("tokens_differing", sum(each.tokens_differing for each in cases), "==0"),
        Check(
            "device_expert_bytes_vs_slots",
            max(each.device_vs_slots for each in cases),
            "<=1.05",
        ),
        Check("bytes_moved_vs_formula", worst.moved_vs_formula, "==1.00"),
        Check("int4_vs_bf16_bytes_moved", moved["int4"] / moved["bf16"], "<=0.27"),
    ]
    return Report("bench offload", [each.row() for each in cases], checks)


@functools.cache
def model(weights: str) -> tuple[ModelConfig, dict]:
    """A resident model in bfloat16, its experts in a format."""
    config = dataclasses.replace(
        switch_model(NUM_EXPERTS),
        precision=Precision(params="bfloat16", compute="bfloat16"),
        # Random weights of tied tables repeat one token; these write different ones.
        tie_embeddings=False,
        init_scale=4.0,
    )
    params = init_params(config, jax.random.key(0))
    if FORMATS[weights] == 16:
        return config, params
    config, params, _, _ = quantize_experts(config, params, bits=FORMATS[weights])
    return config, params


def decoding(beams: int) -> DecodingConfig:
    # No token ends a sentence: all have as many.
    return DecodingConfig(NEW_TOKENS, beam_size=beams, eos_id=NO_END, pruning="none")


def outputs(generator: Generator) -> list[list[list[int]]]:
    """Tokens of all hypotheses of all sentences."""
    V = generator.config.vocab_size
    sentences = np.random.default_rng(0).integers(3, V, (BATCH, INPUTS)).tolist()
    return [[each.tokens for each in said] for _, said in sorted(generator(sentences))]


def with_slots(config, params, weights: str, beams: int, slots: int, resident) -> Case:
    """Decodes with slots, and compares."""
    config, params = on_host(config, params)
    before = device_bytes()
    experts = ChosenExperts(config, params, slots)
    generator = Generator(
        for_decoding(config), experts.params, decoding(beams), BATCH, experts=experts
    )
    found = outputs(generator)
    used, traffic = device_bytes() - before, experts.traffic
    size = bytes_of_expert(config, FORMATS[weights])
    missed = misses(experts.trace(), slots)
    return Case(
        weights,
        beams,
        slots,
        tokens_differing=int(np.sum(np.array(found) != np.array(resident))),
        device_bytes=used,
        device_vs_slots=used / (traffic.num_layers * slots * size),
        moved_bytes=traffic.moved_bytes,
        moved_vs_formula=traffic.moved_bytes / (missed * size),
        hits=traffic.hits / traffic.requested,
    )


def device_bytes() -> int:
    """Of all arrays that are alive."""
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def bytes_of_expert(config: ModelConfig, bits: int) -> int:
    """Of one expert's matrices; quantized, with a float32 scale for each output."""
    D, F, switch = config.d_model, config.d_ff, config.switch
    F = switch.d_ff or F
    num_in = 2 if config.is_gated else 1
    scales = 0 if bits == 16 else 4 * (num_in * F + D)
    return (num_in + 1) * D * F * bits // 8 + scales


def misses(trace: Trace, slots: int) -> int:
    """Of the requests of a run, simulated; layers share no slots."""
    total, E = 0, trace.num_experts
    for layer in range(len(trace.layers)):
        is_its_T = trace.key_T // E == layer
        of_layer = {name: getattr(trace, name)[is_its_T] for name in ("step_T", "sweep_T")}
        one = dataclasses.replace(
            trace,
            key_T=trace.key_T[is_its_T] % E,
            request_T=trace.request_T[is_its_T],
            layers=(trace.layers[layer],),
            **of_layer,
        )
        hit_T, _ = run_policy(one, slots, "lru")
        total += int(np.sum(~hit_T))
    return total
