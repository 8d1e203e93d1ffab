# SPDX-License-Identifier: Apache-2.0
"""Reading long texts one chunk of places at a time, through the KV cache.

Each chunk's queries read the keys and values of all places before them (Agrawal et al. 2023,
Sarathi, arXiv:2308.16369, section 4.1). Attention scores of a whole pass are `[B, H, P, P]`, of
a chunk `[B, H, Q, P]`; no other array grows faster than P.
Dims: B batch, P places of the text, Q places of a chunk, L queries, M keys, D model, H heads
"""

import jax
import jax.numpy as jnp

from switchx.inference.model_mesh import has_capacity
from switchx.models.block import BlockInputs
from switchx.models.config import PREFILL_CHUNK, ModelConfig
from switchx.moe.experts import AbsentExperts
from switchx.partitioning.constrain import constrain


def chunk_size(config: ModelConfig, params, length: int, *, is_bidirectional: bool) -> int:
    """Number of places that a decoder-only model reads at a time in texts of this length.

    It is the whole length where a token's result depends on later ones (with a bidirectional
    prompt, or experts that have a capacity), where layers' experts are moved to the device in
    each pass, and where blocks take no cache (a user's own, or experts in self-attention).
    """

    def is_absent(leaf) -> bool:
        return isinstance(leaf, AbsentExperts)

    switch = config.switch
    is_whole = (
        is_bidirectional
        or has_capacity(config)
        or config.build is not None
        or (switch is not None and switch.has_attention)
        or any(map(is_absent, jax.tree.leaves(params, is_leaf=is_absent)))
    )
    return length if is_whole else min(PREFILL_CHUNK, length)


def read_in_chunks(
    model,
    texts: tuple,
    cache,
    kept,
    keep,
    *,
    size: int,
    is_routed_BP=None,
    is_bidirectional: bool = False,
):
    """Reads texts into the cache; returns the cache and what `keep` has made of `kept`.

    A last chunk that would be short begins earlier; what it reads again comes out the same.

    Args:
        texts: `token_BP`, `position_BP` and `is_text_BP`: which places hold tokens of the text.
        keep: function of `kept`, the first place of a chunk, its output `[B, Q, D]` and its
            `RoutingStats`; it returns the new `kept`.
        size: Q, as `chunk_size` returns it.
        is_routed_BP: which tokens the experts see; None means all tokens of the text.
        is_bidirectional: whether tokens attend to later ones, too; the size is then P.
    """
    token_BP, position_BP, is_text_BP = texts
    is_routed_BP = is_text_BP if is_routed_BP is None else is_routed_BP
    P = token_BP.shape[1]
    bias_HLM = model.decoder.position_bias(1, P, first_query=P - 1)

    def read(state, first):
        def part(x_BP):
            return jax.lax.dynamic_slice_in_dim(x_BP, first, size, axis=1)

        cache, kept = state
        position_BQ, token_BQ = part(position_BP), part(token_BP)
        behind_QP = first + jnp.arange(size)[:, None] - jnp.arange(P)[None]
        bias_HQP = None
        if bias_HLM is not None:
            bias_HQP = jnp.take(bias_HLM[:, 0], P - 1 - jnp.maximum(behind_QP, 0), axis=1)
        inputs = BlockInputs(
            is_token_BL=part(is_routed_BP),
            mask_BLM=is_text_BP[:, None] & ((behind_QP >= 0) | is_bidirectional)[None],
            bias_HLM=bias_HQP,
            token_BL=token_BQ,
            row_bias_BHLM=model.decoder.row_bias(position_BQ, position_BP),
            rotation=model.decoder.rotation(position_BQ),
            cache_index=first,
        )
        x_BQD = constrain(model.embedding.embed(token_BQ, position_BQ), "BLD")
        y_BQD, stats, cache = model.decoder.extend(x_BQD, inputs, cache)
        return (cache, keep(kept, first, y_BQD, stats)), None

    first_N = jnp.minimum(jnp.arange(-(-P // size)) * size, P - size)
    if len(first_N) == 1:
        return read((cache, kept), jnp.int32(0))[0]
    return jax.lax.scan(read, (cache, kept), first_N)[0]
