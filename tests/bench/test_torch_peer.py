# SPDX-License-Identifier: Apache-2.0
"""The PyTorch peer: found only where it is installed, and its end is noticed."""

import pytest

from switchx.bench import torch_peer


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
