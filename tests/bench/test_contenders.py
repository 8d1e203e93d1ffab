# SPDX-License-Identifier: Apache-2.0
"""The contenders of `switchx bench train` and `moe` do equal work, and train."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from switchx.bench import moe, train
from switchx.compiled.flops import matrix_flops
from switchx.models.flops import count_parameters, flops_per_sequence
from switchx.moe.layer import SwitchFFN

SMALL = dataclasses.replace(moe.DENSE, d_model=16, d_ff=32, num_heads=2, d_head=8)


def test_switch_and_dense_do_equal_work():
    """At capacity factor 1.0: the dense model's FLOPs, and E times its FFNs."""
    lengths = train.INPUTS, train.TARGETS
    dense = flops_per_sequence(train.DENSE, *lengths)
    switch = flops_per_sequence(train.switch_model(64), *lengths)
    assert switch.total == dense.total
    added = count_parameters(train.switch_model(64)).total - count_parameters(train.DENSE).total
    router = 4 * 256 * 64
    assert added == 4 * 63 * 2 * 256 * 1024 + router


@pytest.mark.slow
def test_a_contender_trains():
    switch = dataclasses.replace(train.switch_model(4).switch, every=1)
    small = dataclasses.replace(
        train.DENSE, d_model=16, d_ff=32, num_heads=2, d_head=8, num_encoder_layers=1,
        num_decoder_layers=1, switch=switch,
    )  # fmt: skip
    each = train.contender("small", small)
    losses = [float(each.step().loss) for _ in range(3)]
    assert losses[-1] < losses[0]
    assert each.peak_bytes > count_parameters(small).total * 4


def test_experts_do_the_dense_layers_work():
    """At capacity factor 1.0 and balanced loads; the router comes on top."""
    D, F, tokens = 256, 1024, moe.ROWS * moe.LENGTH
    config = moe.switch_model(8, "gather")
    layer = SwitchFFN(config, key=jax.random.key(0))
    x_BLD = jnp.zeros((moe.ROWS, moe.LENGTH, D))
    is_token_BL = jnp.ones(x_BLD.shape[:2], bool)
    compiled = jax.jit(lambda x_BLD: layer(x_BLD, is_token_BL, is_training=True)[0])
    flops = matrix_flops(compiled.lower(x_BLD).compile().as_text())
    assert flops == tokens * (2 * 2 * D * F + 2 * D * 8)


def test_decoding_counts_the_tokens_experts_alone(monkeypatch):
    monkeypatch.setattr(moe, "DENSE", SMALL)
    monkeypatch.setattr(moe, "DECODING_EXPERTS", 8)
    _, (flops, _) = moe.decoding(rounds=1)
    assert flops.value == pytest.approx(1.0, rel=1e-6)
    assert flops.holds
