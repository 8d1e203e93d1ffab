# SPDX-License-Identifier: Apache-2.0
"""A Transformer in float64 NumPy, from the papers' formulas: the oracle of the model tests.

It reads the parameter dictionary of an unrolled model, and knows everything by loops: no
code is shared with the package but the configuration and the names of the parameters.
"""

import math

import numpy as np

from tests.moe.oracle import activated, softmax, switch_layer


def norm(p, x):
    """RMSNorm, or LayerNorm where there is a bias."""
    if "bias_D" in p:
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p["scale_D"]
    return x + p.get("bias_D", 0.0)


def bucket(distance: int, is_bidirectional: bool, num_buckets: int, max_distance: int) -> int:
    """T5's bucket of a key `distance` positions before the query."""
    offset = 0
    if is_bidirectional:
        num_buckets //= 2
        offset = num_buckets if distance < 0 else 0
        distance = abs(distance)
    distance, exact = max(distance, 0), num_buckets // 2
    if distance < exact:
        return offset + distance
    growth = math.log(distance / exact) / math.log(max_distance / exact)
    return offset + min(exact + int(growth * (num_buckets - exact)), num_buckets - 1)


def position_bias(config, p, length: int, is_bidirectional: bool):
    if "relative_bias" not in p:
        return np.zeros((config.num_heads, length, length))
    bias_UH = p["relative_bias"]["bias_UH"]
    sizes = config.relative_buckets, config.relative_max_distance
    rows = [
        [bias_UH[bucket(i - j, is_bidirectional, *sizes)] for j in range(length)]
        for i in range(length)
    ]
    return np.array(rows).transpose(2, 0, 1)


def row_bias(config, p, position_BL):
    """TUPE's second term, eq. 7 of arXiv:2006.15595, of every row, head, query and key."""
    B, L = position_BL.shape
    bias_BHLM = np.zeros((B, config.num_heads, L, L))
    if "untied_positions" not in p:
        return bias_BHLM
    table_LD, w_query_DHK, w_key_DHK = (
        p["untied_positions"][name] for name in ("positions_LD", "w_query_DHK", "w_key_DHK")
    )
    for b, h, i, j in np.ndindex(*bias_BHLM.shape):
        query_K = table_LD[position_BL[b, i]] @ w_query_DHK[:, h]
        key_K = table_LD[position_BL[b, j]] @ w_key_DHK[:, h]
        bias_BHLM[b, h, i, j] = query_K @ key_K / math.sqrt(2 * config.d_head)
    return bias_BHLM


def attention(config, p, x_BLD, memory_BMD, mask_BLM, bias_HLM, row_bias_BHLM=None):
    """`row_bias_BHLM` in self-attention alone; TUPE halves the variance of both terms."""
    has_positions = row_bias_BHLM is not None and "tupe" in config.positions
    y_BLD = np.zeros_like(x_BLD)
    for b, h in np.ndindex(len(x_BLD), config.num_heads):
        query, key, value = (
            source[b] @ p[f"w_{name}_DHK"][:, h] + p.get(f"b_{name}_HK", {h: 0.0})[h]
            for name, source in [("query", x_BLD), ("key", memory_BMD), ("value", memory_BMD)]
        )
        if config.scale_attention:
            query = query / math.sqrt(config.d_head * (2 if has_positions else 1))
        for i in range(len(query)):
            allowed = np.flatnonzero(mask_BLM[b, i])
            if len(allowed) == 0:
                allowed = np.arange(len(key))  # padding: an average that is not read
                weights = np.full(len(key), 1 / len(key))
            else:
                score_M = key[allowed] @ query[i] + bias_HLM[h, i, allowed]
                if has_positions:
                    score_M = score_M + row_bias_BHLM[b, h, i, allowed]
                weights = softmax(score_M)
            y_BLD[b, i] += (weights @ value[allowed]) @ p["w_out_HKD"][h]
    return y_BLD + p.get("b_out_D", 0.0)


def ffn(config, p, x_BLD, is_token_BL, factor):
    """Output, and the balance loss of a Switch layer (None of a dense one)."""
    if "experts" not in p:
        gate = x_BLD @ p["w_gate_DF"] if "w_gate_DF" in p else None
        h_BLF = activated(config.activation, x_BLD @ p["w_in_DF"] + p.get("b_in_F", 0), gate)
        return h_BLF @ p["w_out_FD"] + p.get("b_out_D", 0.0), None
    assert config.activation == "relu"
    y_TD, _, _, _, balance = switch_layer(
        x_BLD.reshape(-1, config.d_model),
        is_token_BL.reshape(-1),
        p["w_router_DE"],
        **p["experts"],
        factor=factor,
        minimum=config.switch.min_capacity,
    )
    return y_TD.reshape(x_BLD.shape), balance


def block(
    config, p, x_BLD, is_token_BL, mask_BLM, bias_HLM, memory=None, factor=None,
    row_bias_BHLM=None,
):  # fmt: skip
    """One pre-norm block; `memory` is the encoder's output and who may look at it."""
    normed_BLD = norm(p["self_attention_norm"], x_BLD)
    reads = normed_BLD, normed_BLD, mask_BLM, bias_HLM, row_bias_BHLM
    x_BLD = x_BLD + attention(config, p["self_attention"], *reads)
    if memory is not None:
        normed_BLD = norm(p["cross_attention_norm"], x_BLD)
        no_bias_HLM = np.zeros((config.num_heads, x_BLD.shape[1], memory[0].shape[1]))
        y_BLD = attention(config, p["cross_attention"], normed_BLD, *memory, no_bias_HLM)
        x_BLD = x_BLD + y_BLD
    y_BLD, balance = ffn(config, p["ffn"], norm(p["ffn_norm"], x_BLD), is_token_BL, factor)
    return x_BLD + y_BLD, balance


def stack(
    config, p, x_BLD, is_token_BL, mask_BLM, memory=None, *, factor=None, causal=False,
    position_BL=None,
):  # fmt: skip
    """Normed output, and the balance losses of the sparse blocks in order."""
    bias_HLM = position_bias(config, p, x_BLD.shape[1], is_bidirectional=not causal)
    row_bias_BHLM = None if position_BL is None else row_bias(config, p, position_BL)
    losses = []
    for i in range(len(p["blocks"])):
        x_BLD, balance = block(
            config,
            p["blocks"][f"layer_{i}"],
            x_BLD,
            is_token_BL,
            mask_BLM,
            bias_HLM,
            memory,
            factor,
            row_bias_BHLM,
        )
        losses += [] if balance is None else [balance]
    return norm(p["norm"], x_BLD), losses


def segment_mask(query_BL, key_BM, visible=lambda b, i, j: True):
    mask_BLM = np.zeros((*query_BL.shape, key_BM.shape[1]), bool)
    for b, i, j in np.ndindex(*mask_BLM.shape):
        mask_BLM[b, i, j] = query_BL[b, i] == key_BM[b, j] > 0 and visible(b, i, j)
    return mask_BLM


def embed(p, tokens_BL, positions_BL):
    x_BLD = p["embedding_VD"][tokens_BL]
    return x_BLD + p["positions_LD"][positions_BL] if "positions_LD" in p else x_BLD


def model(config, params, batch, *, is_training=False):
    """Logits `[B, L, V]`, and the balance losses of all Switch layers, the encoder's first."""
    factor = config.switch and (
        config.switch.capacity_factor if is_training else config.switch.eval_capacity_factor
    )
    prefix_BL = batch.get("decoder_prefix_mask", np.zeros_like(batch["decoder_positions"]))
    segment_BL, memory, losses = batch["decoder_segment_ids"], None, []
    table = params["embedding"]
    if config.is_encoder_decoder:
        segment_BM = batch["encoder_segment_ids"]
        memory_BMD, losses = stack(
            config,
            params["encoder"],
            embed(table, batch["encoder_input_tokens"], batch["encoder_positions"]),
            segment_BM > 0,
            segment_mask(segment_BM, segment_BM),
            factor=factor,
            position_BL=batch["encoder_positions"],
        )
        memory = memory_BMD, segment_mask(segment_BL, segment_BM)
    y_BLD, decoder_losses = stack(
        config,
        params["decoder"],
        embed(table, batch["decoder_input_tokens"], batch["decoder_positions"]),
        segment_BL > 0,
        segment_mask(segment_BL, segment_BL, lambda b, i, j: j <= i or prefix_BL[b, j] > 0),
        memory,
        factor=factor,
        causal=True,
        position_BL=batch["decoder_positions"],
    )
    if not config.tie_embeddings:
        logits_BLV = y_BLD @ table["w_logits_DV"]
    else:
        divisor = math.sqrt(config.d_model) if config.scale_tied_logits else 1.0
        logits_BLV = y_BLD @ table["embedding_VD"].T / divisor
    return logits_BLV, losses + decoder_losses
