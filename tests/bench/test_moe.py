# SPDX-License-Identifier: Apache-2.0
"""The layers of `switchx bench moe` do what they are compared for."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from switchx.bench import flaxformer_layer
from switchx.bench import moe as bench
from switchx.moe.layer import SwitchFFN
from switchx.planner.program_cost import matrix_flops

SMALL = dataclasses.replace(bench.DENSE, d_model=16, d_ff=32, num_heads=2, d_head=8)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(bench, "DENSE", SMALL)
    monkeypatch.setattr(bench, "ROWS", 2)
    monkeypatch.setattr(bench, "LENGTH", 16)
    monkeypatch.setattr(bench, "NUM_EXPERTS", (8, 32))
    monkeypatch.setattr(bench, "DECODING_EXPERTS", 8)


def test_report_has_every_layer(small):
    report = bench.run(rounds=1)
    layers = [row["layer"] for row in report.results]
    assert layers[:4] == ["dense", "gather 8", "dropless 8", "einsum 8"]
    assert len(layers) == 1 + 2 * 3 + 2 * flaxformer_layer.is_available() + 2


def test_experts_do_the_dense_layers_work():
    """At capacity factor 1.0 and balanced loads; the router comes on top."""
    D, F, tokens = 256, 1024, bench.ROWS * bench.LENGTH
    config = bench.switch_model(8, "gather")
    layer = SwitchFFN(config, key=jax.random.key(0))
    x_BLD = jnp.zeros((bench.ROWS, bench.LENGTH, D))
    is_token_BL = jnp.ones(x_BLD.shape[:2], bool)
    compiled = jax.jit(lambda x_BLD: layer(x_BLD, is_token_BL, is_training=True)[0])
    flops = matrix_flops(compiled.lower(x_BLD).compile().as_text())
    assert flops == tokens * (2 * 2 * D * F + 2 * D * 8)


def test_decoding_counts_the_tokens_experts_alone(small):
    _, (flops, _) = bench.decoding(rounds=1)
    assert flops.value == pytest.approx(1.0, rel=1e-6)
    assert flops.holds
