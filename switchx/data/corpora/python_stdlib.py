# SPDX-License-Identifier: Apache-2.0
"""The built-in corpus: source and documentation of the running interpreter's library.

Every machine has it, nothing is downloaded. CPython 3.11 gives 29 MB of text, 11 MB without
its `test` package, and 8 MB without the further parts that Debian ships separately (its
packages `libpython3-testsuite`, `idle`, `python3-tk`, ... bring them back).
"""

import dataclasses
import io
import os
import re
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

from switchx.data.corpora.corpus import Account, CorpusSource, fingerprint_of
from switchx.data.corpora.prepared import Recipe, open_prepared
from switchx.data.corpora.text_files import cut_lines, hold_out, require_cut, text_digest
from switchx.fields import require

# Not part of the library, or (the build's settings) machine-generated about the machine.
_LEFT_OUT = re.compile(r"(site|dist)-packages|__pycache__|_sysconfigdata.*|config-.*")
_TOPICS = Path("pydoc_data/topics.py")

_BLOCK_START = re.compile(r"(?<=\n\n)(?=\S)")
# A line of a table: a number or a string first, as in the encodings and HTML's entities.
_TABLE_LINE = re.compile(r"\s*[\[({]*(?:[bru]{0,2}['\"]|[-+]?\d)")
_MIN_TABLE_LINES = 40
_MIN_TABLE_FRACTION = 0.7
# Shorter blocks (`import sys`) may recur without teaching a model to recite.
_MIN_DUPLICATE_CHARACTERS = 80


@dataclasses.dataclass(frozen=True)
class PythonStdlib:
    """The standard library as text.

    Files that do not decode and generated tables are left out; a block (text between blank
    lines at top level, so licence headers too) that occurred before is dropped. What remains
    of a file is held out for validation, or not, as a whole, by its hash.

    Attributes:
        validation_fraction: fraction of the files held out for validation.
        max_characters: longest document; longer ones are cut, at definitions where possible.
    """

    name = "python_stdlib"

    validation_fraction: float = 0.05
    max_characters: int = 8000

    def __post_init__(self):
        require_cut(self)

    def open(self, split: str, data_dir: str | None) -> CorpusSource:
        """Split `train` or `validation`; examples are `{"text": ...}`. Takes seconds at first.

        Raises:
            ValueError: there is no such split, or the interpreter has no sources.
        """
        root = Path(sysconfig.get_path("stdlib"))
        files = {path: (root / path).read_bytes() for path in _source_paths(root)}
        require(
            files,
            f"no source files of the standard library in {root}: this interpreter comes "
            "without; use a Python that has them, or the corpus TextFiles",
        )
        key = fingerprint_of(
            "python_stdlib 1", self, *(part for item in files.items() for part in item)
        )

        def documents(texts: Iterable[str]) -> Iterator[dict[str, str]]:
            for text in texts:
                for document in cut_lines(text.splitlines(True), self.max_characters):
                    yield {"text": document}

        def make_splits() -> dict[str, Iterator[dict[str, str]]]:
            texts, fraction = clean(_decode(files)), self.validation_fraction
            splits = hold_out(lambda: texts, text_digest, fraction, "the standard library")
            return {name: documents(texts) for name, texts in splits.items()}

        sizes = {root / path: len(content) for path, content in files.items()}
        account = Account.of(self.name, sizes)
        recipe = Recipe(self.name, key, ("text",), make_splits, account)
        return open_prepared(recipe, split, data_dir)


def clean(texts: Iterable[str]) -> list[str]:
    """Drops tables, blocks that occurred before, and texts that are left empty."""
    seen = set()
    cleaned = []
    for text in texts:
        blocks = []
        for block in _BLOCK_START.split(text):
            key = block.strip()
            if key in seen or _is_table(block):
                continue
            if len(key) > _MIN_DUPLICATE_CHARACTERS:
                seen.add(key)
            blocks.append(block)
        if any(block.strip() for block in blocks):
            cleaned.append("".join(blocks))
    return cleaned


def _is_table(block: str) -> bool:
    lines = [line for line in block.splitlines() if line.strip()]
    num_table_lines = sum(_TABLE_LINE.match(line) is not None for line in lines)
    is_long = len(lines) >= _MIN_TABLE_LINES
    return is_long and num_table_lines >= _MIN_TABLE_FRACTION * len(lines)


def _source_paths(root: Path) -> list[Path]:
    """Paths of the library's sources below `root`, in a fixed order."""
    paths = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not _LEFT_OUT.fullmatch(name)]
        sources = (n for n in names if n.endswith(".py") and not _LEFT_OUT.fullmatch(n))
        paths += [Path(folder, name).relative_to(root) for name in sources]
    return sorted(paths)


def _decode(files: dict[Path, bytes]) -> Iterator[str]:
    """Texts in each file's own encoding, with pydoc's topics instead of their source."""
    for path, content in files.items():
        if path == _TOPICS:
            continue
        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
            yield io.TextIOWrapper(io.BytesIO(content), encoding).read()
        except (SyntaxError, UnicodeDecodeError):
            continue
    if _TOPICS in files:
        from pydoc_data import topics

        yield from topics.topics.values()
