# SPDX-License-Identifier: Apache-2.0
"""Quantile balancing: a selection bias that is computed so that experts get even loads.

Su 2025 (kexue.fm 11619). With S choices per token, an expert is chosen where its score s_te
exceeds alpha_t - b_e, alpha_t being the (S+1)-th largest biased score. So an expert gets its
even share of the tokens where b_e is the S/E quantile of the margins r_te = alpha_t - s_te.
A training step estimates it, with the bias that it chose by, for the next step:

`quantile` (Kimi K3 report, section 2.3.3, eq. 13-14; Megatron-LM pull request 6637): s are
scores from 0 to 1, and the quantile is that of the whole batch, by a histogram of `BINS` bins
per expert. Counts add up over microbatches and devices; quantiles do not.

`quantile_logits` (Megatron-LM pull request 5349; marin's grug): s are the router's logits. The
quantile of each routing group is exact, and the bias is the mean over groups, weighted by their
tokens. The chunks that are averaged there are microbatches of a device; here they are groups,
which do not depend on the mesh. There b_e is called -beta_e.

Both biases are shifted to a mean of 0. Dims: G routing groups, T tokens of a group, E experts,
W bins, N Switch layers or no dimension
"""

import jax
import jax.numpy as jnp

from switchx.layers.dense import along_last

BINS = 1000


def margin_counts(score_GTE, bias_E, is_token_GT, num_selected: int):
    """The histogram of margins, float32 `[E, W]`, over the range where they can be.

    Args:
        score_GTE: scores from 0 to 1, without bias.
        is_token_GT: false for padding, which is not counted.
    """
    margin_GTE, E = _margins(score_GTE, bias_E, num_selected), len(bias_E)
    low_1, width_1 = _range(jax.lax.stop_gradient(bias_E))
    bin_GTE = jnp.floor((margin_GTE - low_1[0]) / width_1[0]).astype(jnp.int32)
    expert_GTE = jax.lax.broadcasted_iota(jnp.int32, bin_GTE.shape, 2)
    place_GTE = jnp.clip(bin_GTE, 0, BINS - 1) + BINS * expert_GTE
    place_GTE = jnp.where(is_token_GT[..., None], place_GTE, E * BINS)  # past the end
    counts = jnp.zeros(E * BINS, jnp.float32).at[place_GTE.reshape(-1)].add(1.0, mode="drop")
    return counts.reshape(E, BINS)


def bias_of_counts(margin_NEW, bias_NE, num_selected: int):
    """The `quantile` bias of a batch, linear within a bin; the old one if nothing was counted.

    Args:
        margin_NEW: `margin_counts`, summed over the batch.
        bias_NE: the bias that they were counted with.
    """
    E = bias_NE.shape[-1]
    low_N1, width_N1 = _range(bias_NE)
    up_to_NEW = jnp.cumsum(margin_NEW, axis=-1)
    rank_NE = jnp.ceil(up_to_NEW[..., -1] * num_selected / E)
    bin_NE = jnp.sum(up_to_NEW < rank_NE[..., None], axis=-1)
    is_bin_NEW = jax.nn.one_hot(bin_NE, margin_NEW.shape[-1], dtype=jnp.bool_)
    within_NE = jnp.sum(jnp.where(is_bin_NEW, margin_NEW, 0), axis=-1)
    before_NE = jnp.sum(jnp.where(is_bin_NEW, up_to_NEW, 0), axis=-1) - within_NE
    part_NE = (rank_NE - before_NE) / jnp.maximum(within_NE, 1)
    quantile_NE = _centered(low_N1 + width_N1 * (bin_NE + part_NE))
    return jnp.where(jnp.any(margin_NEW > 0, axis=(-2, -1))[..., None], quantile_NE, bias_NE)


def margin_quantiles(logits_GTE, bias_E, is_token_GT, num_selected: int):
    """The sum over tokens of their group's exact quantiles, float32 `[E]`.

    For n tokens, it is the (q+1)-th smallest margin of each expert, q = floor(n S / E).
    """
    T, E = logits_GTE.shape[1:]
    margin_GTE = _margins(logits_GTE, bias_E, num_selected)
    margin_GET = jnp.swapaxes(jnp.where(is_token_GT[..., None], margin_GTE, jnp.inf), 1, 2)
    tokens_G11 = jnp.sum(is_token_GT, axis=-1, dtype=jnp.int32)[:, None, None]
    least_GET, _ = jax.lax.top_k(-margin_GET, T * num_selected // E + 1)
    index = jax.lax.broadcasted_iota(jnp.int32, least_GET.shape, 2)
    is_quantile_GET = (index == tokens_G11 * num_selected // E) & (tokens_G11 > 0)
    return jnp.sum(jnp.where(is_quantile_GET, -least_GET * tokens_G11, 0), axis=(0, 2))


def bias_of_quantiles(margin_NE, tokens_N, bias_NE):
    """The `quantile_logits` bias of a batch; the old one if no tokens were routed."""
    tokens_N1 = jnp.asarray(tokens_N)[..., None]
    mean_NE = _centered(margin_NE / jnp.maximum(tokens_N1, 1))
    return jnp.where(tokens_N1 > 0, mean_NE, bias_NE)


def _margins(score_GTE, bias_E, num_selected: int):
    """alpha_t - s_te, in float32."""
    score_GTE = jax.lax.stop_gradient(score_GTE).astype(jnp.float32)
    biased_GTE = score_GTE + along_last(jax.lax.stop_gradient(bias_E), score_GTE)
    best_GTS, _ = jax.lax.top_k(biased_GTE, num_selected + 1)
    return best_GTS[..., -1:] - score_GTE


def _range(bias_NE):
    """The lower end of the margins of scores from 0 to 1, and the width of a bin."""
    low_N1 = jnp.min(bias_NE, axis=-1, keepdims=True) - 1
    return low_N1, (jnp.max(bias_NE, axis=-1, keepdims=True) + 1 - low_N1) / BINS


def _centered(bias_NE):
    return bias_NE - jnp.mean(bias_NE, axis=-1, keepdims=True)
