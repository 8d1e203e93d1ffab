# SPDX-License-Identifier: Apache-2.0
"""Multi30K: captions of 31,014 pictures in English, German, French and Czech.

Elliott et al. 2016 (arXiv:1605.00459), Elliott et al. 2017 (arXiv:1710.07177), Barrault et
al. 2018 (WMT18). Task 1, raw text: translation.
"""

import dataclasses
import itertools
import logging
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from switchx.data import data_dir as locations
from switchx.data.corpora.corpus import Account, CorpusSource, fingerprint_of, require_split
from switchx.data.corpora.packed_files import named, read_lines
from switchx.data.corpora.prepared import Recipe, open_prepared
from switchx.fields import at_resume, check_choices, require
from switchx.files import write_atomically

ADDRESS = "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw/"
LANGUAGES = ("cs", "de", "en", "fr")

# Split -> its name in the files.
_FILE_NAMES = {
    "train": "train",
    "validation": "val",
    "test_2016_flickr": "test_2016_flickr",
    "test_2017_flickr": "test_2017_flickr",
}
_DOWNLOAD_TIMEOUT_S = 60

_log = logging.getLogger(__name__)

Pair = tuple[Path, Path]


@dataclasses.dataclass(frozen=True)
class Multi30k:
    """Line-aligned captions, `{"inputs": source, "targets": target}`.

    Files `<split>.<language>.gz`, or packed otherwise or not, are searched for in DATA_DIR and
    DATA_DIR/multi30k, then likewise in SWITCHX_DATA_DIR and in the cache; missing files are
    downloaded to `multi30k` in the first of these folders that can be written.

    Attributes:
        source, target: two of cs, de, en, fr. The 2017 test set has no Czech.
        address: folder to download from.
    """

    source: Literal[LANGUAGES] = "en"
    target: Literal[LANGUAGES] = "de"
    address: str = at_resume(ADDRESS)

    def __post_init__(self):
        check_choices(self)
        require(
            self.source != self.target,
            f"Multi30k.source and target are both {self.source!r}; use two",
        )

    @property
    def name(self) -> str:
        return f"multi30k_{self.source}_{self.target}"

    @property
    def splits(self) -> tuple[str, ...]:
        has_2017 = "cs" not in (self.source, self.target)
        return tuple(s for s in _FILE_NAMES if s != "test_2017_flickr" or has_2017)

    def open(self, split: str, data_dir: str | None) -> CorpusSource:
        """Split `train`, `validation`, `test_2016_flickr` or `test_2017_flickr`.

        Raises:
            ValueError: there is no such split; or files are missing and cannot be downloaded,
                are unreadable, empty, or differ in their numbers of lines.
        """
        require_split(self.name, split, self.splits)
        pairs = self._find(data_dir)
        if split not in pairs:
            self._download(data_dir)
            pairs = self._find(data_dir)
        files = list(itertools.chain.from_iterable(pairs.values()))
        key = fingerprint_of(
            "multi30k 2", *((str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files)
        )

        def make_splits() -> dict[str, Iterator[dict[str, str]]]:
            return {split: _read_pairs(*files, tally) for split, files in pairs.items()}

        tally = Counter()
        account = Account.of(self.name, {file: file.stat().st_size for file in files})
        fields = ("inputs", "targets")
        recipe = Recipe(self.name, key, fields, make_splits, account, tally)
        return open_prepared(recipe, split, data_dir)

    def _find(self, data_dir: str | None) -> dict[str, Pair]:
        """The splits for which a folder holds both languages."""
        folders = [
            folder / subfolder
            for folder in locations.data_dirs(data_dir)
            for subfolder in (".", "multi30k")
        ]
        pairs = {}
        for split, folder in itertools.product(self.splits, folders):
            languages = (self.source, self.target)
            files = [named(folder, f"{_FILE_NAMES[split]}.{each}") for each in languages]
            if split not in pairs and all(files):
                pairs[split] = tuple(files)
        return pairs

    def _download(self, data_dir: str | None) -> None:
        """Downloads the missing files of all splits."""
        folder = locations.writable_dir(data_dir) / "multi30k"
        looked_in = ", ".join(map(str, locations.data_dirs(data_dir)))
        for split, language in itertools.product(self.splits, (self.source, self.target)):
            name = f"{_FILE_NAMES[split]}.{language}.gz"
            if named(folder, name):
                continue
            url = self.address.rstrip("/") + "/" + name
            _log.info("downloading %s", url)
            try:
                with urllib.request.urlopen(url, timeout=_DOWNLOAD_TIMEOUT_S) as response:
                    write_atomically(folder / name, response.read())
            except (OSError, ValueError) as error:
                raise ValueError(
                    f"{name} of Multi30K is in none of {looked_in} (or multi30k below them), "
                    f"and {url} cannot be downloaded: {error}; copy the files into one of "
                    f"these folders, or set DATA_DIR or {locations.ENVIRONMENT_VARIABLE} to "
                    "the folder that has them"
                ) from error


def _read_pairs(source: Path, target: Path, tally: Counter) -> Iterator[dict[str, str]]:
    """Line by line, both files together."""
    inputs, targets = ([line.strip() for line in read_lines(file)] for file in (source, target))
    require(
        0 < len(inputs) == len(targets),
        f"{source} has {len(inputs)} lines and {target} has {len(targets)}, expected equally "
        "many and at least 1; get both anew from one place",
    )
    tally["rows"] += len(inputs)
    for source_text, target_text in zip(inputs, targets, strict=True):
        yield {"inputs": source_text, "targets": target_text}
