# SPDX-License-Identifier: Apache-2.0
"""With experts streamed through a ring, what is written is what the whole model writes."""

import functools

import jax
import pytest

from switchx.inference.config import DecodingConfig
from switchx.inference.generate import Generator, for_decoding
from switchx.inference.quantize import quantize_experts
from switchx.inference.ring_decode import RingExperts
from switchx.models.config import ModelConfig, SwitchConfig
from switchx.models.params import init_params

SLOW = pytest.mark.slow
E, L, T = 4, 5, 4
# Six Switch layers in two stacks, every other block.
MODEL = ModelConfig(
    "encoder_decoder", 12, 16, 32, 2, 8, 2 * L, 2 * L, init_scale=2.0, scan_layers=True,
    tie_embeddings=False, switch=SwitchConfig(E, every=2),
)  # fmt: skip
INPUTS = [[3, 4, 5, 8], [6, 2, 7, 8], [5, 5, 2], [11, 4, 4]]


@functools.cache
def model(bits: int | None):
    params = init_params(MODEL, jax.random.key(7))
    if bits is None:
        return MODEL, params
    return quantize_experts(MODEL, params, bits=bits)[:2]


def written(config, params, beam_size: int, experts=None):
    decoding = DecodingConfig(T, beam_size=beam_size, eos_id=-1, pruning="none")
    generator = Generator(for_decoding(config), params, decoding, 4, experts=experts)
    return [[each.tokens for each in said] for _, said in sorted(generator(INPUTS))]


@functools.cache
def resident(bits: int | None, beam_size: int):
    return written(*model(bits), beam_size)


def copied_bytes(jaxpr) -> int:
    """Bytes of `device_put` in a traced program, of loops as often as they turn."""
    total = 0
    for equation in jaxpr.eqns:
        times = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        if equation.primitive.name == "device_put":
            total += sum(var.aval.size * var.aval.dtype.itemsize for var in equation.outvars)
        for value in equation.params.values():
            if hasattr(value, "jaxpr"):
                total += times * copied_bytes(value.jaxpr)
    return total


CASES = [(None, 1, 3), (4, 2, 2), (None, 1, 2), (8, 1, 4), (4, 1, L), (None, 2, L)]


@pytest.mark.parametrize(
    "bits, beam_size, slots",
    [pytest.param(*case, marks=[SLOW] * (case not in CASES[:2])) for case in CASES],
)
def test_tokens_are_those_of_the_resident_model(bits, beam_size, slots):
    ring = RingExperts(*model(bits), slots)
    found = written(ring.config, ring.params, beam_size, ring)
    assert found == resident(bits, beam_size)
    traffic = ring.traffic
    layer = traffic.expert_bytes // (2 * L)
    assert traffic.device_bytes == 2 * slots * layer
    # The encoder and the prompt once, then the decoder's step for each token after the first.
    streamed = L - slots + 2
    assert traffic.moved_bytes == streamed * layer * (traffic.calls + 1)
    assert "a ring of" in str(traffic)
