# SPDX-License-Identifier: Apache-2.0
"""Auxiliary losses of a router. Their weights and their sum stand in `training/losses.py`.

Dims: G T E
"""

import jax
import jax.numpy as jnp


def balance_loss(prob_GTE, count_GE, is_token_GT):
    """E * sum_e f_e P_e of every group, averaged over the groups that have tokens.

    Fedus et al. 2021 (arXiv:2101.03961), eq. 4-6: f_e is the share of tokens whose choice
    is e (before capacity), P_e the mean router probability of e. 1 when both are uniform;
    only P carries a gradient.
    """
    num_experts = prob_GTE.shape[-1]
    tokens_G = jnp.sum(is_token_GT, axis=-1).astype(prob_GTE.dtype)
    safe_tokens_G = jnp.maximum(tokens_G, 1)[:, None]
    share_GE = jax.lax.stop_gradient(count_GE.astype(prob_GTE.dtype)) / safe_tokens_G
    prob_GE = jnp.einsum("GTE,GT->GE", prob_GTE, is_token_GT.astype(prob_GTE.dtype))
    loss_G = num_experts * jnp.sum(share_GE * prob_GE / safe_tokens_G, axis=-1)
    return jnp.sum(loss_G) / jnp.maximum(jnp.sum(tokens_G > 0), 1).astype(prob_GTE.dtype)


def router_z_loss(logits_GTE, is_token_GT):
    """Mean over real tokens of logsumexp(logits)^2.

    Zoph et al. 2022 (arXiv:2202.08906), eq. 5.
    """
    is_token_GT = is_token_GT.astype(logits_GTE.dtype)
    log_z_GT = jax.nn.logsumexp(logits_GTE, axis=-1)
    return jnp.sum(log_z_GT**2 * is_token_GT) / jnp.maximum(jnp.sum(is_token_GT), 1)
