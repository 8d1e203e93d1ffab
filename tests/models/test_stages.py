# SPDX-License-Identifier: Apache-2.0
"""Blocks are split off a model's parameters and joined again."""

import dataclasses

from switchx import tree
from switchx.models.stages import join_blocks, split_blocks
from tests.training.jobs import ENCODER_DECODER, make_params


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
