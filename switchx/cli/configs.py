# SPDX-License-Identifier: Apache-2.0
"""`switchx configs`: the gin files that ship, and a copy of one to edit."""

import argparse
import fnmatch
import itertools
import pathlib
import re

from switchx.cli import arguments as shared
from switchx.fields import json_text

_FIELD = re.compile(r"[A-Z][a-z]+: ")  # "Question: ", "Model: " of a run's comment
# Up to a full stop before a new sentence (not that of "et al."), or up to the next field.
_SENTENCE = re.compile(r".*?(?:(?<! al)(?<!e\.g)\.(?=\s+[^a-z\s])|$)", re.MULTILINE)

DESCRIPTION = """\
Lists the gin files that ship, each with its own description, or copies one to edit. Names
are the same in a checkout, in an installed package, and from any folder.

  switchx configs
  switchx configs "runs/pretrain*"
  switchx configs olmoe
  switchx configs runs/pretrain_tiny.gin --copy=mine.gin

A copy includes the same files as the original:

  switchx train --gin_file=mine.gin --model_dir=runs/mine
"""


def add_command(commands) -> None:
    help_text = "list the gin files that ship, or copy one to edit"
    parser = shared.add_command(commands, "configs", run, help_text, DESCRIPTION)
    parser.add_argument(
        "pattern",
        nargs="?",
        default="",
        metavar="PATTERN",
        help="part of a name, or a pattern such as 'runs/*tiny*' (default: all)",
    )
    parser.add_argument(
        "--copy", type=pathlib.Path, metavar="FILE", help="copy the one file found to FILE"
    )
    shared.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from switchx.gin_config.files import close_file, configs_dir

    root, pattern = configs_dir(), arguments.pattern.removeprefix("configs/")
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.gin"))
    if pattern in names:
        found = [pattern]
    elif set(pattern) & set("*?["):
        found = fnmatch.filter(names, pattern)
    else:
        found = [name for name in names if pattern in name]
    if not found:
        hint = close_file(pattern, [root])
        raise ValueError(f"no gin file that ships fits {arguments.pattern!r}; {hint}")
    if arguments.copy is not None:
        return _copy(root, found, arguments)
    sentences = {f"configs/{name}": _first_sentence(root / name) for name in found}
    if arguments.json:
        print(json_text(sentences, ensure_ascii=False))
        return 0
    width = max(map(len, sentences))
    for name, sentence in sentences.items():
        print(f"{name:<{width}}  {sentence}")
    return 0


def _copy(root: pathlib.Path, found: list[str], arguments: argparse.Namespace) -> int:
    target = arguments.copy
    if len(found) > 1:
        raise ValueError(
            f"--copy is for one file, and {len(found)} fit {arguments.pattern!r}: "
            f"{', '.join(found[:5])}{', ...' * (len(found) > 5)}; give the whole name of one"
        )
    if not target.parent.is_dir():
        raise ValueError(f"--copy={target}: there is no folder {target.parent}; make it first")
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write((root / found[0]).read_text(encoding="utf-8"))
    except FileExistsError:
        raise ValueError(f"--copy={target} exists; give a file that does not exist") from None
    print(f"{target} is a copy of configs/{found[0]}")
    return 0


def _first_sentence(path: pathlib.Path) -> str:
    """The first sentence of a gin file's leading comment, or the first field of a run's."""
    comment = itertools.takewhile(
        lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines()
    )
    lines = [" ".join(line.lstrip("#").split()) for line in comment]
    text = " ".join(f"\n{line}" if _FIELD.match(line) else line for line in lines)
    return _SENTENCE.match(text.strip())[0].strip()
