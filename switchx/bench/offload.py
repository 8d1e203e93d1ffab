# SPDX-License-Identifier: Apache-2.0
"""The part of `switchx bench decode` with only a few experts of each layer on the device.

Decoding with slots is compared with the longer of its computation, which is that of a model
with as many experts as slots, and its copies, at the speed measured beside it. On a CPU the
device's memory is the host's, and copies do not run in parallel with products.
"""

import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from switchx.bench.train import MEBIBYTE, switch_model
from switchx.inference.config import DecodingConfig
from switchx.inference.generate import Generator, for_decoding
from switchx.inference.offload.chosen_experts import ChosenExperts, on_host
from switchx.inference.offload.expert_slots import moved_into
from switchx.inference.offload.ring_decode import RingExperts
from switchx.inference.quantize import quantize_experts
from switchx.models.config import ModelConfig, Precision
from switchx.models.params import init_params
from switchx.results import Check

NUM_EXPERTS = 16
BATCH, INPUTS, NEW_TOKENS = 4, 8, 12
# Of the ring: Switch layers of each stack, experts of each layer, slots.
RING_LAYERS, RING_EXPERTS, RING_SLOTS = 4, 4, 3
# Of the timed case: slots, tokens (many, as steps are timed, not prompts), turns.
TIMED_SLOTS, TIMED_TOKENS, TURNS = 4, 48, 7
# Bits of a weight; bfloat16 is not quantized.
FORMATS = {"bf16": 16, "int8": 8, "int4": 4}
NO_END = -1


def step_times() -> tuple[list[dict[str, Any]], list[Check]]:
    """Medians of `timed_turns`, and the time over the longer of computation and copies."""
    timed = timed_turns("bf16", TIMED_SLOTS, TURNS)
    decoding_s, computing_s, copies_s = (
        float(np.median(timed[name])) for name in ("decoding_s", "computing_s", "copies_s")
    )
    row = {
        "with slots": "bf16, 1 beams",
        "slots": TIMED_SLOTS,
        "hits": timed["hits"],
        "device_mib": timed["device_mib"],
        "moved_mib": timed["moved_mib"],
        "tokens_per_s": BATCH * TIMED_TOKENS / decoding_s,
        "decoding_s": decoding_s,
        "computing_s": computing_s,
        "copies_s": copies_s,
        "step_vs_bound": decoding_s / max(computing_s, copies_s),
    }
    return [row], [Check("step_vs_bound", row["step_vs_bound"], "<=1.3")]


def timed_turns(weights: str, slots: int, turns: int) -> dict[str, Any]:
    """Seconds of greedy decoding with some slots, in turns with a model that has as many
    experts.

    Each turn decodes the same sentences, so that the second model moves nothing after the
    first turn; its products are of a bank of the same shape. Copies are of one expert into a
    bank, also in turns.

    Returns:
        One per turn: `decoding_s`, `computing_s` (as many experts as slots) and `copies_s` (of
        all that a turn moves). Averages per turn: `hits`, a fraction, and `moved_mib`.
    """
    contenders = {}
    for num_experts in (NUM_EXPERTS, slots):
        config, params = on_host(*model(weights, num_experts))
        experts = ChosenExperts(config, params, slots)
        generator = Generator(
            for_decoding(config),
            experts.params,
            decoding_config(1, TIMED_TOKENS),
            BATCH,
            experts=experts,
        )
        contenders[num_experts] = experts, generator
        outputs(generator)
    expert = experts.source.expert(0, 0)
    bank = jax.tree.map(lambda x: jnp.zeros((slots, *x.shape[1:]), x.dtype), expert)
    spent: dict[Any, list[float]] = {name: [] for name in (*contenders, "copies")}
    held = contenders[NUM_EXPERTS][0]
    before = held.traffic
    for _ in range(turns):
        for num_experts, (_, generator) in contenders.items():
            begin = time.perf_counter()
            outputs(generator)
            spent[num_experts].append(time.perf_counter() - begin)
        begin = time.perf_counter()
        for slot in range(slots):
            bank = moved_into(bank, expert, np.int32(slot))
        jax.block_until_ready(bank)
        spent["copies"].append(time.perf_counter() - begin)
    size = bytes_of_expert(config, FORMATS[weights])
    after = held.traffic
    moved = (after.moved_bytes - before.moved_bytes) / turns
    return {
        "decoding_s": spent[NUM_EXPERTS],
        "computing_s": spent[slots],
        "copies_s": [moved / size * each / slots for each in spent["copies"]],
        "hits": (after.hits - before.hits) / (after.requested - before.requested),
        "device_mib": after.device_bytes / MEBIBYTE,
        "moved_mib": moved / MEBIBYTE,
    }


@functools.cache
def model(
    weights: str, num_experts: int | None = None, sparse_layers: int | None = None
) -> tuple[ModelConfig, dict]:
    """A model in bfloat16 with all experts on the device, in the format `weights`.

    Args:
        num_experts: number of experts of a layer; None takes NUM_EXPERTS.
        sparse_layers: number of Switch layers of each stack; None takes the model's own.
    """
    config = switch_model(num_experts or NUM_EXPERTS)
    if sparse_layers is not None:
        layers = sparse_layers * config.period
        config = dataclasses.replace(
            config, num_encoder_layers=layers, num_decoder_layers=layers
        )
    config = dataclasses.replace(
        config,
        precision=Precision(params="bfloat16", compute="bfloat16"),
        # With tied tables, random weights repeat one token; these write different ones.
        tie_embeddings=False,
        init_scale=4.0,
    )
    params = init_params(config, jax.random.key(0))
    if FORMATS[weights] == 16:
        return config, params
    config, params, _, _ = quantize_experts(config, params, bits=FORMATS[weights])
    return config, params


def decoding_config(beams: int, tokens: int | None = None) -> DecodingConfig:
    # No token ends a sentence: all have the same number of tokens.
    return DecodingConfig(tokens or NEW_TOKENS, beam_size=beams, eos_id=NO_END, pruning="none")


def outputs(generator: Generator) -> list[list[list[int]]]:
    """Tokens of all hypotheses of all sentences."""
    V = generator.config.vocab_size
    sentences = np.random.default_rng(0).integers(3, V, (BATCH, INPUTS)).tolist()
    return [[each.tokens for each in rows] for _, rows in sorted(generator(sentences))]


def decoded(config: ModelConfig, params: dict, beams: int, experts=None) -> np.ndarray:
    """Tokens of all hypotheses of all sentences."""
    generator = Generator(
        for_decoding(config), params, decoding_config(beams), BATCH, experts=experts
    )
    return np.array(outputs(generator))


def in_slots(config: ModelConfig, params: dict, beams: int, slots: int = 4):
    """Tokens decoded with slots in each layer, and what was moved."""
    config, params = on_host(config, params)
    experts = ChosenExperts(config, params, slots)
    return decoded(config, experts.params, beams, experts), experts.traffic


def ring_model() -> tuple[ModelConfig, dict]:
    """The model for the ring, in float32.

    XLA keeps more than bfloat16's bits inside fusions, which differ between a loop over layers
    and separate layers, so that resident models differ in bfloat16, too.
    """
    config, params = model("bf16", RING_EXPERTS, RING_LAYERS)
    config = dataclasses.replace(config, precision=Precision())
    return config, jax.tree.map(lambda leaf: leaf.astype("float32"), params)


def in_ring(config: ModelConfig, params: dict, beams: int):
    """Tokens decoded with layers of experts streamed through slots, and what was moved."""
    ring = RingExperts(config, params, RING_SLOTS)
    return decoded(ring.config, ring.params, beams, ring), ring.traffic


def bytes_of_expert(config: ModelConfig, bits: int) -> int:
    """Bytes of one expert's matrices, including a float32 scale per output if quantized."""
    D, F, switch = config.d_model, config.d_ff, config.switch
    F = switch.d_ff or F
    num_in = 2 if config.is_gated else 1
    scales = 0 if bits == 16 else 4 * (num_in * F + D)
    return (num_in + 1) * D * F * bits // 8 + scales
