# SPDX-License-Identifier: Apache-2.0
"""Hash routing: a token's id decides its expert, and nothing is learned.

Roller et al. 2021 (arXiv:2106.04426), section 3, random hash: the same word goes to the same
expert in every place and layer. Dims: G T E
"""

import jax
import jax.numpy as jnp

# Logit of all experts but the token's own: its probability is 1, and 0 elsewhere, exactly.
NEVER = -1e9


def hash_expert(token, num_experts: int):
    """int32 expert of each token id: a 32-bit mixture of its bits, modulo `num_experts`.

    The mixture is the finalizer of MurmurHash3 (Appleby, public domain), under which
    neighbouring ids, which vocabularies sort by frequency, are spread.
    """
    bits = token.astype(jnp.uint32)
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    bits = bits ^ (bits >> 16)
    return (bits % jnp.uint32(num_experts)).astype(jnp.int32)


def hash_logits(token_GT, num_experts: int):
    """Logits `[G, T, E]` that are certain of each token's expert: 0 there, `NEVER` elsewhere.

    So a hash is routed, counted and measured as any router is: gate 1, entropy 0, z-loss 0.
    """
    expert_GT = hash_expert(token_GT, num_experts)
    is_expert_GTE = jax.nn.one_hot(expert_GT, num_experts, dtype=jnp.bool_)
    return jnp.where(is_expert_GTE, 0.0, NEVER)
