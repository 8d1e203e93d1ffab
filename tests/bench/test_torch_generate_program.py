# SPDX-License-Identifier: Apache-2.0
"""The program that generates with PyTorch's Switch Transformer, where PyTorch is installed."""

import numpy as np
import pytest

from switchx.bench.torch_peer import GENERATION, TorchPeer


@pytest.mark.hf
def test_it_saves_its_weights_and_what_it_says(tmp_path):
    settings = {
        "folder": str(tmp_path), "num_experts": 2, "inputs": [[3, 4], [5, 6]],
        "new_tokens": 3, "vocab_size": 16,
    }  # fmt: skip
    with TorchPeer(GENERATION, settings) as peer:
        peer.ask("2 1")
    assert (tmp_path / "model.safetensors").is_file()
    assert np.load(tmp_path / "tokens_2_1.npy").shape == (2, 3)
