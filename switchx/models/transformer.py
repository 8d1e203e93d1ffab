# SPDX-License-Identifier: Apache-2.0
"""The Transformer, encoder-decoder or decoder-only, dense or with Switch layers.

Raffel et al. 2020 (arXiv:1910.10683) and Fedus et al. 2021 (arXiv:2101.03961) for T5's form;
Pipeline MoE (arXiv:2304.11414) and SE-MoE (arXiv:2205.10034) use GPT's.
Dims: B batch, L length, M memory, D model, V vocabulary
"""

import jax
from flax import nnx

from switchx.layers.attention import causal_mask, segment_mask
from switchx.layers.dense import split_key
from switchx.layers.embedding import Embedding
from switchx.models.block import BlockInputs
from switchx.models.stack import Stack
from switchx.moe.replay import given_choices
from switchx.moe.stats import join_stacks


class Transformer(nnx.Module):
    """`logits_BLV, stats = model(batch, is_training=...)`."""

    def __init__(self, config, *, key):
        self.has_encoder = config.is_encoder_decoder
        keys = jax.random.split(key, 3 if self.has_encoder else 2)
        self.embedding = Embedding(config, key=keys[0])
        if self.has_encoder:
            self.encoder = Stack(config, "encoder", key=keys[1])
        self.decoder = Stack(config, "decoder", key=keys[-1])

    def __call__(self, batch: dict, *, is_training: bool, key=None):
        """Logits `[B, L, V]` and the statistics of `activations`."""
        y_BLD, stats = self.activations(batch, is_training=is_training, key=key)
        return self.embedding.logits(y_BLD), stats

    def activations(self, batch: dict, *, is_training: bool, key=None):
        """The logits' inputs, `[B, L, D]`, and the statistics of Switch layers, encoder first.

        Args:
            batch: T5X's feature names, as `data/features.py` makes them; where a decoder-only
                model's `decoder_prefix_mask` is 1, attention is bidirectional, and without it
                it is causal; `task_ids` `[B]` where experts are divided among tasks;
                `encoder_replay`, `decoder_replay` `[B, L, N, S]` where choices are
                replayed (`moe/replay.py`).
        """
        memory_BMD, encoder_stats = None, None
        if self.has_encoder:
            key_encoder, key = split_key(key, 2)
            memory_BMD, encoder_stats = self.encode(
                batch["encoder_input_tokens"],
                batch["encoder_segment_ids"],
                batch["encoder_positions"],
                batch.get("task_ids"),
                given_choices(self.encoder.config, batch, "encoder"),
                is_training=is_training,
                key=key_encoder,
            )
        x_BLD = self.embedding.embed(batch["decoder_input_tokens"], batch["decoder_positions"])
        inputs = self.decoder_inputs(batch, memory_BMD)
        y_BLD, stats = self.decoder(x_BLD, inputs, is_training=is_training, key=key)
        return y_BLD, join_stacks(encoder_stats, stats)

    def encode(
        self,
        tokens_BL,
        segment_BL,
        position_BL,
        task_B=None,
        replay_BLNS=None,
        *,
        is_training=False,
        key=None,
    ):
        """The encoder's output `[B, L, D]` and its routing statistics."""
        inputs = self.encoder_inputs(tokens_BL, segment_BL, position_BL, task_B, replay_BLNS)
        x_BLD = self.embedding.embed(tokens_BL, position_BL, "encoder")
        return self.encoder(x_BLD, inputs, is_training=is_training, key=key)

    def encoder_inputs(
        self, tokens_BL, segment_BL, position_BL, task_B=None, replay_BLNS=None
    ) -> BlockInputs:
        """The inputs of every encoder block."""
        mask_BLM = segment_mask(segment_BL, segment_BL)
        others = dict(task_B=task_B, replay_BLNS=replay_BLNS)
        return self.encoder.inputs(tokens_BL, segment_BL, position_BL, mask_BLM, **others)

    def decoder_inputs(self, batch: dict, memory_BMD=None) -> BlockInputs:
        """The inputs of every decoder block."""
        segment_BL, prefix_mask_BL = batch["decoder_segment_ids"], None
        memory_mask_BLM = causal_segment_BL = None
        if self.has_encoder:
            memory_mask_BLM = segment_mask(segment_BL, batch["encoder_segment_ids"])
        else:
            prefix_mask_BL = batch.get("decoder_prefix_mask")
            if prefix_mask_BL is None and self.decoder.config.may_skip_scores:
                causal_segment_BL = segment_BL
        return self.decoder.inputs(
            batch["decoder_input_tokens"],
            segment_BL,
            batch["decoder_positions"],
            causal_mask(segment_BL, prefix_mask_BL),
            memory_BMD=memory_BMD,
            memory_mask_BLM=memory_mask_BLM,
            causal_segment_BL=causal_segment_BL,
            task_B=batch.get("task_ids"),
            replay_BLNS=given_choices(self.decoder.config, batch, "decoder"),
        )
