# SPDX-License-Identifier: Apache-2.0
"""`python -m switchx` is the command: its help takes no time, its status is the command's."""

import resource
import subprocess
import sys

from tests.processes import ROOT


def run_module(*words):
    return subprocess.run(
        [sys.executable, "-m", "switchx", *words], cwd=ROOT, capture_output=True, text=True
    )


def test_help_takes_no_time():
    """0.1 s of the processor; Python's own start is most of it."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = run_module("--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert process.returncode == 0
    assert all(f"\n    {name} " in process.stdout for name in ("train", "eval", "bench"))
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds < 1.0  # far below what JAX takes, on a machine that is busy too


def test_status_of_a_command_is_the_status_of_the_process():
    process = run_module("trian")
    assert process.returncode == 2
    assert "train" in process.stderr
