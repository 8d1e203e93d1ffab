# SPDX-License-Identifier: Apache-2.0
"""Stories of CNN and Daily Mail as they are published: lists of URLs, one file per story.

    all_train.txt, all_val.txt, all_test.txt     one story's address per line, by split
    cnn/stories/HASH.story                       HASH is the SHA-1 of the address, in hex
    dailymail/stories/HASH.story

The stories are by Hermann et al. 2015 (arXiv:1506.03340), the lists by See et al. 2017
(arXiv:1704.04368); texts are those of TFDS's `cnn_dailymail` from 3.2.0 on, in list order.
"""

import dataclasses
import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from switchx.data.corpora.packed_files import read_lines
from switchx.data.corpora.raw_files import RawFile, Row
from switchx.fields import require

PUBLISHERS = {"cnn": "cnn/stories", "dm": "dailymail/stories"}
_MARK = "@highlight"
_ENDS = (".", "!", "?", "'", "`", '"', "\u2019", "\u201d", ")")


@dataclasses.dataclass(frozen=True)
class StoryList(RawFile):
    """A list of addresses, whose stories are in folders beside it."""

    def rows(self, path: Path, tally: Counter) -> Iterator[Row]:
        """`article`, `highlights`, `publisher` and `id` of each story that has both texts.

        Raises:
            ValueError: a story is missing, or is not UTF-8.
        """
        folders = self._folders(path)
        require(
            folders,
            f"{path} lists stories, and neither {' nor '.join(PUBLISHERS.values())} is in "
            f"{path.parent}; unpack the stories there",
        )
        for address in filter(None, map(str.strip, read_lines(path))):
            name = hashlib.sha1(address.encode()).hexdigest()
            found = ((who, folder / f"{name}.story") for who, folder in folders.items())
            publisher, file = next((each for each in found if each[1].is_file()), (None, None))
            require(
                file is not None,
                f"{name}.story of {address!r} is not in "
                f"{', '.join(map(str, folders.values()))}; unpack all stories, or take the "
                f"line out of {path}",
            )
            article, highlights = story(read_lines(file))
            tally["rows"] += 1
            if article and highlights:
                yield {
                    "article": article,
                    "highlights": highlights,
                    "publisher": publisher,
                    "id": name,
                }
            else:
                tally["stories without a text"] += 1

    def state(self, path: Path) -> tuple:
        """The state of the list, and a digest of names, sizes and times of the stories."""
        digest = hashlib.sha256()
        for folder in self._folders(path).values():
            digest.update(str(folder.resolve()).encode())
            for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
                status = entry.stat()
                digest.update(f"{entry.name} {status.st_size} {status.st_mtime_ns}\n".encode())
        return *super().state(path), digest.hexdigest()

    @staticmethod
    def _folders(path: Path) -> dict[str, Path]:
        folders = {who: path.parent / folder for who, folder in PUBLISHERS.items()}
        return {who: folder for who, folder in folders.items() if folder.is_dir()}


def story(lines: Iterator[str]) -> tuple[str, str]:
    """The article, its lines joined by spaces, and the highlights, one per line.

    Highlights are all lines after the first that begins with `@highlight`. A line that ends
    without punctuation, as captions do, gets a full stop.
    """
    parts, is_highlight = {False: [], True: []}, False
    for line in filter(None, map(str.strip, lines)):
        if line.startswith(_MARK):
            is_highlight = True
        else:
            is_whole = line.endswith(_ENDS) or _MARK in line
            parts[is_highlight].append(line if is_whole else f"{line}.")
    return " ".join(parts[False]), "\n".join(parts[True])
