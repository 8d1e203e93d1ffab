# SPDX-License-Identifier: Apache-2.0
"""Folders that are not one; of real processes in tests/integration/test_several_hosts.py."""

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from switchx.checkpoint.run_folder import RunFolder, require_shared
from tests.data.refusals import refused


@pytest.fixture
def of_two(monkeypatch):
    """`of_two(index, seen)`: this is process `index` of two, and so they see the token."""

    def be(index: int, seen: list[bool] | None):
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        monkeypatch.setattr(jax, "process_index", lambda: index)
        monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", lambda value: value)
        monkeypatch.setattr(multihost_utils, "sync_global_devices", lambda name: None)
        votes = []

        def gather(vote):
            votes.append(bool(vote))
            return np.array(votes * 2 if seen is None else seen)

        monkeypatch.setattr(multihost_utils, "process_allgather", gather)
        return votes

    return be


def test_what_the_first_writes_is_seen_and_taken_away(tmp_path, of_two):
    votes = of_two(0, None)
    require_shared(RunFolder(tmp_path), 0.0)
    assert votes == [True] and not list(tmp_path.iterdir())


def test_another_folder_is_refused(tmp_path, of_two):
    votes = of_two(1, [True, False])
    with refused(
        f"model_dir='{tmp_path}' is not one folder for all processes: process 1 does not see "
        "what process 0 writes there; give a folder on a file system that all machines share"
    ):
        require_shared(RunFolder(tmp_path), 0.1)
    assert votes == [False]
