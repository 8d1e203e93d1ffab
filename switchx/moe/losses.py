# SPDX-License-Identifier: Apache-2.0
"""Auxiliary losses of a router. Their weights and their sum stand in `training/losses.py`.

Dims: G T E
"""

import jax
import jax.numpy as jnp


def balance_loss(prob_GTE, count_GE, is_token_GT, *, scope: str = "group"):
    """E * sum_e f_e P_e of every group, averaged over the groups that have tokens.

    Fedus et al. 2021 (arXiv:2101.03961), eq. 4-6: f_e is the share of choices that are e
    (before capacity), P_e the mean router probability of e. 1 when both are uniform,
    whatever k is; flaxformer's and Hugging Face's is k times that. Only P carries a gradient.

    Args:
        count_GE: choices of each expert; a share of their sum.
        scope: `group`; or `batch`, all groups as one (Qiu et al. 2025, arXiv:2501.11873): an
            expert then may be busy in one group and idle in another.
    """
    if scope == "batch":
        prob_GTE, is_token_GT = (
            x.reshape(1, -1, *x.shape[2:]) for x in (prob_GTE, is_token_GT)
        )
        count_GE = jnp.sum(count_GE, axis=0, keepdims=True)
    num_experts, dtype = prob_GTE.shape[-1], prob_GTE.dtype
    tokens_G = jnp.sum(is_token_GT, axis=-1).astype(dtype)
    count_GE = jax.lax.stop_gradient(count_GE.astype(dtype))
    share_GE = count_GE / jnp.maximum(jnp.sum(count_GE, axis=-1, keepdims=True), 1)
    prob_GE = jnp.einsum("GTE,GT->GE", prob_GTE, is_token_GT.astype(dtype))
    mean_prob_GE = prob_GE / jnp.maximum(tokens_G, 1)[:, None]
    loss_G = num_experts * jnp.sum(share_GE * mean_prob_GE, axis=-1)
    return jnp.sum(loss_G) / jnp.maximum(jnp.sum(tokens_G > 0), 1).astype(dtype)


def router_z_loss(logits_GTE, is_token_GT):
    """Mean over real tokens of logsumexp(logits)^2.

    Zoph et al. 2022 (arXiv:2202.08906), eq. 5.
    """
    is_token_GT = is_token_GT.astype(logits_GTE.dtype)
    log_z_GT = jax.nn.logsumexp(logits_GTE, axis=-1)
    return jnp.sum(log_z_GT**2 * is_token_GT) / jnp.maximum(jnp.sum(is_token_GT), 1)
