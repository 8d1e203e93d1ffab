# SPDX-License-Identifier: Apache-2.0
"""The blocks of docs/atlas.md run, in their order, in one folder."""

import re
import shlex

import pytest

from switchx.analysis.atlas import CONTEXT, LEAST_TIMES, NUM_PERMUTATIONS
from switchx.analysis.atlas_page import MOST_EXPERTS
from switchx.cli.main import main
from switchx.data.labelled_texts import MAX_CHARACTERS
from switchx.routing_atlas import MOST_KNOCK_OUTS
from tests.compilation import T5
from tests.processes import ROOT

PAGE = (ROOT / "docs/atlas.md").read_text(encoding="utf-8")
BRIEF = ["--knockouts=2", "--factors=1"]
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_blocks_run(in_a_folder, one_device, capsys):
    text = (ROOT / "switchx/routing_atlas.py").read_text()
    (in_a_folder / "code.txt").write_text(text[:6000])
    (in_a_folder / "prose.txt").write_text(PAGE[:6000])
    for language, block in BLOCK.findall(PAGE):
        if language == "python":
            exec(block, {})
            continue
        for command in block.splitlines():
            _, name, *options = shlex.split(command)
            brief = {
                "train": [*T5, "--gin.EVAL_EVERY=1"],
                "atlas": ["--knockouts=2", "--factors=1"],
            }
            assert main([name, *options, *brief.get(name, [])]) == 0, command
    said = capsys.readouterr().out
    assert "against/atlas.html" in said and "Without single experts 1" in said


def test_numbers_of_the_page_are_those_of_the_code():
    for said in (
        f"at most {MAX_CHARACTERS:,} characters",
        f"{NUM_PERMUTATIONS:,} permutations of the labels",
        f"/ {NUM_PERMUTATIONS + 1:,}",
        f"ids seen {LEAST_TIMES} times",
        f"with {CONTEXT} neighbours",
        f"the {MOST_EXPERTS} busiest",
        f"`--knockouts=N` ({MOST_KNOCK_OUTS})",
    ):
        assert said in PAGE.replace("\n", " "), said
