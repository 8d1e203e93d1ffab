# SPDX-License-Identifier: Apache-2.0
"""Models with a few slots for experts, and what they write."""

import functools

from switchx.inference.config import DecodingConfig
from switchx.inference.generate import Generator, for_decoding
from switchx.inference.offload.chosen_experts import ChosenExperts, on_host
from switchx.models.config import ModelConfig, SwitchConfig
from switchx.moe.config import RouterConfig
from tests.inference import tiny
from tests.inference.tiny import trained
from tests.models.batches import GPT_STYLE

V, E, T = 12, 4, 5
# Sparse blocks in both stacks, two experts a token, stacked layers.
ENCODER_DECODER = ModelConfig(
    "encoder_decoder", V, 16, 32, 2, 8, 1, 1, init_scale=4.0, scan_layers=True,
    switch=SwitchConfig(E, every=1, router=RouterConfig(num_selected=2)),
)  # fmt: skip
# Of logits that are not sharp, so that texts ask for experts again.
GPT = ModelConfig(
    "decoder_only", V, 16, 32, 2, 8, 2, max_length=32, init_scale=4.0,
    switch=SwitchConfig(E, every=1, expert_bias=True),
    **GPT_STYLE | {"scale_tied_logits": True},
)  # fmt: skip
MODELS = {"encoder-decoder": ENCODER_DECODER, "gpt": GPT}
INPUTS = [[3, 4, 5, 8], [6, 2, 7, 8], [5, 5, 2], [11, 4, 4]]


def model(name: str, bits: int | None):
    """(config, params) of a resident model."""
    return trained(bits, MODELS[name], seed=44)


def decoding(beam_size: int) -> DecodingConfig:
    # One batch to its end: few programs.
    return DecodingConfig(T, beam_size=beam_size, pruning="experts")


@functools.cache
def resident(name: str, bits: int | None, beam_size: int):
    config, params = model(name, bits)
    return written(Generator(for_decoding(config), params, decoding(beam_size), 4))


def written(generator):
    return tiny.written(generator, INPUTS)


def with_slots(name: str, bits: int | None, slots: int, policy="lru"):
    config, params = on_host(*model(name, bits))
    return config, ChosenExperts(config, params, slots, policy)


def generator(config, experts, beam_size: int):
    return Generator(
        for_decoding(config), experts.params, decoding(beam_size), 4, experts=experts
    )
