# SPDX-License-Identifier: Apache-2.0
"""One finished small run, shared by the tests that look at it."""

import dataclasses
import pathlib
import subprocess
import sys

import pytest

from tests.integration.runs import arguments, write_corpus
from tests.processes import child_environment


@dataclasses.dataclass(frozen=True)
class FinishedRun:
    """A run folder, the corpus it read, and what the command printed."""

    folder: pathlib.Path
    files: pathlib.Path
    stdout: str
    stderr: str


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory, session_cache) -> FinishedRun:
    """12 uninterrupted steps; tests must not change its folder."""
    base = tmp_path_factory.mktemp("finished")
    files = write_corpus(base)
    process = subprocess.run(
        [sys.executable, "-m", "switchx", "train", *arguments(base / "run", files)],
        env=child_environment(session_cache, devices=1),
        capture_output=True,
        text=True,
        timeout=240,
        cwd=base,
    )
    assert process.returncode == 0, process.stderr
    return FinishedRun(base / "run", files, process.stdout, process.stderr)
