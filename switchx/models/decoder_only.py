# SPDX-License-Identifier: Apache-2.0
"""The decoder-only model, in T5's style or in GPT's, dense or with Switch layers.

Pipeline MoE (arXiv:2304.11414) and SE-MoE (arXiv:2205.10034) use the GPT form.
Dims: B batch, L length, D model, V vocabulary
"""

import jax
from flax import nnx

from switchx.layers.embedding import Embedding
from switchx.models.block import BlockInputs, causal_mask
from switchx.models.stack import Stack


class DecoderOnly(nnx.Module):
    """`logits_BLV, stats = model(batch, is_training=...)`."""

    def __init__(self, config, *, key):
        key_embedding, key_decoder = jax.random.split(key)
        self.embedding = Embedding(config, key=key_embedding)
        self.decoder = Stack(
            config,
            num_layers=config.num_decoder_layers,
            is_decoder=True,
            has_memory=False,
            key=key_decoder,
        )

    def __call__(self, batch: dict, *, is_training: bool, key=None):
        """Logits `[B, L, V]` and the statistics of all Switch layers.

        Args:
            batch: T5X's feature names, as `data/features.py` makes them; where
                `decoder_prefix_mask` is 1, attention is bidirectional.
        """
        x_BLD = self.embedding.embed(batch["decoder_input_tokens"], batch["decoder_positions"])
        y_BLD, stats = self.decoder(
            x_BLD, self.decoder_inputs(batch), is_training=is_training, key=key
        )
        return self.embedding.logits(y_BLD), stats

    def decoder_inputs(self, batch: dict) -> BlockInputs:
        """What every block reads of a batch."""
        segment_BL = batch["decoder_segment_ids"]
        length, position_BL = segment_BL.shape[1], batch["decoder_positions"]
        return BlockInputs(
            is_token_BL=segment_BL > 0,
            mask_BLM=causal_mask(segment_BL, batch["decoder_prefix_mask"]),
            bias_HLM=self.decoder.position_bias(length, length),
            row_bias_BHLM=self.decoder.row_bias(position_BL, position_BL),
            token_BL=batch["decoder_input_tokens"],
        )
