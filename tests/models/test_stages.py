# SPDX-License-Identifier: Apache-2.0
"""Chunks of a model, one after the other without any mesh, are the model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx import tree
from switchx.models.params import forward
from switchx.models.stages import (
    Chunk,
    join_blocks,
    link_stacks,
    message_shapes,
    split_blocks,
    stack_names,
)
from switchx.pipeline.ticks import Op
from tests.training.jobs import DENSE, ENCODER_DECODER, make_batch, make_params, with_switch

CHUNKS = 2


def op(place: int) -> Op:
    is_first, is_last = place == 0, place == CHUNKS - 1
    ends = dict(is_first=is_first, is_last=is_last, any_first=is_first, any_last=is_last)
    return Op(
        microbatch=0, chunk=place, slot=0, place=place, is_active=True, any_active=True,
        last_microbatch=0, **ends,
    )  # fmt: skip


@pytest.mark.slow  # tests/training/test_pipelined.py has stages by default
@pytest.mark.parametrize("config", [DENSE, ENCODER_DECODER], ids=["decoder", "both"])
def test_chunks_are_the_model_with_dropout(config):
    config = dataclasses.replace(
        config, scan_layers=True, num_decoder_layers=4, dropout_rate=0.2
    )
    if config.is_encoder_decoder:
        config = dataclasses.replace(with_switch(config, every=1), num_encoder_layers=4)
    batch, params, key = make_batch(config, 2), make_params(config), jax.random.key(3)
    names = stack_names(config)

    def run(params):
        blocks, shared = split_blocks(config, params)
        message, rows = None, []
        for name, stack in zip(names, blocks, strict=True):
            shapes = message_shapes(config, name, batch)
            link = (
                (lambda _, shapes=shapes: _zeros(shapes))
                if message is None
                else link_stacks(shapes)
            )
            message, num_runs = link(message), jax.tree.leaves(stack)[0].shape[0] // CHUNKS
            chunk = Chunk(config, name, num_runs)
            for place in range(CHUNKS):
                part = jax.tree.map(
                    lambda x, n=num_runs, i=place: x[i * n : (i + 1) * n], stack
                )
                message, stats = chunk(part, shared, batch, message, op(place), key=key)
                rows.append(stats)
        return chunk.embedding(shared).logits(message["x_BLD"]), rows

    logits_BLV, rows = jax.jit(run)(params)
    whole = jax.jit(lambda params: forward(config, params, batch, is_training=True, key=key))
    want_BLV, stats = whole(params)
    np.testing.assert_allclose(logits_BLV, want_BLV, rtol=1e-4, atol=1e-5)
    if stats is not None:
        loss = np.concatenate([row.balance_loss for row in rows])
        np.testing.assert_allclose(loss, stats.balance_loss, rtol=1e-5)


def _zeros(shapes):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def test_blocks_are_split_off_and_joined_again():
    config = dataclasses.replace(ENCODER_DECODER, scan_layers=True)
    params = make_params(config)
    blocks, shared = split_blocks(config, params)
    assert len(blocks) == 2
    assert not [name for name in tree.named_leaves(shared) if "/blocks/" in name]
    joined = tree.named_leaves(join_blocks(config, blocks, shared))
    whole = tree.named_leaves(params)
    assert joined.keys() == whole.keys()
    assert all(joined[name] is leaf for name, leaf in whole.items())
