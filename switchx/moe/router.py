# SPDX-License-Identifier: Apache-2.0
"""The router: logits in float32, their scores, exploration noise, and hash routing.

Fedus et al. 2021 (arXiv:2101.03961), section 2.1 eq. 1, section 2.4 (float32), appendix C
(exploration: argmax, sampling from the softmax, input dropout, input jitter, which the paper
chose); Roller et al. 2021 (arXiv:2106.04426), section 3 (random hash).
Dims: G groups, T tokens of a group, D model, E experts
"""

import functools

import jax
import jax.numpy as jnp

from switchx.layers.dropout import dropout
from switchx.partitioning.replicas import random_rows


def router_logits(x_GTD, w_router_DE, *, dtype="float32"):
    """The router's logits `[G, T, E]` (eq. 1), computed in `dtype` whatever the inputs' dtype.

    The product has the highest precision: by default accelerators multiply float32 as bfloat16
    or TF32.
    """
    x_GTD, w_router_DE = x_GTD.astype(dtype), w_router_DE.astype(dtype)
    return jnp.einsum("GTD,DE->GTE", x_GTD, w_router_DE, precision=jax.lax.Precision.HIGHEST)


def router_scores(score: str, logits_GTE):
    """The scores of experts, by the function that `RouterConfig.score` names."""
    if score == "softmax":
        return jax.nn.softmax(logits_GTE, axis=-1)
    if score == "sigmoid":
        return jax.nn.sigmoid(logits_GTE)
    # Below -20 it is exp(z / 2) to the last bit of float32; the root's derivative would be
    # infinite times 0 where softplus underflows.
    root_GTE = jnp.sqrt(jax.nn.softplus(jnp.maximum(logits_GTE, -20.0)))
    return jnp.where(logits_GTE < -20.0, jnp.exp(logits_GTE / 2), root_GTE)


def normalized_scores(score: str, score_GTE, *, counts_merged: bool = False):
    """Scores over their sum: the probabilities that balance losses and statistics use.

    Those of a softmax sum to one, except where merged experts count several times, or copies in
    part: there, a common change of all counts would change only the sum.
    """
    if score == "softmax" and not counts_merged:
        return score_GTE
    floor = jnp.finfo(score_GTE.dtype).tiny
    return score_GTE / jnp.maximum(jnp.sum(score_GTE, axis=-1, keepdims=True), floor)


def explored_inputs(router, x_GTD, *, key: jax.Array | None):
    """The router's inputs with the noise that a `RouterConfig` asks for.

    Only the router sees the noise; the experts do not. A key of None (evaluation) adds none.
    """
    if router.exploration == "jitter" and key is not None and router.jitter:
        low, high = 1.0 - router.jitter, 1.0 + router.jitter
        draw = functools.partial(jax.random.uniform, dtype=x_GTD.dtype, minval=low, maxval=high)
        return x_GTD * random_rows(draw, key, x_GTD.shape)
    if router.exploration == "dropout":
        return dropout(x_GTD, router.input_dropout_rate, key=key)
    return x_GTD


def sampling_scores(logits_GTE, temperature: float, *, key: jax.Array):
    """Scores whose largest are a sample from softmax(logits / temperature).

    They are the logits plus Gumbel noise: the largest is one draw, the k largest are k draws
    without replacement (Kool et al. 2019, arXiv:1903.06059).
    """
    draw = functools.partial(jax.random.gumbel, dtype=logits_GTE.dtype)
    noise_GTE = random_rows(draw, key, logits_GTE.shape)
    return logits_GTE / temperature + noise_GTE


# Logit of the experts that a token may not have: their probability is exactly 0.
NEVER = -1e9


def hash_expert(token, num_experts: int):
    """The int32 expert of each token id: a 32-bit hash of the id, modulo `num_experts`.

    The hash is the finalizer of MurmurHash3 (Appleby, public domain). It spreads neighbouring
    ids over the experts; vocabularies sort ids by frequency.
    """
    bits = token.astype(jnp.uint32)
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    bits = bits ^ (bits >> 16)
    return (bits % jnp.uint32(num_experts)).astype(jnp.int32)


def task_logits(logits_GTE, task_GT, num_tasks: int):
    """The logits, with `NEVER` for the experts of other tasks, where the gradient is 0.

    Task t has experts `t E / num_tasks` to `(t + 1) E / num_tasks - 1`.
    """
    E = logits_GTE.shape[-1]
    index_GTE = jax.lax.broadcasted_iota(task_GT.dtype, logits_GTE.shape, 2)
    is_own_GTE = index_GTE // (E // num_tasks) == task_GT[..., None]
    return jnp.where(is_own_GTE, logits_GTE, NEVER)


def hash_logits(token_GT, num_experts: int):
    """Logits `[G, T, E]` of hash routing: 0 for each token's expert, `NEVER` for all others.

    With them a hash is routed and measured as any router is: gate 1, entropy 0, z-loss 0.
    """
    expert_GT = hash_expert(token_GT, num_experts)
    is_expert_GTE = jax.nn.one_hot(expert_GT, num_experts, dtype=jnp.bool_)
    return jnp.where(is_expert_GTE, 0.0, NEVER)
