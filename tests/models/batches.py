# SPDX-License-Identifier: Apache-2.0
"""Small fixed batches for model tests, packed and with padding, and a layer on one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from switchx.models.config import ModelConfig
from switchx.models.params import bind
from switchx.moe.layer import SwitchFFN

# What GPT's blocks have where T5's have not; the table's rows, `max_length`, are a test's own.
GPT_STYLE = dict(
    activation="gelu", norm="layer", positions="learned", use_bias=True, scale_attention=True,
    scale_tied_logits=False,
)  # fmt: skip


def segments(rows):
    """`[[3, 4], [5]]` with lengths per row -> segment ids and positions, zero-padded."""
    length = max(sum(row) for row in rows) + 1
    segment_BL = np.zeros((len(rows), length), np.int32)
    position_BL = np.zeros_like(segment_BL)
    for b, row in enumerate(rows):
        start = 0
        for i, size in enumerate(row):
            segment_BL[b, start : start + size] = i + 1
            position_BL[b, start : start + size] = np.arange(size)
            start += size
    return segment_BL, position_BL


def make_batch(
    vocab_size: int, *, is_encoder_decoder: bool, seed=0, sizes=([[4, 3], [6]], [[5, 4], [8]])
) -> dict:
    """Two rows, the first with two packed examples; or of other sizes, the decoder's first."""
    rng = np.random.default_rng(seed)

    def tokens(segment_BL):
        return (rng.integers(3, vocab_size, segment_BL.shape) * (segment_BL > 0)).astype(
            np.int32
        )

    segment_BL, position_BL = segments(sizes[0])
    target_BL = tokens(segment_BL)
    shifted_BL = np.roll(target_BL, 1, axis=1) * (position_BL > 0)
    batch = {
        "decoder_input_tokens": shifted_BL.astype(np.int32),
        "decoder_target_tokens": target_BL,
        "decoder_loss_weights": (segment_BL > 0).astype(np.float32),
        "decoder_segment_ids": segment_BL,
        "decoder_positions": position_BL,
    }
    if not is_encoder_decoder:
        return batch | {"decoder_prefix_mask": np.zeros_like(segment_BL)}
    segment_BM, position_BM = segments(sizes[1])
    return batch | {
        "encoder_input_tokens": tokens(segment_BM),
        "encoder_segment_ids": segment_BM,
        "encoder_positions": position_BM,
    }


@functools.partial(jax.jit, static_argnums=0)
def layer_of(config: ModelConfig, params: dict):
    """What the last block's Switch layer makes of a fixed input."""
    layer: SwitchFFN = bind(config, params).decoder.blocks.blocks[-1].ffn
    shape = (3, 5, config.d_model)
    x_BLD = jnp.asarray(np.random.default_rng(7).normal(size=shape), jnp.float32)
    return layer(x_BLD, jnp.ones((3, 5), bool), is_training=False)[0]
