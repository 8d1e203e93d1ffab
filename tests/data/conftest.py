# SPDX-License-Identifier: Apache-2.0
"""Tests of data see neither the user's cache nor the user's data folder."""

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """An empty cache folder."""
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.delenv("SWITCHX_DATA_DIR", raising=False)
    return cache / "switchx"
