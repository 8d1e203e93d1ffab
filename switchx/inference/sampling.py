# SPDX-License-Identifier: Apache-2.0
"""The next token of a sentence: the likeliest, or a sample of the likelier ones.

Top-k: Fan et al. 2018 (arXiv:1805.04833); top-p: Holtzman et al. 2020 (arXiv:1904.09751).
Dims: B V
"""

import jax
import jax.numpy as jnp

from switchx.inference.decoding_config import DecodingConfig

EXCLUDED = -1e9


def next_token(logits_BV, key_B, config: DecodingConfig):
    """The chosen token of each row and its log-probability under the model.

    Args:
        logits_BV: float32.
        key_B: a key a row; read where the configuration samples.

    Returns:
        token_B (int32), log_prob_B (of the softmax without temperature or exclusions).
    """
    if config.is_sampling:
        likely_BV = likely_logits(logits_BV / config.temperature, config.top_k, config.top_p)
        token_B = jax.vmap(jax.random.categorical)(key_B, likely_BV)
    else:
        token_B = jnp.argmax(logits_BV, axis=-1)
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
