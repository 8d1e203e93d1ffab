# SPDX-License-Identifier: Apache-2.0
"""Flaxformer's layer is found where it can be, and computes what ours does."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.bench import flaxformer_layer, moe
from switchx.models.params import params_of
from switchx.moe.layer import SwitchFFN


def test_it_is_available_with_everything_it_imports(tmp_path, monkeypatch):
    for name in flaxformer_layer.NEEDED:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert not flaxformer_layer.is_available()
    for name in flaxformer_layer.NEEDED:
        assert not flaxformer_layer.is_available()
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    assert flaxformer_layer.is_available()


@pytest.mark.skipif(
    not flaxformer_layer.is_available(),
    reason="needs a clone of google/flaxformer on PYTHONPATH and `pip install aqtp`",
)
def test_with_our_weights_it_gives_our_outputs(key, monkeypatch):
    """Capacity factor 1.0, so tokens are dropped, and the same ones.

    It makes at least as many groups as there are experts, times the devices.
    """
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    config = moe.switch_model(4, "gather")
    switch = dataclasses.replace(config.switch, group_size=64 // 4)
    config = dataclasses.replace(config, d_model=16, d_ff=32, switch=switch)
    ours = SwitchFFN(config, key=key)
    x_BLD = jnp.array(np.random.default_rng(0).normal(size=(2, 32, 16)), jnp.float32)
    y_BLD, stats = ours(x_BLD, jnp.ones((2, 32), bool), is_training=False)
    assert stats.dropped > 0
    layer = flaxformer_layer.masked_layer(4, 32, group_size=64)
    forward, _ = flaxformer_layer.training_arguments(layer, x_BLD)
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
