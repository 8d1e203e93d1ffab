# SPDX-License-Identifier: Apache-2.0
"""`kill -9` between any two writes leaves the last snapshot whole, bit for bit."""

import json
import subprocess
import sys

import pytest

from tests.processes import ROOT


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_the_last_snapshot_is_whole_after_a_kill_at_every_write_point(tmp_path, stride):
    done = subprocess.run(
        [sys.executable, "-m", "switchx.bench.storage_kills", str(tmp_path), str(stride)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["points"] > 80
    assert found["faults"] == {}
