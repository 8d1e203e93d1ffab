# SPDX-License-Identifier: Apache-2.0
"""Descriptions name the thing before what it is of; stored names are nouns of the field."""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("switchx", "pallas_kernels")

# Descriptions of attributes, arguments or results such as `seed: of the parameters`.
HEADLESS = re.compile(r"^\s+[\w, ]+: of\b")


def headless_descriptions() -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if HEADLESS.match(line)
    ]


def test_no_description_begins_with_of():
    assert headless_descriptions() == [], "begin with a noun: the thing before what it is of"
    assert HEADLESS.match("        params: of the teacher.")
    assert HEADLESS.match("    value, sums: of `gradients`.")
    assert not HEADLESS.match("        params: parameters of the teacher.")
    assert not HEADLESS.match("        window: offset of the first record.")


# Names of variables and arguments that say nothing by themselves; their number may only fall.
VAGUE, MOST_VAGUE = {"of", "there", "said", "about", "before"}, 18


def vague_names(text: str) -> list[str]:
    return [
        node.arg if isinstance(node, ast.arg) else node.id
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.arg)
        and node.arg in VAGUE
        or isinstance(node, ast.Name)
        and isinstance(node.ctx, ast.Store)
        and node.id in VAGUE
    ]


def test_vague_names_only_fall():
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    assert (
        sum(len(vague_names(path.read_text(encoding="utf-8"))) for path in paths) <= MOST_VAGUE
    )
    assert vague_names("def f(of, x): there = said(x)") == ["of", "there"]
