# SPDX-License-Identifier: Apache-2.0
"""Descriptions in docstrings name the thing before what it is of."""

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
