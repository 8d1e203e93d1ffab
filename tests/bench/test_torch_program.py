# SPDX-License-Identifier: Apache-2.0
"""The program that trains PyTorch's Switch Transformer, where PyTorch is installed."""

import pytest

from switchx.bench.torch_peer import TRAINING, TorchPeer


@pytest.mark.hf
def test_it_takes_a_step_for_each_line():
    settings = {"num_experts": 2, "batch": 2, "inputs": 8, "targets": 4}
    with TorchPeer(TRAINING, settings) as peer:
        peer.ask("step")
