# SPDX-License-Identifier: Apache-2.0
"""The PyTorch peer: found only where it is installed, its end is noticed, its tasks run."""

import numpy as np
import pytest

from switchx.bench import decode, torch_peer
from switchx.bench.torch_peer import PROGRAM, TorchPeer
from switchx.interop.huggingface import describe
from switchx.models.config import ModelConfig, SwitchConfig

CONFIG = ModelConfig(
    "encoder_decoder", 16, 8, 16, 2, 4, 2, 2, activation="relu", switch=SwitchConfig(2)
)


def test_is_available_asks_without_importing(monkeypatch):
    monkeypatch.setattr(torch_peer.importlib.util, "find_spec", lambda name: name == "torch")
    assert not torch_peer.is_available()
    monkeypatch.setattr(torch_peer.importlib.util, "find_spec", lambda name: object())
    assert torch_peer.is_available()


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
