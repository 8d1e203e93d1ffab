# SPDX-License-Identifier: Apache-2.0
"""The blocks of docs/data_corpora.md run, in their order, in one folder."""

import importlib.util
import re
import shlex

from switchx.cli.main import main
from tests.data.tokenizer_files import tokenizer_folder
from tests.processes import ROOT

PAGE = ROOT / "docs/data_corpora.md"
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_every_block_runs(tmp_path, monkeypatch, session_cache, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(session_cache))
    for split in ("train", "val", "test_2016_flickr", "test_2017_flickr"):
        for language in ("en", "de"):
            (tmp_path / f"{split}.{language}").write_text(f"{split} in {language}\n")
    names = {}
    for language, block in BLOCK.findall(PAGE.read_text()):
        if "read_bpe" in block:
            if importlib.util.find_spec("tokenizers") is None:
                continue
            tokenizer_folder(tmp_path / "theirs", "qwen")
        if "Multi30k(" in block:
            monkeypatch.setenv("SWITCHX_DATA_DIR", str(tmp_path))
        if language == "python":
            exec(compile(block, PAGE.name, "exec"), names)
        else:
            command, *arguments = shlex.split(block)
            assert command == "switchx"
            assert main(arguments) == 0, capsys.readouterr().err
    assert names["vocabulary"].size == 500
