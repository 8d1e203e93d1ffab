# SPDX-License-Identifier: Apache-2.0
"""A stack of blocks: unrolled, or one `lax.scan` over the repeated part of the pattern.

A stack is `repeats` times a period of different blocks. Unrolled, the period is the whole
stack; scanned, it is the shortest sequence of dense and sparse blocks that repeats, with
the parameters stacked over N. Each layer has a random key of its own, by its number in the
stack, for its parameters and for its dropout, so both are equal whether scanned or not. A cache
is a tuple with one `BlockCache` for each block of the period, stacked as the parameters are.
Dims: B batch, L length, M memory, D model, H heads, N periods, P blocks of a period
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from switchx.layers.dense import split_key
from switchx.layers.dropout import dropout
from switchx.layers.norm import Norm
from switchx.layers.positions import RelativeBias, Rotation, UntiedPositions
from switchx.models.block import Block, BlockCache, BlockInputs
from switchx.models.layer_loop import layer_loop
from switchx.moe.routing_plan import DECISION
from switchx.partitioning.buckets import whole
from switchx.partitioning.constrain import constrain, constrain_named, gathered_where_used

_DECISIONS = jax.checkpoint_policies.save_only_these_names(DECISION)
REMAT_POLICIES = {
    "minimal": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_saveable, _DECISIONS
    ),
    "full": _DECISIONS,
}


class BlockPeriod(nnx.Module):
    """The blocks `layer_0`, `layer_1`, ... of one period, applied one after the other."""

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
        """The output, the sparse blocks' stacked statistics (None without any), and the cache.

        Args:
            is_in_loop: whether this period is one of several in a loop. Forward and backward
                pass are then separate loops, so remat needs no optimization barrier that keeps
                XLA from reusing forward results; a barrier would copy each block's parameters.
        """

        # A scan without remat would keep what was gathered for each of its blocks.
        is_gathered = remat != "none" or not self.is_scanned

        def run_block(block, x_BLD, inputs, cache, key):
            # Gathered inside remat: freed after use and gathered again in the backward pass.
            block = whole(block)
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
        """The inputs of each block, with its part of the inputs that differ by layer: heads of
        the biases, given choices."""
        biases = [inputs.bias_HLM] * self.length
        rows = [inputs.row_bias_BHLM] * self.length
        replays = [None] * self.length
        if self.has_own_biases and inputs.bias_HLM is not None:
            biases = jnp.split(inputs.bias_HLM, self.length)
        # In decoding: for a prompt's positions, or all.
        if self.has_own_biases and inputs.row_bias_BHLM is not None:
            rows = jnp.split(inputs.row_bias_BHLM, self.length, axis=1)
        if inputs.replay_BLNS is not None:
            layers = iter(jnp.split(inputs.replay_BLNS, inputs.replay_BLNS.shape[2], axis=2))
            replays = [next(layers) if block.is_ffn_sparse else None for block in self.blocks]
        return [
            dataclasses.replace(inputs, bias_HLM=bias, row_bias_BHLM=row, replay_BLNS=replay)
            for bias, row, replay in zip(biases, rows, replays, strict=True)
        ]


def layer_keys(config, stack: str, key) -> jax.Array:
    """The random keys `[N, P]` of a stack's layers; `[n, p]` is the key of layer n * P + p."""
    num_layers = getattr(config, f"num_{stack}_layers")
    period = config.period if config.scan_layers else num_layers
    return jax.random.split(key, num_layers).reshape(-1, period)


def scan_layers(run: Callable, x_BLD, blocks, others, inputs):
    """`x, y_n = run(x, blocks[n], others[n], inputs)` for all n: x, and all y stacked."""

    def body(x_BLD, layer):
        return run(x_BLD, *layer, inputs)

    return jax.lax.scan(body, x_BLD, (blocks, others))


class Stack(nnx.Module):
    """An encoder or a decoder: its position biases, its blocks and its final norm."""

    def __init__(self, config, stack: Literal["encoder", "decoder"], *, key):
        self.config, self.name = config, stack
        key_bias, key_blocks = jax.random.split(key)
        key_NP = layer_keys(config, stack, key_blocks)
        self.repeats = len(key_NP)

        def build(key_P):
            return BlockPeriod(config, stack=stack, key_P=key_P)

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

        Where each layer has its own bias, H counts the heads of all layers (`RelativeBias`).
        """
        if not self.config.has_relative_bias:
            return None
        return self.relative_bias(num_queries, num_keys, first_query=first_query)

    def row_bias(self, position_BL, position_BM):
        """The stack's `row_bias_BHLM` of absolute positions (TUPE), or None."""
        if not self.config.has_untied_positions:
            return None
        return self.untied_positions(position_BL, position_BM)

    def rotation(self, position_BL) -> Rotation | None:
        """The rotation of queries and keys at these positions, or None."""
        if self.config.positions != "rotary":
            return None
        return Rotation.of(self.config.rotary, self.config.d_head, position_BL)

    def inputs(self, token_BL, segment_BL, position_BL, mask_BLM, **others) -> BlockInputs:
        """The blocks' inputs for whole sequences; `others` are their other fields."""
        length, switch = token_BL.shape[1], self.config.switch
        is_by_sequence = switch is not None and switch.router.balance_scope == "sequence"
        return BlockInputs(
            is_token_BL=segment_BL > 0,
            mask_BLM=mask_BLM,
            bias_HLM=self.position_bias(length, length),
            row_bias_BHLM=self.row_bias(position_BL, position_BL),
            rotation=self.rotation(position_BL),
            token_BL=token_BL,
            segment_BL=segment_BL if is_by_sequence else None,
            **others,
        )

    def __call__(self, x_BLD, inputs: BlockInputs, *, is_training: bool, key=None):
        """The normed output `[B, L, D]` and the routing statistics `[num_sparse, ...]`."""
        x_BLD = self.enter(x_BLD, key=key)
        x_BLD, stats, _ = self.run(x_BLD, inputs, is_training=is_training, key=key)
        return self.leave(x_BLD, key=key), stats

    def extend(self, x_BLD, inputs: BlockInputs, cache):
        """The normed output of L more tokens, their routing statistics and the cache with them,
        in evaluation mode."""
        x_BLD, stats, cache = self.run(x_BLD, inputs, cache, is_training=False)
        return self.leave(x_BLD), stats, cache

    def new_cache(self, batch: int, places: int, memory_BMD=None) -> tuple[BlockCache, ...]:
        """A cache for `places` tokens, empty except for the memory's keys and values."""

        def make(period):
            return tuple(block.new_cache(batch, places, memory_BMD) for block in period.blocks)

        make = jax.vmap(make) if self.config.scan_layers else make
        return constrain_named(make(self.blocks))

    def enter(self, x_BLD, *, key=None):
        """The first block's input, from the embedded tokens."""
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
        first_period=0,
    ):
        """Runs the blocks of this stack: their output, routing statistics and cache.

        Args:
            cache: the cache that `new_cache` or an earlier call returned; None for whole
                sequences.
            key: random key of the whole stack, as in `enter` and `leave`.
            first_period: number of the first period that is held here, which may be traced;
                above 0 in a pipeline stage, which holds some periods of a scanned stack.
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

        num_periods = jax.tree.leaves(nnx.state(self.blocks))[0].shape[0]

        def run_blocks(x_BLD, blocks, others, inputs):
            cache, key_P, replay_BLNS = others
            inputs = dataclasses.replace(inputs, replay_BLNS=replay_BLNS)
            x_BLD, *others = blocks(
                x_BLD,
                inputs,
                cache,
                is_training=is_training,
                remat=remat,
                is_in_loop=num_periods > 1,
                key_P=key_P,
            )
            return x_BLD, others

        if key is not None:
            key_NP = jax.lax.dynamic_slice_in_dim(key_NP, first_period, num_periods)
        if (replay := inputs.replay_BLNS) is not None:  # [B, L, periods, N of a period, S]
            replay = replay.reshape(*replay.shape[:2], self.repeats, -1, replay.shape[3])
            replay = jnp.moveaxis(replay, 2, 0)
            replay = jax.lax.dynamic_slice_in_dim(replay, first_period, num_periods)
            inputs = dataclasses.replace(inputs, replay_BLNS=None)
        others = cache, key_NP, replay
        scan = loop.scan or scan_layers
        x_BLD, (stats, cache) = scan(run_blocks, x_BLD, self.blocks, others, inputs)
        stats = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), stats)
        return x_BLD, stats, cache

    def leave(self, x_BLD, *, key=None):
        """The stack's output, from the last block's output."""
        _, _, key_out = split_key(key, 3)
        rate = self.config.dropout_rate
        return dropout(self.norm(x_BLD), rate, key=key_out, shared_dims=(1,))
