# SPDX-License-Identifier: Apache-2.0
"""The program that trains PyTorch's Switch Transformer, where PyTorch is installed."""

import pytest

from switchx.bench.torch_peer import TorchPeer


@pytest.mark.hf
def test_it_takes_a_step_for_each_line():
    with TorchPeer(2, batch=2, inputs=8, targets=4) as peer:
        peer.step()
