# SPDX-License-Identifier: Apache-2.0
"""Tests of kernels do not see what was tuned on the machine that runs them."""

import pytest


@pytest.fixture(autouse=True)
def tilings_file(tmp_path, monkeypatch):
    """The cache of tuned tilings: a file of the test's own, not there yet."""
    path = tmp_path / "kernel_tilings.json"
    monkeypatch.setenv("PALLAS_KERNELS_TILINGS", str(path))
    return path
