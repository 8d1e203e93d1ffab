# SPDX-License-Identifier: Apache-2.0
"""The T5 encoder-decoder, dense or with Switch layers.

Raffel et al. 2020 (arXiv:1910.10683); Fedus et al. 2021 (arXiv:2101.03961).
Dims: B batch, L length, M memory, D model, V vocabulary
"""

import jax
from flax import nnx

from switchx.layers.dense import split_key
from switchx.layers.embedding import Embedding
from switchx.models.block import BlockInputs, causal_mask, segment_mask
from switchx.models.stack import Stack
from switchx.moe.stats import join_stacks


class EncoderDecoder(nnx.Module):
    """`logits_BLV, stats = model(batch, is_training=...)`."""

    def __init__(self, config, *, key):
        keys = jax.random.split(key, 3)
        self.embedding = Embedding(config, key=keys[0])
        self.encoder = Stack(
            config,
            num_layers=config.num_encoder_layers,
            is_decoder=False,
            has_memory=False,
            key=keys[1],
        )
        self.decoder = Stack(
            config,
            num_layers=config.num_decoder_layers,
            is_decoder=True,
            has_memory=True,
            key=keys[2],
        )

    def encode(self, tokens_BL, segment_BL, positions_BL, *, is_training=False, key=None):
        """The encoder's output `[B, L, D]` and its routing statistics."""
        inputs = self.encoder_inputs(tokens_BL, segment_BL, positions_BL)
        x_BLD = self.embedding.embed(tokens_BL, positions_BL)
        return self.encoder(x_BLD, inputs, is_training=is_training, key=key)

    def decode(
        self,
        tokens_BL,
        segment_BL,
        positions_BL,
        memory_BMD,
        memory_segment_BM,
        *,
        is_training=False,
        key=None,
    ):
        """Logits `[B, L, V]` of every decoder position, and the routing statistics."""
        inputs = self.decoder_inputs(
            tokens_BL, segment_BL, positions_BL, memory_BMD, memory_segment_BM
        )
        x_BLD = self.embedding.embed(tokens_BL, positions_BL)
        y_BLD, stats = self.decoder(x_BLD, inputs, is_training=is_training, key=key)
        return self.embedding.logits(y_BLD), stats

    def encoder_inputs(self, tokens_BL, segment_BL, positions_BL) -> BlockInputs:
        """What every encoder block reads."""
        length = tokens_BL.shape[1]
        return BlockInputs(
            is_token_BL=segment_BL > 0,
            mask_BLM=segment_mask(segment_BL, segment_BL),
            bias_HLM=self.encoder.position_bias(length, length),
            row_bias_BHLM=self.encoder.row_bias(positions_BL, positions_BL),
            token_BL=tokens_BL,
        )

    def decoder_inputs(
        self, tokens_BL, segment_BL, positions_BL, memory_BMD, memory_segment_BM
    ) -> BlockInputs:
        """What every decoder block reads."""
        length = tokens_BL.shape[1]
        return BlockInputs(
            is_token_BL=segment_BL > 0,
            mask_BLM=causal_mask(segment_BL),
            bias_HLM=self.decoder.position_bias(length, length),
            row_bias_BHLM=self.decoder.row_bias(positions_BL, positions_BL),
            memory_BMD=memory_BMD,
            memory_mask_BLM=segment_mask(segment_BL, memory_segment_BM),
            token_BL=tokens_BL,
        )

    def __call__(self, batch: dict, *, is_training: bool, key=None):
        """Logits `[B, L, V]` and statistics of all Switch layers, the encoder's first.

        Args:
            batch: T5X's feature names, as `data/features.py` makes them.
        """
        key_encoder, key_decoder = split_key(key, 2)
        memory_BMD, encoder_stats = self.encode(
            batch["encoder_input_tokens"],
            batch["encoder_segment_ids"],
            batch["encoder_positions"],
            is_training=is_training,
            key=key_encoder,
        )
        logits_BLV, decoder_stats = self.decode(
            batch["decoder_input_tokens"],
            batch["decoder_segment_ids"],
            batch["decoder_positions"],
            memory_BMD,
            batch["encoder_segment_ids"],
            is_training=is_training,
            key=key_decoder,
        )
        return logits_BLV, join_stacks(encoder_stats, decoder_stats)
