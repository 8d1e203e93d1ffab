# SPDX-License-Identifier: Apache-2.0
"""Commands: those on a page, and the parsers of those that there are."""

import re
import shlex

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
STARTS = re.compile(
    r"^(?:[A-Z_]+=\S+ )*(?:switchx|python -m switchx|make|pip|pytest|python experiments)[ /]\S"
)


def plain(line: str) -> str:
    """A command line without its comment and with single spaces."""
    return " ".join(shlex.split(line, comments=True)) if "#" in line else " ".join(line.split())


def commands(*texts: str) -> list[str]:
    """Every command of some pages, once, in order."""
    text = "\n".join(texts)
    found = []
    for language, block in BLOCK.findall(text):
        if language in ("bash", "console", "sh"):
            lines = block.replace("\\\n", " ").splitlines()
            found += [plain(line.removeprefix("$ ")) for line in lines]
    spans = INLINE.findall(BLOCK.sub("", text))
    found += [span for span in map(plain, spans) if STARTS.match(span)]
    return [command for command in dict.fromkeys(found) if command]


def python_blocks(text: str) -> list[str]:
    return [block for language, block in BLOCK.findall(text) if language == "python"]


def parsers(parser, name: str = "switchx"):
    """Names and parsers of a command and all below it."""
    yield name, parser
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for word, inner in action.choices.items():
                yield from parsers(inner, f"{name} {word}")
