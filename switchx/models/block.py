# SPDX-License-Identifier: Apache-2.0
"""One Transformer block: self-attention, cross-attention in a decoder, FFN.

Its norms come before the sublayers or after them (OLMo 2, arXiv:2501.00656, section 3.2).
The same block trains, scores and decodes: with a cache, its self-attention reads what earlier
calls wrote there, and its cross-attention the encoder's keys and values.
Dims: B batch, L length, M keys and values (the memory), D model, H heads, K head size
"""

import dataclasses

import jax
from flax import nnx

from switchx.layers.attention import Attention
from switchx.layers.dense import split_key
from switchx.layers.dropout import dropout
from switchx.layers.ffn import DenseFFN
from switchx.layers.kv_cache import KeysValues
from switchx.layers.norm import Norm
from switchx.layers.positions import Rotation
from switchx.moe.attention import SwitchAttention
from switchx.moe.layer import SwitchFFN
from switchx.partitioning.constrain import constrain_named


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockInputs:
    """The inputs of every block of a stack besides the activations.

    Attributes:
        is_token_BL: false for padding and for all tokens that no expert should see.
        mask_BLM: true where a position may attend to another, in self-attention; with a cache,
            M counts the cache's first M places.
        bias_HLM: the stack's relative position bias, or None.
        memory_BMD, memory_mask_BLM: the encoder's output, and true where a position may attend
            to it; None in a stack without cross-attention.
        token_BL: ids of the tokens, for routers that hash them.
        task_B: task of each row, for routers by task; None where rows have none.
        segment_BL: sequence of each token in its row, 0 for padding, where the balance loss is
            per sequence; None otherwise.
        row_bias_BHLM: positional bias of the self-attention scores, one for each row, or
            None.
        rotation: rotation of the queries and keys of self-attention, or None.
        replay_BLNS: experts given to the Switch layers among the blocks, in layer order, in
            place of the routers' choices; None gives none.
        causal_segment_BL: segments within which the mask is causal, for flash attention; None
            if the mask may be of another kind or einsum computes all attention.
        cache_index: index in the cache of the first of these L tokens; None without a cache.
    """

    is_token_BL: jax.Array
    mask_BLM: jax.Array
    bias_HLM: jax.Array | None = None
    memory_BMD: jax.Array | None = None
    memory_mask_BLM: jax.Array | None = None
    token_BL: jax.Array | None = None
    task_B: jax.Array | None = None
    segment_BL: jax.Array | None = None
    row_bias_BHLM: jax.Array | None = None
    rotation: Rotation | None = None
    replay_BLNS: jax.Array | None = None
    causal_segment_BL: jax.Array | None = None
    cache_index: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockCache:
    """Keys and values that a block keeps between decode steps; `[N, ...]` in a scanned stack.

    Attributes:
        past: keys and values of self-attention, written from the first place on.
        memory: keys and values of cross-attention, complete; None without an encoder.
    """

    past: KeysValues
    memory: KeysValues | None = None


class Block(nnx.Module):
    """`x + attention(norm(x))`, the same over the memory, then `x + ffn(norm(x))`.

    With `norm_place="after"`, `x + norm(attention(x))` and so on.
    """

    def __init__(self, config, *, is_sparse: bool, has_memory: bool, key):
        self.config = config
        keys = jax.random.split(key, 3)
        self.self_attention_norm = Norm(config)
        switch = config.switch if is_sparse else None
        self.is_attention_sparse = switch is not None and switch.has_attention
        self.is_ffn_sparse = switch is not None and switch.has_ffn
        if self.is_attention_sparse:
            self.self_attention = SwitchAttention(config, key=keys[0])
        else:
            self.self_attention = Attention(
                config, num_correlations=config.num_correlations, key=keys[0]
            )
        self.has_memory = has_memory
        if has_memory:
            self.cross_attention_norm = Norm(config)
            self.cross_attention = Attention(config, key=keys[1])
        self.ffn_norm = Norm(config)
        self.ffn = (SwitchFFN if self.is_ffn_sparse else DenseFFN)(config, key=keys[2])

    def __call__(
        self,
        x_BLD,
        inputs: BlockInputs,
        cache: BlockCache | None = None,
        *,
        is_training: bool,
        key=None,
    ):
        """The block's output, a list of its Switch layers' statistics, in order, and the cache
        with these tokens (None without one)."""
        keys, all_stats = split_key(key, 6), []
        by = self.config.training_attention if is_training else "einsum"
        is_before = self.config.norm_place == "before"

        def entering(norm, x_BLD):
            return norm(x_BLD) if is_before else x_BLD

        def residual(norm, x_BLD, y_BLD, key):
            rate = self.config.dropout_rate
            y_BLD = y_BLD if is_before else norm(y_BLD)
            return x_BLD + dropout(y_BLD, rate, key=key, shared_dims=(1,))

        normed_BLD = entering(self.self_attention_norm, x_BLD)
        reads = dict(
            by=by,
            bias_HLM=inputs.bias_HLM,
            row_bias_BHLM=inputs.row_bias_BHLM,
            mask_BLM=inputs.mask_BLM,
            causal_segment_BL=inputs.causal_segment_BL,
            key=keys[0],
        )
        if self.is_attention_sparse:
            y_BLD, stats = self.self_attention(
                normed_BLD,
                inputs.is_token_BL,
                inputs.token_BL,
                inputs.task_B,
                inputs.segment_BL,
                is_training=is_training,
                **reads,
            )
            all_stats.append(stats)
        else:
            past = self.self_attention.project_memory(normed_BLD, inputs.rotation)
            if cache is not None:
                kept = constrain_named(cache.past.written(inputs.cache_index, past))
                past = kept.first(inputs.mask_BLM.shape[2])
                cache = dataclasses.replace(cache, past=kept)
            y_BLD = self.self_attention(normed_BLD, past, inputs.rotation, **reads)
        x_BLD = residual(self.self_attention_norm, x_BLD, y_BLD, keys[1])
        if self.has_memory:
            memory = None if cache is None else cache.memory
            if memory is None:
                memory = self.cross_attention.project_memory(inputs.memory_BMD)
            y_BLD = self.cross_attention(
                entering(self.cross_attention_norm, x_BLD),
                memory,
                by=by,
                mask_BLM=inputs.memory_mask_BLM,
                key=keys[2],
            )
            x_BLD = residual(self.cross_attention_norm, x_BLD, y_BLD, keys[3])
        normed_BLD = entering(self.ffn_norm, x_BLD)
        if self.is_ffn_sparse:
            replay_BLNS = inputs.replay_BLNS
            y_BLD, stats = self.ffn(
                normed_BLD,
                inputs.is_token_BL,
                inputs.token_BL,
                inputs.task_B,
                None if replay_BLNS is None else replay_BLNS[:, :, 0],
                inputs.segment_BL,
                is_training=is_training,
                key=keys[4],
            )
            all_stats.append(stats)
        else:
            y_BLD = self.ffn(normed_BLD, key=keys[4])
        return residual(self.ffn_norm, x_BLD, y_BLD, keys[5]), all_stats, cache

    def new_cache(self, batch: int, places: int, memory_BMD=None) -> BlockCache:
        """An empty cache of `places` places, with the keys and values of the memory."""
        config = self.config
        shape_BHMK = batch, config.kv_heads, places, config.d_head
        past = KeysValues.empty(shape_BHMK, config.precision.compute_dtype)
        memory = self.cross_attention.project_memory(memory_BMD) if self.has_memory else None
        return BlockCache(past, memory)
