# SPDX-License-Identifier: Apache-2.0
"""The blocks of docs/data_corpora.md run, in their order, in one folder."""

import re
import shlex
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/data_corpora.md"
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_every_block_runs(tmp_path, monkeypatch, run_cli, shared_dir):
    monkeypatch.chdir(tmp_path)
    names = {}
    for language, block in BLOCK.findall(PAGE.read_text()):
        if "Multi30k(" in block:
            monkeypatch.setenv("SWITCHX_DATA_DIR", str(shared_dir / "data"))
        if language == "python":
            exec(compile(block, PAGE.name, "exec"), names)
        else:
            command, *arguments = shlex.split(block)
            assert command == "switchx"
            result = run_cli(*arguments)
            assert result.returncode == 0, result.stderr
    assert names["vocabulary"].size == 500
