# SPDX-License-Identifier: Apache-2.0
"""The next token of a sentence: the likeliest, or a sample of the likelier ones.

Top-k: Fan et al. 2018 (arXiv:1805.04833); top-p: Holtzman et al. 2020 (arXiv:1904.09751).
Dims: B V
"""

import jax
import jax.numpy as jnp

from switchx.inference.decoding_config import DecodingConfig
from switchx.inference.largest import argmax
from switchx.inference.rows import RowSettings

EXCLUDED = -1e9


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
        token_B = argmax(logits_BV)
    token_B = token_B.astype(jnp.int32)
    # Of one token alone: nothing of the size of the vocabulary is written.
    chosen_B = jnp.take_along_axis(logits_BV, token_B[:, None], axis=-1)[:, 0]
    return token_B, chosen_B - jax.nn.logsumexp(logits_BV, axis=-1)


def likely_logits(logits_BV, top_k: int | None, top_p: float | None):
    """The logits with unlikely tokens at -1e9: first all but k, then all but those of p.

    A token stays in top-p while the likelier ones together have less than p, so the first
    always stays; of equals at the edge, all stay.
    """
    V = logits_BV.shape[-1]
    if top_k is not None and top_k < V:
        least_B1 = jax.lax.top_k(logits_BV, top_k)[0][:, -1:]
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
    logits_BV = jnp.where(logits_BV < least_B1, EXCLUDED, logits_BV)
    return jnp.where(logits_BV < least_of_p_B1, EXCLUDED, logits_BV)
