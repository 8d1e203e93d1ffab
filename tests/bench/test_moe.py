# SPDX-License-Identifier: Apache-2.0
"""The layers of `switchx bench moe` do what they are compared for."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.bench import moe as bench
from switchx.bench import peer_layers
from switchx.compiled.flops import matrix_flops
from switchx.models.params import params_of
from switchx.moe.layer import SwitchFFN

SMALL = dataclasses.replace(bench.DENSE, d_model=16, d_ff=32, num_heads=2, d_head=8)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(bench, "DENSE", SMALL)
    monkeypatch.setattr(bench, "ROWS", 2)
    monkeypatch.setattr(bench, "LENGTH", 16)
    monkeypatch.setattr(bench, "NUM_EXPERTS", (8, 32))
    monkeypatch.setattr(bench, "DECODING_EXPERTS", 8)
    monkeypatch.setattr(bench, "DISPATCHERS", ("gather", "einsum"))


def test_report_has_every_layer(small):
    report = bench.run(rounds=1)
    layers = [row["layer"] for row in report.results]
    assert layers[:4] == ["dense", "gather 8", "einsum 8", "gather 32"]
    assert len(layers) == 1 + 2 * 2 + 2 * peer_layers.has_peer("flaxformer") + 2


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


def test_flaxformer_is_there_with_everything_it_imports(tmp_path, monkeypatch):
    for name in peer_layers.NEEDED["flaxformer"]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in peer_layers.NEEDED["flaxformer"]:
        assert not peer_layers.has_peer("flaxformer")
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    assert peer_layers.has_peer("flaxformer")


@pytest.mark.skipif(
    not peer_layers.has_peer("flaxformer"),
    reason="needs a clone of google/flaxformer on PYTHONPATH and `pip install aqtp`",
)
def test_with_our_weights_flaxformers_layer_gives_our_outputs(key, monkeypatch):
    """Capacity factor 1.0, so tokens are dropped, and the same ones.

    It makes at least as many groups as there are experts, times the devices.
    """
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    config = bench.switch_model(4, "gather")
    switch = dataclasses.replace(config.switch, group_size=64 // 4)
    config = dataclasses.replace(config, d_model=16, d_ff=32, switch=switch)
    ours = SwitchFFN(config, key=key)
    x_BLD = jnp.array(np.random.default_rng(0).normal(size=(2, 32, 16)), jnp.float32)
    y_BLD, stats = ours(x_BLD, jnp.ones((2, 32), bool), is_training=False)
    assert stats.dropped > 0
    shape = peer_layers.LayerShape(4, 16, 32, 2, 32)
    layer = peer_layers.flaxformer_layer(shape, group_size=64)
    forward, _ = peer_layers.flaxformer_forward(layer, x_BLD)
    params = params_of(ours)
    theirs, balance_loss = forward(
        {
            "expert": {
                "wi": {"kernel": params["experts"]["w_in_EDF"]},
                "wo": {"kernel": params["experts"]["w_out_EFD"]},
            },
            "router": {"router_weights": {"w": {"kernel": params["w_router_DE"]}}},
        },
        x_BLD,
    )
    np.testing.assert_allclose(theirs, y_BLD, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(balance_loss, stats.balance_loss, rtol=1e-5)
