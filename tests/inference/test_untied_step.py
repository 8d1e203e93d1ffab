# SPDX-License-Identifier: Apache-2.0
"""A step's bias is the row that the whole text's would have, wherever padding stands."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from switchx.inference.config import DecodingConfig
from switchx.inference.untied_step import row_bias_of_step, untied_projections
from switchx.models.config import ModelConfig
from switchx.models.params import bind, init_params

CONFIG = ModelConfig(
    "decoder_only", 9, 6, 8, 2, 4, 1, positions="tupe", max_length=7, scale_attention=True
)
DECODING = DecodingConfig(max_new_tokens=3, beam_size=2)
# Of 4 and of 2 tokens: 7 and 5 positions with the new ones, in 4 + 3 places.
IS_PROMPT_BP = jnp.array([[True] * 4, [False, False, True, True]])


def test_a_step_s_bias_is_a_row_of_the_whole():
    model = bind(CONFIG, init_params(CONFIG, jax.random.key(0)))
    untied = untied_projections(model, 4, DECODING)
    position_1L = np.arange(7)[None]
    whole_HLM = model.decoder.row_bias(position_1L, position_1L)[0]
    for step in range(3):
        got = row_bias_of_step(untied, IS_PROMPT_BP, jnp.int32(step), DECODING)
        assert got.shape == (2, 2, 1, 4 + 3 * 2)
        for row, length in ((0, 4), (1, 2)):
            bias_HM = whole_HLM[:, length + step]
            prompt_HM, new_HM = bias_HM[:, :length], bias_HM[:, length : length + 3]
            np.testing.assert_allclose(got[row, :, 0, 4 - length : 4], prompt_HM, rtol=1e-5)
            for beam in (0, 1):
                np.testing.assert_allclose(got[row, :, 0, 4 + beam :: 2], new_HM, rtol=1e-5)


def test_other_positions_have_none():
    config = dataclasses.replace(CONFIG, positions="learned")
    model = bind(config, init_params(config, jax.random.key(0)))
    assert untied_projections(model, 4, DECODING) is None
    assert row_bias_of_step(None, IS_PROMPT_BP, jnp.int32(0), DECODING) is None
