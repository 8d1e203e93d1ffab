# SPDX-License-Identifier: Apache-2.0
"""What decoding remembers: keys and values of every decoder block, in arrays of fixed size.

All beams of a sentence write into one row: the prompt's P places, then a place for every
beam at every step. Which of them a beam may see is a mask (its ancestors), so beams are
never moved or copied; the encoder's keys and values are there once for a sentence.
Dims: B L M H K D
"""

import dataclasses

import jax

from switchx.inference.cached_attention import KeysValues, read
from switchx.models.block import Block
from switchx.partitioning.constrain import constrain, constrain_named


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Of a whole decoder, an item a block.

    Attributes:
        past: of self-attention.
        memory: of cross-attention; empty without an encoder.
        is_memory_BM: which of the memory is text; None without an encoder.
    """

    past: tuple[KeysValues, ...]
    memory: tuple[KeysValues, ...] = ()
    is_memory_BM: jax.Array | None = None


def blocks_of(stack) -> list[Block]:
    """The blocks of an unrolled stack, in order."""
    run = stack.blocks
    return [getattr(run, f"layer_{i}") for i in range(run.length)]


def new_cache(model, batch: int, places: int, memory_BMD=None, is_memory_BM=None) -> Cache:
    """An empty cache of `places` entries, with the keys and values of the memory.

    Args:
        model: an unrolled `EncoderDecoder` or `DecoderOnly`.
    """
    blocks = blocks_of(model.decoder)
    config = model.decoder.config
    shape = (batch, config.num_heads, places, config.d_head)
    past = tuple(
        constrain_named(KeysValues.empty(shape, config.precision.compute_dtype)) for _ in blocks
    )
    if memory_BMD is None:
        return Cache(past)
    memory = tuple(
        constrain_named(KeysValues.of(*block.cross_attention.project_memory(memory_BMD)))
        for block in blocks
    )
    return Cache(past, memory, is_memory_BM)


def extend(
    model,
    cache: Cache,
    token_BL,
    position_BL,
    place,
    *,
    mask_BLM,
    bias_HLM,
    row_bias_BHLM=None,
    is_live_BL,
):
    """Runs L tokens of every row through the decoder and remembers them.

    Args:
        position_BL: positions in the text, for models that have learned ones.
        place: where in the cache the L entries go.
        mask_BLM, bias_HLM, row_bias_BHLM: of self-attention over the first M places of the
            cache, these L included.
        is_live_BL: false for tokens that no expert is to see.

    Returns:
        logits_BLV, the cache.
    """
    x_BLD = constrain(model.embedding.embed(token_BL, position_BL), "BLD")
    past = []
    for i, block in enumerate(blocks_of(model.decoder)):
        attention = block.self_attention
        normed_BLD = block.self_attention_norm(x_BLD)
        new = attention.project_memory(normed_BLD)
        kept = constrain_named(cache.past[i].written(place, *new))
        past.append(kept)
        out_BLHK = read(
            attention.project_query(normed_BLD),
            kept.first(mask_BLM.shape[2]),
            mask_BLM=mask_BLM,
            bias_HLM=bias_HLM,
            row_bias_BHLM=row_bias_BHLM,
        )
        x_BLD = x_BLD + attention.project_out(out_BLHK)
        if cache.memory:
            x_BLD = x_BLD + _read_memory(block, x_BLD, cache.memory[i], cache.is_memory_BM)
        normed_BLD = block.ffn_norm(x_BLD)
        if block.is_ffn_sparse:
            y_BLD, _ = block.ffn(normed_BLD, is_live_BL, token_BL, is_training=False)
        else:
            y_BLD = block.ffn(normed_BLD)
        x_BLD = constrain(x_BLD + y_BLD, "BLD")
    logits_BLV = constrain(model.embedding.logits(model.decoder.norm(x_BLD)), "BLV")
    return logits_BLV, dataclasses.replace(cache, past=tuple(past))


def _read_memory(block: Block, x_BLD, memory: KeysValues, is_memory_BM):
    attention = block.cross_attention
    out_BLHK = read(
        attention.project_query(block.cross_attention_norm(x_BLD)),
        memory,
        mask_BLM=is_memory_BM[:, None],
    )
    return attention.project_out(out_BLHK)
