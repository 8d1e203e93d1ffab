# SPDX-License-Identifier: Apache-2.0
"""Run folders: writability, the lock between trainers, errors that say what was found."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from switchx.checkpoint.run_folder import RunFolder


def test_create_makes_the_folder_and_leaves_nothing_behind(tmp_path):
    run = RunFolder(tmp_path / "a" / "run").create()
    assert run.root.is_dir()
    assert list(run.root.iterdir()) == []
    assert RunFolder(str(run.path)).create().root == run.root


def test_folder_below_a_file_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ValueError, match=r"cannot be written \(Not a directory: .*give a folder"
    ):
        RunFolder(tmp_path / "file" / "run").create()


def test_read_only_folder_is_refused_at_once():
    path = "/proc/self/run"  # writable for nobody, root included
    if not os.path.isdir("/proc/self"):
        pytest.skip("this system has no /proc")
    with pytest.raises(ValueError, match=f"model_dir='{path}' cannot be written"):
        RunFolder(path).create()


def test_bucket_address_is_refused():
    with pytest.raises(
        ValueError, match=r"model_dir='gs://bucket/run' is an address, not a folder"
    ):
        RunFolder("gs://bucket/run")


def test_second_trainer_is_refused_and_told_who_holds_the_folder(tmp_path):
    run = RunFolder(tmp_path).create()
    code = (
        "import sys; from switchx.checkpoint.run_folder import RunFolder\n"
        "with RunFolder(sys.argv[1]).locked(): print('locked', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=pathlib.Path(__file__).parents[2],
    )  # fmt: skip
    try:
        assert holder.stdout.readline() == "locked\n"
        message = rf"is being trained by process {holder.pid} on .*; wait for it, end it"
        with pytest.raises(ValueError, match=message), run.locked():
            pass
    finally:
        holder.kill()  # SIGKILL: the system must free the lock
        holder.communicate()
    with run.locked():
        assert re.search(rf'"pid": {os.getpid()}\b', run.lock_file.read_text())


def test_found_describes_what_is_there(tmp_path):
    assert RunFolder(tmp_path / "none").found() == "nothing is there"
    assert RunFolder(tmp_path).found() == "empty"
    (tmp_path / "b.txt").write_text("")
    (tmp_path / "a").mkdir()
    assert RunFolder(tmp_path).found() == "found a, b.txt"
    assert RunFolder(tmp_path / "b.txt").found() == "a file is there"
