# SPDX-License-Identifier: Apache-2.0
"""docs/kernels.md and compiled.md: Python runs, commands exist, what is exported is named."""

import re
import shlex

import pallas_kernels
from pallas_kernels.implementations import NAMES
from switchx.cli.main import _parse, _parser
from tests.processes import ROOT

PAGE = (ROOT / "docs/kernels.md").read_text(encoding="utf-8")
COMPILED = (ROOT / "docs/compiled.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_blocks_are_right(capsys):
    blocks = BLOCK.findall(PAGE)
    [python] = (text for kind, text in blocks if kind == "python")
    exec(python, {})
    assert capsys.readouterr().out.startswith("0.1")  # 4 of 32 bits, and the scales
    commands = [line for kind, text in blocks if kind == "bash" for line in text.splitlines()]
    found = [_parse(_parser(), shlex.split(command)[1:]) for command in commands]
    assert [words.what for words in found] == ["kernels", "kernels", *["accelerator"] * 3]
    assert all(command.startswith("switchx ") for command in commands)


def test_compilers_are_installed_and_asked_as_the_page_says():
    commands = [line for _, text in BLOCK.findall(COMPILED) for line in text.splitlines()]
    install, *asked = map(shlex.split, commands)
    assert install[:3] == ["python", "-m", "pallas_kernels.aot.install"]
    assert [words[:2] for words in asked] == [["switchx", "compile"]] * 2 + [
        ["switchx", "bench"]
    ]
    assert all(_parse(_parser(), words[1:]).run for words in asked)


def test_everything_that_is_exported_is_named():
    missing = [name for name in pallas_kernels.__all__ if f"`{name}" not in PAGE]
    assert set(missing) <= {"dequantize", "quantization_error"}
    assert all(f"| `{name}` (" in PAGE for name in NAMES)
