# SPDX-License-Identifier: Apache-2.0
"""Peers: found only where they are installed, do our work, and their end is noticed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.bench import compiled_layer, compiled_peers, decode, moe
from switchx.bench.peers import ctranslate2_peer, torch_peer
from switchx.bench.peers import layers as peer_layers
from switchx.bench.peers.layers import LayerShape
from switchx.bench.peers.torch_peer import PROGRAM, TorchPeer
from switchx.cli.main import main
from switchx.interop.huggingface import describe
from switchx.models.config import ModelConfig, SwitchConfig
from switchx.models.params import params_of
from switchx.moe.layer import SwitchFFN
from switchx.results import Report

CONFIG = ModelConfig(
    "encoder_decoder", 16, 8, 16, 2, 4, 2, 2, activation="relu", switch=SwitchConfig(2)
)


DENSE = ModelConfig(
    "encoder_decoder", 64, 16, 32, 2, 8, 1, 1, activation="relu", init_scale=2.0
)

# PyTorch.


def test_a_peer_that_ends_is_an_error(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import sys; sys.stdin.readline(); print('done')")
    peer = torch_peer.TorchPeer(program, {})
    peer.ask("step")
    with pytest.raises(RuntimeError, match="the PyTorch peer ended"):
        peer.ask("step")


@pytest.mark.hf
def test_it_takes_a_training_step_for_each_line():
    config = describe(CONFIG)[0] | {"expert_capacity": 4}
    settings = {"task": "train", "config": config, "batch": 2, "inputs": 8, "targets": 4}
    with TorchPeer(PROGRAM, settings) as peer:
        peer.ask("step")
        peer.ask("step")


@pytest.mark.hf
def test_it_saves_its_weights_and_the_tokens_that_it_generates(tmp_path):
    settings = {
        "task": "generate", "folder": str(tmp_path), "config": describe(CONFIG)[0],
        "inputs": [[3, 4], [5, 6]], "new_tokens": 3,
    }  # fmt: skip
    # The first stage of the compiler alone, which takes seconds.
    with TorchPeer(PROGRAM, settings | {"backend": "eager"}) as peer:
        peer.ask("2 1")
        saved = tmp_path / "tokens_2_1.npy"
        eager = np.load(saved)
        saved.unlink()
        peer.ask("2 1 compiled")
        assert np.load(saved).tolist() == eager.tolist()
    assert (tmp_path / "model.safetensors").is_file()
    assert eager.shape == (2, 3)


def test_what_cannot_be_compiled_is_said(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nfor line in sys.stdin:\n"
        "    print('failed E: why' if 'compiled' in line else 'done', flush=True)"
    )
    with TorchPeer(program, {}) as peer:
        ways, refused = decode._of_torch(peer, "2 1", "small")
        assert [way.name for way in ways] == ["transformers, small"]
        assert refused == [{"decoding": "transformers compiled, small", "failed": "E: why"}]
        ways[0].step()


# CTranslate2.


@pytest.mark.hf
@pytest.mark.slow
@pytest.mark.skipif(
    ctranslate2_peer.missing() is not None, reason=str(ctranslate2_peer.missing())
)
def test_texts_are_the_same(monkeypatch):
    monkeypatch.setattr(ctranslate2_peer, "CASES", ((2, 1), (2, 4)))
    monkeypatch.setattr(decode, "DENSE", DENSE)
    config = dataclasses.replace(DENSE, scan_layers=True)
    rows, checks = ctranslate2_peer.ratios(
        config, decode.inputs(2), decode.NEW_TOKENS, decode.decoder, 1
    )
    assert [check.name for check in checks] == ["ctranslate2_ratio", "ctranslate2_ratio_int8"]
    assert all(check.value > 0 for check in checks)
    float32 = [row for row in rows if row["peer"].startswith("CTranslate2 float32")]
    assert len(rows) == 6 and [row["same_texts"] for row in float32] == [1.0, 1.0]


# Flaxformer and MaxText.


@pytest.mark.skipif(
    not peer_layers.has_peer("flaxformer"),
    reason="needs a clone of google/flaxformer on PYTHONPATH and `pip install aqtp`",
)
def test_with_our_weights_flaxformers_layer_gives_our_outputs(key, monkeypatch):
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


def test_a_folder_that_is_no_clone_is_an_error(tmp_path, capsys):
    (tmp_path / "src" / "maxtext").mkdir(parents=True)
    (tmp_path / "src" / "maxtext" / "__init__.py").touch()
    assert peer_layers.folder_on_path(str(tmp_path)) == str(tmp_path / "src")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main(["bench", "compiled", f"--peer={empty}"]) == 2
    assert f"--peer={empty}: expected a clone of google/flaxformer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("modules", "why"),
    [
        (["flaxformer"], "needs not_there; install it as docs/compiled.md says"),
        (["flaxformer", "not_there"], "no compiler"),
    ],
)
def test_why_a_given_peer_is_not_compared(modules, why, tmp_path, monkeypatch):
    for name in modules:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    monkeypatch.setitem(peer_layers.NEEDED, "flaxformer", ("flaxformer", "not_there"))
    monkeypatch.setattr(compiled_layer, "run", lambda note: Report("bench compiled", [], []))
    not_run = {"target": "v5e:2x2", "not_run": "no compiler"}
    monkeypatch.setattr(compiled_peers, "rows_of_child", lambda *words: [not_run])
    report = compiled_peers.run(lambda text: None, [str(tmp_path)], is_quick=True)
    rows = [row for row in report.results if row.get("layer") == "flaxformer"]
    assert rows == [{"layer": "flaxformer", "target": "v5e:2x2", "not_compared": why}]


@pytest.mark.slow
@pytest.mark.skipif(
    not peer_layers.has_peer("maxtext"),
    reason="needs a clone of AI-Hypercomputer/maxtext with its requirements on PYTHONPATH",
)
def test_with_our_weights_maxtexts_layer_gives_our_outputs(key):
    """But for the gate: MaxText normalizes after its choice of one, and multiplies by 1."""
    shape = LayerShape(4, 128, 128, 2, 32, is_gated=True, capacity_factor=None)
    ours = SwitchFFN(compiled_peers.our_config("dropless", shape), key=key)
    params = params_of(ours)
    x_BLD = jnp.array(np.random.default_rng(0).normal(size=(2, 32, 128)), jnp.float32)
    y_BLD, stats = ours(x_BLD, jnp.ones((2, 32), bool), is_training=False)
    [choices] = stats.choices
    forward, theirs = peer_layers.maxtext_forward(shape, jax.devices()[0])
    experts = params["experts"]
    named = {
        "gate": params["w_router_DE"], "wi_0": experts["w_in_EDF"],
        "wi_1": experts["w_gate_EDF"], "wo": experts["w_out_EFD"],
    }  # fmt: skip
    theirs = jax.tree_util.tree_map_with_path(lambda path, _: named[path[0].key], theirs)
    found_BLD, _ = forward(theirs, x_BLD)
    np.testing.assert_allclose(found_BLD * choices.gate_BLS, y_BLD, rtol=1e-3, atol=1e-4)
