# SPDX-License-Identifier: Apache-2.0
"""The rows of a batch in decoding, and how each chooses its next token: greedily, or a sample.

Top-k: Fan et al. 2018 (arXiv:1805.04833); top-p: Holtzman et al. 2020 (arXiv:1904.09751).
Dims: B batch, L hypotheses of a sentence (1 here), T new tokens, V vocabulary, J candidates; C
blocks of the vocabulary, X numbers of a block
"""

import dataclasses

import jax
import jax.numpy as jnp

from switchx.inference.config import DecodingConfig

EXCLUDED = -1e9
BLOCK = 128  # numbers of a block of `top_k`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowSettings:
    """What each sentence asks for by itself, where a batch is of different people's.

    They are fields of `DecodingConfig`, as numbers of the compiled program instead of
    constants: another seed or temperature compiles nothing.

    Attributes:
        seed_B: int32.
        temperature_B: float32, above 0; read where the configuration samples.
        top_k_B: int32; the vocabulary's size, or more, for all tokens.
        top_p_B: float32; 1 for all tokens.
        length_penalty_B: float32.
    """

    seed_B: jax.Array
    temperature_B: jax.Array
    top_k_B: jax.Array
    top_p_B: jax.Array
    length_penalty_B: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """One sentence a row.

    Attributes:
        sentence_B: its number; -1 of rows that fill the batch up.
        is_live_B: false for finished sentences and for rows that fill up.
        max_new_tokens_B: most new tokens of each sentence.
        settings: of each sentence; None where all have the configuration's.
    """

    sentence_B: jax.Array
    is_live_B: jax.Array
    max_new_tokens_B: jax.Array
    settings: RowSettings | None = None

    def length_penalty_B(self, config: DecodingConfig) -> jax.Array:
        """float32; how long texts are weighed, see `DecodingConfig.length_penalty`."""
        if self.settings is not None:
            return self.settings.length_penalty_B
        return jnp.full(self.max_new_tokens_B.shape, config.length_penalty, jnp.float32)


def next_token(logits_BV, key_B, config: DecodingConfig, settings: RowSettings | None = None):
    """The chosen token of each row and its log-probability under the model.

    Args:
        logits_BV: float32.
        key_B: a key a row; read where the configuration samples.
        settings: of each row, instead of the configuration's numbers.

    Returns:
        token_B (int32), log_prob_B (of the softmax without temperature or exclusions).
    """
    if config.is_sampling and settings is not None:
        warm_BV = logits_BV / settings.temperature_B[:, None]
        likely_BV = likely_logits_by_row(warm_BV, settings.top_k_B, settings.top_p_B)
        token_B = jax.vmap(jax.random.categorical)(key_B, likely_BV)
    elif config.is_sampling:
        likely_BV = likely_logits(logits_BV / config.temperature, config.top_k, config.top_p)
        token_B = jax.vmap(jax.random.categorical)(key_B, likely_BV)
    else:
        token_B = top_k(logits_BV, 1)[1][:, 0]
    token_B = token_B.astype(jnp.int32)
    # Of one token alone: nothing of the size of the vocabulary is written.
    chosen_B = jnp.take_along_axis(logits_BV, token_B[:, None], axis=-1)[:, 0]
    return token_B, chosen_B - jax.nn.logsumexp(logits_BV, axis=-1)


def top_k(x_BV, k: int):
    """`jax.lax.top_k`: values and int32 places, equal ones in the order of places.

    The k largest are in the k blocks of the largest maxima, so the others are not sorted. That
    earns 7% of a greedy decode step and 10% of one with 4 beams on a CPU, whose sort takes a
    row's numbers one after the other; the code is the same everywhere.
    """
    B, V = x_BV.shape
    num_blocks = V // BLOCK
    if V % BLOCK or num_blocks <= 2 * k:
        return jax.lax.top_k(x_BV, k)
    x_BCX = x_BV.reshape(B, num_blocks, BLOCK)
    block_BC = jnp.sort(jax.lax.top_k(jnp.max(x_BCX, axis=2), k)[1], axis=1)
    candidate_BCX = jnp.take_along_axis(x_BCX, block_BC[:, :, None], axis=1)
    value_BJ, index_BJ = jax.lax.top_k(candidate_BCX.reshape(B, k * BLOCK), k)
    block_BJ = jnp.take_along_axis(block_BC, index_BJ // BLOCK, axis=1)
    return value_BJ, block_BJ * BLOCK + index_BJ % BLOCK


def likely_logits(logits_BV, most: int | None, top_p: float | None):
    """The logits with unlikely tokens at -1e9: first all but k, then all but those of p.

    A token stays in top-p while the likelier ones together have less than p, so the first
    always stays; of equals at the edge, all stay.
    """
    V = logits_BV.shape[-1]
    if most is not None and most < V:
        least_B1 = top_k(logits_BV, most)[0][:, -1:]
        logits_BV = jnp.where(logits_BV < least_B1, EXCLUDED, logits_BV)
    if top_p is not None and top_p < 1:
        sorted_BV = -jnp.sort(-logits_BV, axis=-1)
        prob_BV = jax.nn.softmax(sorted_BV, axis=-1)
        before_BV = jnp.cumsum(prob_BV, axis=-1) - prob_BV
        least_B1 = jnp.min(
            jnp.where(before_BV < top_p, sorted_BV, jnp.inf), axis=-1, keepdims=True
        )
        logits_BV = jnp.where(logits_BV < least_B1, EXCLUDED, logits_BV)
    return logits_BV


def likely_logits_by_row(logits_BV, top_k_B, top_p_B):
    """`likely_logits` where each row has its own k and p: it sorts, whatever they are."""
    sorted_BV = -jnp.sort(-logits_BV, axis=-1)
    place_B1 = jnp.clip(top_k_B - 1, 0, logits_BV.shape[-1] - 1)[:, None]
    least_B1 = jnp.take_along_axis(sorted_BV, place_B1, axis=-1)
    sorted_BV = jnp.where(sorted_BV < least_B1, EXCLUDED, sorted_BV)
    prob_BV = jax.nn.softmax(sorted_BV, axis=-1)
    before_BV = jnp.cumsum(prob_BV, axis=-1) - prob_BV
    top_p_B1 = top_p_B[:, None]
    # Of a row with p = 1, rounding may let the sum reach it too soon.
    is_kept_BV = (before_BV < top_p_B1) | (top_p_B1 >= 1)
    least_of_p_B1 = jnp.min(jnp.where(is_kept_BV, sorted_BV, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits_BV < jnp.maximum(least_B1, least_of_p_B1), EXCLUDED, logits_BV)


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
        key_B = _sample_keys(step, rows, config) if config.is_sampling else None
        token_B, log_prob_B = next_token(logits_BLV[:, 0], key_B, config, rows.settings)
        token_B = jnp.where(rows.is_live_B, token_B, config.pad_id)
        chosen = Greedy(
            jax.lax.dynamic_update_slice_in_dim(self.token_BT, token_B[:, None], step, axis=1),
            self.log_prob_B + jnp.where(rows.is_live_B, log_prob_B, 0),
            self.length_B + rows.is_live_B,
        )
        is_live_B = (
            rows.is_live_B & (token_B != config.eos_id) & (step + 1 < rows.max_new_tokens_B)
        )
        return chosen, token_B[:, None], is_live_B

    def results(self, config: DecodingConfig, rows: Rows):
        """Of each sentence its hypotheses, the best first: token_BLT, score_BL."""
        length_B = jnp.maximum(self.length_B, 1).astype(jnp.float32)
        score_B = self.log_prob_B / length_B ** rows.length_penalty_B(config)
        return self.token_BT[:, None], score_B[:, None]


def _sample_keys(step, rows: Rows, config: DecodingConfig):
    """A key a row: of the seed, the step and the sentence's number alone."""
    seed = config.seed if rows.settings is None else rows.settings.seed_B
    seed_B = jnp.broadcast_to(jnp.int32(seed), rows.sentence_B.shape)

    def key_of(seed, sentence):
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), sentence)

    return jax.vmap(key_of)(seed_B, rows.sentence_B)
