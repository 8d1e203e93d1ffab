# SPDX-License-Identifier: Apache-2.0
"""What TUPE's positions add to the scores of one step of decoding.

Their queries and keys are projected once, before the loop; a step takes the row of the newest
tokens' positions. Dims: B L M P H K
"""

import jax.numpy as jnp

from switchx.inference.config import DecodingConfig


def untied_projections(model, prompt_length: int, decoding: DecodingConfig):
    """`query_MHK`, `key_MHK` of all positions that a step may meet; None without TUPE."""
    if not model.decoder.config.has_untied_positions:
        return None
    # A padded prompt has more places than the text has positions.
    return model.decoder.untied_positions.projected(prompt_length + decoding.max_new_tokens)


def row_bias_of_step(untied, is_prompt_BP, step, decoding: DecodingConfig):
    """The bias of step `step`'s queries for all places of the cache, `[B, H, 1, P + T * L]`.

    Args:
        untied: of `untied_projections`.
        is_prompt_BP: which places of the prompt are text: it ends at the last place.
    """
    if untied is None:
        return None
    query_MHK, key_MHK = untied
    P = is_prompt_BP.shape[1]
    num_prompt_B = jnp.sum(is_prompt_BP, axis=1)
    query_BHK = jnp.take(query_MHK, num_prompt_B + step, axis=0, mode="clip")
    score_BHM = jnp.einsum(
        "BHK,MHK->BHM", query_BHK, key_MHK, preferred_element_type=jnp.float32
    )
    # From positions to places: the text begins where its padding on the left ends.
    place_1M = jnp.arange(P + decoding.max_new_tokens)[None]
    position_BM = jnp.maximum(place_1M - (P - num_prompt_B)[:, None], 0)
    bias_BHM = jnp.take_along_axis(score_BHM, position_BM[:, None], axis=2, mode="clip")
    new_BHM = jnp.repeat(bias_BHM[:, :, P:], decoding.beam_size, axis=2)
    return jnp.concatenate([bias_BHM[:, :, :P], new_BHM], axis=2)[:, :, None]
