# SPDX-License-Identifier: Apache-2.0
"""A stack of blocks: unrolled, or one `lax.scan` over the repeated part of the pattern.

A stack is `repeats` times a run of `period` different blocks. Unrolled, the run is the
whole stack; scanned, it is the shortest run of dense and sparse blocks that repeats, with
the parameters stacked over N. Every layer has a key of its own, by its number in the stack, for
its parameters and for its dropout: both are the same, scanned or not. A cache is a tuple of
`BlockCache`s, an item a block of the run, stacked as the parameters are.
Dims: B batch, L length, M memory, D model, H heads, N repeats of the run, P blocks of the run
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from switchx.layers.dense import Norm, dropout, split_key
from switchx.layers.positions import RelativeBias, UntiedPositions
from switchx.models.block import Block, BlockCache, BlockInputs
from switchx.models.layer_loop import layer_loop
from switchx.partitioning.buckets import whole
from switchx.partitioning.constrain import constrain, constrain_named, gathered_where_used

REMAT_POLICIES = {
    "minimal": jax.checkpoint_policies.dots_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


class BlockRun(nnx.Module):
    """The blocks `layer_0`, `layer_1`, ... of one run, applied one after the other."""

    def __init__(self, config, *, stack: str, key_P):
        self.length, self.is_scanned = len(key_P), config.scan_layers
        self.has_own_biases = config.relative_bias_per_layer
        has_memory = stack == "decoder" and config.is_encoder_decoder
        for i in range(self.length):
            is_sparse = config.is_sparse(i, stack)
            block = Block(config, is_sparse=is_sparse, has_memory=has_memory, key=key_P[i])
            setattr(self, f"layer_{i}", block)

    @property
    def blocks(self) -> list[Block]:
        return [getattr(self, f"layer_{i}") for i in range(self.length)]

    def __call__(
        self,
        x_BLD,
        inputs: BlockInputs,
        cache=None,
        *,
        is_training: bool,
        remat: str,
        is_in_loop: bool = False,
        key_P=None,
    ):
        """Output, the sparse blocks' statistics stacked over them (None if none is), cache.

        Args:
            is_in_loop: of several runs. Its passes are loops of their own, so that the backward
                pass needs no barrier against what the forward pass computed; one would copy
                each block's parameters.
        """

        # A scan without remat would keep what was gathered for each of its blocks.
        is_gathered = remat != "none" or not self.is_scanned

        def run_block(block, x_BLD, inputs, cache, key):
            block = whole(block)  # in here, to be freed after use and gathered again
            if is_gathered:
                block = gathered_where_used(block)
            x_BLD = constrain(x_BLD, "BLD")
            return block(x_BLD, inputs, cache, is_training=is_training, key=key)

        if remat != "none":
            policy = REMAT_POLICIES[remat]
            run_block = jax.checkpoint(run_block, policy=policy, prevent_cse=not is_in_loop)
        all_stats, caches = [], []
        for block, inputs_i, cache_i, key_i in zip(
            self.blocks,
            self._inputs_of_blocks(inputs),
            [None] * self.length if cache is None else cache,
            [None] * self.length if key_P is None else key_P,
            strict=True,
        ):
            x_BLD, stats, cache_i = run_block(block, x_BLD, inputs_i, cache_i, key_i)
            all_stats += stats
            caches.append(cache_i)
        stats = None
        if all_stats:
            stats = jax.tree.map(lambda *leaves: jnp.stack(leaves), *all_stats)
        return x_BLD, stats, None if cache is None else tuple(caches)

    def _inputs_of_blocks(self, inputs: BlockInputs) -> list[BlockInputs]:
        """What each block reads: where biases are the layers' own, its heads of them."""
        if not self.has_own_biases:
            return [inputs] * self.length
        biases = rows = [None] * self.length
        if inputs.bias_HLM is not None:
            biases = jnp.split(inputs.bias_HLM, self.length)
        if inputs.row_bias_BHLM is not None:  # in decoding, of a prompt's places, or of all
            rows = jnp.split(inputs.row_bias_BHLM, self.length, axis=1)
        return [
            dataclasses.replace(inputs, bias_HLM=bias_HLM, row_bias_BHLM=row_bias_BHLM)
            for bias_HLM, row_bias_BHLM in zip(biases, rows, strict=True)
        ]


def layer_keys(config, stack: str, key) -> jax.Array:
    """The keys `[N, P]` of a stack's layers: that of layer n * P + p is in place n, p."""
    num_layers = getattr(config, f"num_{stack}_layers")
    period = config.period if config.scan_layers else num_layers
    return jax.random.split(key, num_layers).reshape(-1, period)


class Stack(nnx.Module):
    """An encoder or a decoder: its biases of positions, its blocks, its final norm."""

    def __init__(self, config, stack: Literal["encoder", "decoder"], *, key):
        self.config, self.name = config, stack
        key_bias, key_blocks = jax.random.split(key)
        key_NP = layer_keys(config, stack, key_blocks)
        self.repeats = len(key_NP)

        def build(key_P):
            return BlockRun(config, stack=stack, key_P=key_P)

        if config.has_relative_bias:
            self.relative_bias = RelativeBias(
                config,
                num_layers=key_NP.size,
                is_bidirectional=stack == "encoder",
                key=key_bias,
            )
        if config.has_untied_positions:
            key_untied = jax.random.fold_in(key_bias, 1)
            self.untied_positions = UntiedPositions(config, key=key_untied)
        if config.scan_layers:
            self.blocks = jax.vmap(build)(key_NP)
        else:
            self.blocks = build(key_NP[0])
        self.norm = Norm(config)

    def position_bias(self, num_queries: int, num_keys: int, *, first_query: int = 0):
        """The stack's relative `bias_HLM`, or None where it has none.

        With a bias of each layer its heads are those of all layers (`RelativeBias`).
        """
        if not self.config.has_relative_bias:
            return None
        return self.relative_bias(num_queries, num_keys, first_query=first_query)

    def row_bias(self, position_BL, position_BM):
        """The stack's `row_bias_BHLM` of absolute positions (TUPE), or None."""
        if not self.config.has_untied_positions:
            return None
        return self.untied_positions(position_BL, position_BM)

    def inputs(self, token_BL, segment_BL, position_BL, mask_BLM, **others) -> BlockInputs:
        """What every block reads of whole texts, with what `others` names beside them."""
        length = token_BL.shape[1]
        return BlockInputs(
            is_token_BL=segment_BL > 0,
            mask_BLM=mask_BLM,
            bias_HLM=self.position_bias(length, length),
            row_bias_BHLM=self.row_bias(position_BL, position_BL),
            token_BL=token_BL,
            **others,
        )

    def __call__(self, x_BLD, inputs: BlockInputs, *, is_training: bool, key=None):
        """The normed output `[B, L, D]` and the routing statistics `[num_sparse, ...]`."""
        x_BLD = self.enter(x_BLD, key=key)
        x_BLD, stats, _ = self.run(x_BLD, inputs, is_training=is_training, key=key)
        return self.leave(x_BLD, key=key), stats

    def extend(self, x_BLD, inputs: BlockInputs, cache):
        """The normed output of L more tokens, and the cache with them; nothing is trained."""
        x_BLD, _, cache = self.run(x_BLD, inputs, cache, is_training=False)
        return self.leave(x_BLD), cache

    def new_cache(self, batch: int, places: int, memory_BMD=None) -> tuple[BlockCache, ...]:
        """An empty cache of `places` places, with the keys and values of the memory."""

        def make(run):
            return tuple(block.new_cache(batch, places, memory_BMD) for block in run.blocks)

        make = jax.vmap(make) if self.config.scan_layers else make
        return constrain_named(make(self.blocks))

    def enter(self, x_BLD, *, key=None):
        """What the first block reads, from the embedded tokens."""
        key_in, _, _ = split_key(key, 3)
        return dropout(x_BLD, self.config.dropout_rate, key=key_in, shared_dims=(1,))

    def run(
        self,
        x_BLD,
        inputs: BlockInputs,
        cache=None,
        *,
        is_training: bool,
        key=None,
        first_run=0,
    ):
        """The blocks that this stack holds: their output, routing statistics and cache.

        Args:
            cache: of `new_cache`, or None where whole texts are read.
            key: of the whole stack, as in all of these.
            first_run: a stage of a pipeline holds some runs of a scanned stack; the number of
                the first of them, which may be traced.
        """
        _, key_blocks, _ = split_key(key, 3)
        loop = layer_loop()
        remat = loop.remat(self.blocks, self.config.remat)
        key_NP = None if key is None else layer_keys(self.config, self.name, key_blocks)
        if not self.config.scan_layers:
            key_P = None if key is None else key_NP[0]
            return self.blocks(
                x_BLD, inputs, cache, is_training=is_training, remat=remat, key_P=key_P
            )

        num_runs = jax.tree.leaves(nnx.state(self.blocks))[0].shape[0]

        def run_blocks(x_BLD, blocks, others, inputs):
            cache, key_P = others
            x_BLD, *others = blocks(
                x_BLD,
                inputs,
                cache,
                is_training=is_training,
                remat=remat,
                is_in_loop=num_runs > 1,
                key_P=key_P,
            )
            return x_BLD, others

        if key is not None:
            key_NP = jax.lax.dynamic_slice_in_dim(key_NP, first_run, num_runs)
        others = cache, key_NP
        x_BLD, (stats, cache) = loop.scan(run_blocks, x_BLD, self.blocks, others, inputs)
        stats = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), stats)
        return x_BLD, stats, cache

    def leave(self, x_BLD, *, key=None):
        """The stack's output, from that of the last block."""
        _, _, key_out = split_key(key, 3)
        rate = self.config.dropout_rate
        return dropout(self.norm(x_BLD), rate, key=key_out, shared_dims=(1,))
