# SPDX-License-Identifier: Apache-2.0
"""Hypotheses of greedy decoding and of sampling: one a sentence.

Dims: B L T V, where L is 1 and T the new tokens
"""

import dataclasses

import jax
import jax.numpy as jnp

from switchx.inference.decoding_config import DecodingConfig
from switchx.inference.rows import Rows
from switchx.inference.sampling import next_token


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Greedy:
    """What each sentence says so far.

    Attributes:
        token_BT: new tokens; `pad_id` after the end.
        log_prob_B: sum of their log-probabilities.
        length_B: how many, the end included.
    """

    token_BT: jax.Array
    log_prob_B: jax.Array
    length_B: jax.Array

    @classmethod
    def start(cls, batch: int, config: DecodingConfig) -> "Greedy":
        shape = (batch, config.max_new_tokens)
        return cls(
            jnp.full(shape, config.pad_id, jnp.int32),
            jnp.zeros(batch, jnp.float32),
            jnp.zeros(batch, jnp.int32),
        )

    @property
    def ancestor_BLT(self):
        """The place of a row's ancestor at each step: there is one place alone."""
        return jnp.zeros_like(self.token_BT)[:, None]

    def advance(self, logits_BLV, step, rows: Rows, config: DecodingConfig):
        """Chooses token number `step` of every live sentence.

        Returns:
            the hypotheses, token_BL, is_live_B.
        """
        key_B = None
        if config.is_sampling:
            key_B = _sample_keys(step, rows, config)
        token_B, log_prob_B = next_token(logits_BLV[:, 0], key_B, config, rows.settings)
        token_B = jnp.where(rows.is_live_B, token_B, config.pad_id)
        chosen = Greedy(
            jax.lax.dynamic_update_slice_in_dim(self.token_BT, token_B[:, None], step, axis=1),
            self.log_prob_B + jnp.where(rows.is_live_B, log_prob_B, 0),
            self.length_B + rows.is_live_B,
        )
        is_live_B = rows.is_live_B & (token_B != config.eos_id) & (step + 1 < rows.room_B)
        return chosen, token_B[:, None], is_live_B

    def results(self, config: DecodingConfig, rows: Rows):
        """Of each sentence its hypotheses, the best first: token_BLT, score_BL."""
        length_B = jnp.maximum(self.length_B, 1).astype(jnp.float32)
        score_B = self.log_prob_B / length_B ** rows.length_penalty_B(config)
        return self.token_BT[:, None], score_B[:, None]


def _sample_keys(step, rows: Rows, config: DecodingConfig):
    """A key a row: of the seed, the step and the sentence's number alone."""
    if rows.settings is None:
        seed_B = jnp.full(rows.sentence_B.shape, config.seed, jnp.int32)
    else:
        seed_B = rows.settings.seed_B

    def key_of(seed, sentence):
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), sentence)

    return jax.vmap(key_of)(seed_B, rows.sentence_B)
