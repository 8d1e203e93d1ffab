# SPDX-License-Identifier: Apache-2.0
"""The router: logits in float32, the experts that a token chooses, and their gates.

Fedus et al. 2021 (arXiv:2101.03961), section 2.1 eq. 1-2, section 2.4 (float32); Lepikhin et
al. 2020 (arXiv:2006.16668), algorithm 1, for k = 2. Dims: G T D E S

Exploration: how a router tries experts that it does not think best.

Fedus et al. 2021 (arXiv:2101.03961), appendix C: argmax, sampling from the softmax, input
dropout, input jitter (the paper's choice). Dims: G T D E

Hash routing: a token's id decides its expert, and nothing is learned.

Roller et al. 2021 (arXiv:2106.04426), section 3, random hash: the same word goes to the same
expert in every place and layer. Dims: G T E
"""

import jax
import jax.numpy as jnp

from switchx.layers.dropout import dropout


def router_logits(x_GTD, w_router_DE, *, dtype="float32"):
    """Router logits `[G, T, E]`, computed in `dtype` whatever the activations are."""
    return jnp.einsum("GTD,DE->GTE", x_GTD.astype(dtype), w_router_DE.astype(dtype))


def choose_experts(score_GTE, num_selected: int):
    """int32 indices of the highest scores, the highest first, ties to the lower index."""
    score_GTE = jax.lax.stop_gradient(score_GTE)
    if num_selected == 1:
        return jnp.argmax(score_GTE, axis=-1, keepdims=True).astype(jnp.int32)
    return jax.lax.top_k(score_GTE, num_selected)[1].astype(jnp.int32)


def chosen_gates(prob_GTE, expert_GTS, convention: str = "softmax"):
    """Weight of each chosen expert's output, with the router's gradient.

    Args:
        expert_GTS: int32; a choice of none (`num_experts`) has a gate of 0.
        convention: `softmax`, the expert's probability under the softmax over all experts
            (Switch); `normalized`, divided by the sum over the chosen ones (GShard).
            Normalized over one chosen expert it would be 1, without a gradient.
    """

    def gate_of(expert_GT):  # a sum over a mask, not a gather: its gradient is no scatter
        is_expert_GTE = jax.nn.one_hot(expert_GT, prob_GTE.shape[-1], dtype=jnp.bool_)
        return jnp.sum(jnp.where(is_expert_GTE, prob_GTE, 0.0), axis=-1)

    gates = [gate_of(expert_GTS[..., s]) for s in range(expert_GTS.shape[-1])]
    gate_GTS = jnp.stack(gates, axis=-1)
    if convention == "softmax":
        return gate_GTS
    # The floor keeps a token that chooses nothing at 0.
    return gate_GTS / jnp.maximum(jnp.sum(gate_GTS, axis=-1, keepdims=True), 1e-9)


def jitter_inputs(x, jitter: float, *, key: jax.Array | None):
    """Multiplies by U[1-jitter, 1+jitter]; a key of None (evaluation) changes nothing."""
    if key is None or jitter == 0.0:
        return x
    return x * jax.random.uniform(key, x.shape, x.dtype, 1.0 - jitter, 1.0 + jitter)


def explored_inputs(router, x_GTD, *, key: jax.Array | None):
    """The router's inputs with the noise that a `RouterConfig` asks for.

    Local to the router: the experts never see it.
    """
    if router.exploration == "jitter":
        return jitter_inputs(x_GTD, router.jitter, key=key)
    if router.exploration == "dropout":
        return dropout(x_GTD, router.input_dropout_rate, key=key)
    return x_GTD


def sampling_scores(logits_GTE, temperature: float, *, key: jax.Array):
    """Scores whose largest are a sample from softmax(logits / temperature).

    Logits plus Gumbel noise: the largest is one draw, the k largest are k draws without
    replacement (Kool et al. 2019, arXiv:1903.06059).
    """
    noise_GTE = jax.random.gumbel(key, logits_GTE.shape, logits_GTE.dtype)
    return logits_GTE / temperature + noise_GTE


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
