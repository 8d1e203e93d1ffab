# SPDX-License-Identifier: Apache-2.0
"""A small sparse model that tests of decoding's parts share, and what it reads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from switchx.inference.config import DecodingConfig
from switchx.inference.decode import prefill
from switchx.inference.generate import for_decoding
from switchx.inference.logits_processors import Rows, RowSettings
from switchx.inference.quantize import quantize_experts
from switchx.models.config import ModelConfig, SwitchConfig
from switchx.models.params import init_params

V = 12
CONFIG = ModelConfig(
    "encoder_decoder", V, 16, 32, 4, 8, 1, 1, switch=SwitchConfig(4, every=1), init_scale=4.0
)
# For commands: its vocabulary has all bytes.
OF_BYTES = ModelConfig(
    "encoder_decoder", 384, 8, 8, 1, 8, 1, 1, switch=SwitchConfig(2, every=1)
)
# New tokens of each, so that they end at different steps.
ROOMS = [6, 2, 4, 3]
SOURCE_BM = jnp.array([[3, 4, 5, 8], [6, 2, 7, 0], [5, 5, 2, 0], [11, 4, 4, 3]])


@functools.cache
def trained(bits: int | None = None, config: ModelConfig = CONFIG, seed: int = 33, **options):
    """(config, params) as trained, or with experts of so many bits."""
    params = init_params(config, jax.random.key(seed))
    if bits is None:
        return config, params
    return quantize_experts(config, params, bits=bits, **options)[:2]


@functools.cache
def model():
    """(config, params) as decoding runs them."""
    return for_decoding(CONFIG), init_params(CONFIG, jax.random.key(44))


def written(generator, inputs, **options) -> list[list]:
    """What is written for each input, in their order: its hypotheses."""
    return [hypotheses for _, hypotheses in sorted(generator(inputs, **options))]


def tokens(said) -> list[list[list[int]]]:
    return [[each.tokens for each in hypotheses] for hypotheses in said]


def assert_same_texts(got, want, rtol: float = 1e-5) -> None:
    """The same tokens for each input, and scores that are close."""
    assert tokens(got) == tokens(want)
    scores = (
        [each.score for hypotheses in said for each in hypotheses] for said in (got, want)
    )
    np.testing.assert_allclose(*scores, rtol=rtol)


def start(decoding: DecodingConfig, of=None):
    """Four sentences before their first token, of `(config, params)`; None is `model()`."""
    config, params = model() if of is None else of
    return prefill(
        config,
        decoding.program_of(decoding.max_new_tokens),
        params,
        prompt_BP=jnp.zeros((4, 1), jnp.int32),
        is_prompt_BP=jnp.ones((4, 1), bool),
        rows=Rows(
            jnp.arange(4), jnp.ones(4, bool), jnp.array(ROOMS), RowSettings.of([decoding] * 4)
        ),
        source_BM=SOURCE_BM,
        is_source_BM=SOURCE_BM > 0,
    )
