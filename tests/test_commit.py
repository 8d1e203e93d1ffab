# SPDX-License-Identifier: Apache-2.0
"""Where a number comes from: the commit of this code, never of another repository."""

import json
import shutil
import subprocess

import jax
import pytest

from switchx import whole_folders
from switchx.results import Report, environment


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository in which a copy of switchx lies that it does not track."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    file = tmp_path / "switchx/whole_folders.py"
    file.parent.mkdir(parents=True)
    file.write_text("1\n")
    (tmp_path / "other").write_text("")
    monkeypatch.setattr(whole_folders, "__file__", str(file))

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
    assert whole_folders.git_commit() == repository("rev-parse", "HEAD")
    (tmp_path / "switchx/whole_folders.py").write_text("2\n")
    assert whole_folders.git_commit() == repository("rev-parse", "HEAD") + "-dirty"


def test_copies_and_folders_without_git_have_no_commit(repository, tmp_path, monkeypatch):
    # Neither a run, nor an artifact, nor a bench is stamped with that repository's commit.
    assert whole_folders.git_commit() == "unknown"
    report = json.loads(Report("bench x", [], []).as_json())
    assert report["environment"]["commit"] == "unknown"
    monkeypatch.setattr(whole_folders, "__file__", str(tmp_path / "whole_folders.py"))
    assert whole_folders.git_commit() == "unknown"
    monkeypatch.setenv("PATH", "")
    assert whole_folders.git_commit() == "unknown"


def test_environment_says_whether_malloc_was_tuned(monkeypatch):
    for name, value in ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"), ("SWITCHX_MALLOC", "keep"):
        monkeypatch.delenv(name, raising=False)
        found = environment()
        assert (found["jax"], found[name.lower()]) == (jax.__version__, None)
        monkeypatch.setenv(name, value)
        assert environment()[name.lower()] == value
