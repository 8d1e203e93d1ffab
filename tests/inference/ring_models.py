# SPDX-License-Identifier: Apache-2.0
"""A model whose experts are streamed through a ring, and what the whole model writes."""

import functools

from switchx.inference.config import DecodingConfig
from switchx.inference.generate import Generator, for_decoding
from switchx.models.config import ModelConfig, SwitchConfig
from tests.inference import tiny
from tests.inference.tiny import tokens, trained

E, L, T = 4, 3, 4
# L Switch layers in each of two stacks.
MODEL = ModelConfig(
    "encoder_decoder", 12, 16, 32, 2, 8, L, L, init_scale=2.0, scan_layers=True,
    tie_embeddings=False, switch=SwitchConfig(E, every=1),
)  # fmt: skip
INPUTS = [[3, 4, 5, 8], [6, 2, 7, 8], [5, 5, 2], [11, 4, 4]]


def model(bits: int | None, config: ModelConfig = MODEL):
    return trained(bits, config, seed=7)


def generator(config, params, beam_size: int, experts=None):
    decoding = DecodingConfig(T, beam_size=beam_size, eos_id=-1, pruning="none")
    return Generator(for_decoding(config), params, decoding, 4, experts=experts)


def written(*arguments):
    return tokens(tiny.written(generator(*arguments), INPUTS))


@functools.cache
def resident(bits: int | None, beam_size: int):
    return written(*model(bits), beam_size)
