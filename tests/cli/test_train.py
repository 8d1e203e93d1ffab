# SPDX-License-Identifier: Apache-2.0
"""What `switchx train` records of the code that ran. Training: tests/integration."""

import os
import shutil
import subprocess

import pytest

from switchx.cli import train
from switchx.hosts.processes import Processes


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository in which switchx/cli/train.py lies, not yet added."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    file = tmp_path / "switchx/cli/train.py"
    file.parent.mkdir(parents=True)
    file.write_text("1\n")
    (tmp_path / "other").write_text("")
    monkeypatch.setattr(train, "__file__", str(file))

    def git(*words):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", *identity, *words]
        done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "--quiet")
    git("add", "other")
    git("commit", "--quiet", "--message=first")
    return git


def test_commit_of_the_checkout(repository, tmp_path):
    repository("add", "switchx")
    repository("commit", "--quiet", "--message=second")
    assert train.git_commit() == repository("rev-parse", "HEAD")
    (tmp_path / "switchx/cli/train.py").write_text("2\n")
    assert train.git_commit() == repository("rev-parse", "HEAD") + "-dirty"


def test_copy_inside_of_somebody_elses_repository_has_no_commit(repository):
    assert train.git_commit() == "unknown"


def test_no_repository_and_no_git(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "__file__", str(tmp_path / "train.py"))
    assert train.git_commit() == "unknown"
    monkeypatch.setenv("PATH", "")
    assert train.git_commit() == "unknown"


def test_a_launcher_is_told_that_a_stopped_run_is_to_go_on():
    several = Processes("localhost:8476", 2, 0)
    assert train.exit_status(is_finished=True, processes=several) == 0
    assert train.exit_status(is_finished=False, processes=several) == os.EX_TEMPFAIL == 75
    # A person who ends a run with Ctrl-C did what was meant.
    assert train.exit_status(is_finished=False, processes=None) == 0
