# SPDX-License-Identifier: Apache-2.0
"""Placement of sparse blocks: transformers' rule by hand, and our fields for it."""

import dataclasses

import pytest

from switchx.interop.huggingface_config import num_sparse, sparse_blocks, switch_layers
from switchx.models.config import SwitchConfig
from tests.interop.folders import T5

CASES = [
    (12, 6, (1, 3, 5, 7, 9, 11)),
    (12, 3, (1, 5, 9)),
    (12, 12, tuple(range(12))),
    (12, 5, (1, 3, 5, 7, 9, 11)),  # a step of 12 // 5
    (4, 0, (1,)),  # transformers means none, and makes one
    (1, 0, (0,)),
    (2, 3, ()),  # a step of 0
    (5, 2, (1, 3)),
]


@pytest.mark.parametrize("num_layers, count, blocks", CASES)
def test_sparse_blocks_and_a_count_for_them(num_layers, count, blocks):
    assert sparse_blocks(num_layers, count) == blocks
    assert sparse_blocks(num_layers, num_sparse(num_layers, blocks)) == blocks


def test_blocks_that_no_count_gives():
    assert num_sparse(12, (3, 7, 11)) is None
    assert num_sparse(4, (0,)) is None


@pytest.mark.parametrize(
    "layers, encoder, decoder, fields",
    [
        ((12, 12), sparse_blocks(12, 6), sparse_blocks(12, 6), {"every": 2, "stacks": "all"}),
        ((24, 12), sparse_blocks(24, 12), sparse_blocks(12, 6), {"every": 2, "stacks": "all"}),
        ((2, 3), (0, 1), (0, 1, 2), {"every": 1, "stacks": "all"}),
        ((4, 2), (1, 3), (), {"every": 2, "stacks": "encoder"}),
        ((12, 12), (1, 5, 9), (1, 5, 9), None),
        ((4, 3), (1, 3), (1,), None),
        ((4, 4), (), (1, 3), None),
    ],
)
def test_fields_give_these_blocks(layers, encoder, decoder, fields):
    config = dataclasses.replace(T5, num_encoder_layers=layers[0], num_decoder_layers=layers[1])
    got = switch_layers(config, encoder, decoder)
    assert got == (fields or {"encoder_layers": encoder, "decoder_layers": decoder})
    config = dataclasses.replace(config, switch=SwitchConfig(4, **got))
    for stack, blocks in (("encoder", encoder), ("decoder", decoder)):
        count = getattr(config, f"num_{stack}_layers")
        assert tuple(i for i in range(count) if config.is_sparse(i, stack)) == blocks
