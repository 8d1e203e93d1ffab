# SPDX-License-Identifier: Apache-2.0
"""Setting checkpoints aside: by renaming alone, each under a name of its own."""

import logging

from switchx.checkpoint import checkpointer


def make(path, content=b"12345678"):
    path.mkdir(parents=True)
    (path / "data").write_bytes(content)
    return path


def test_what_is_set_aside_keeps_its_bytes_and_is_counted(tmp_path, caplog):
    for content in (b"first", b"second"):
        with caplog.at_level(logging.WARNING):
            checkpointer.set_aside(make(tmp_path / "8", content), "its checksum differs")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["8.damaged-1", "8.damaged-2"]
    assert (tmp_path / "8.damaged-1" / "data").read_bytes() == b"first"
    assert (tmp_path / "8.damaged-2" / "data").read_bytes() == b"second"
    assert checkpointer.damaged_bytes(tmp_path) == len(b"first" + b"second")
    assert f"checkpoint {tmp_path / '8'} is skipped: its checksum differs" in caplog.text


def test_only_unfinished_saves_are_taken_for_unfinished(tmp_path):
    make(tmp_path / "4")
    make(tmp_path / f"6{checkpointer.UNFINISHED}")
    make(tmp_path / f"8{checkpointer.UNFINISHED}")
    checkpointer.set_aside_unfinished(tmp_path, step=6)
    names = {path.name for path in tmp_path.iterdir()}
    assert "4" in names and f"8{checkpointer.UNFINISHED}" in names
    assert f"6{checkpointer.UNFINISHED}" not in names
    checkpointer.set_aside_unfinished(tmp_path)
    assert (tmp_path / "4").exists()
    assert sum(".damaged-" in path.name for path in tmp_path.iterdir()) == 2
