# SPDX-License-Identifier: Apache-2.0
"""A corpus that is prepared once, as ArrayRecord by a TFDS builder.

Examples are written and read without TensorFlow. Prepared data are named by a key made from
everything that determines them, `DATA_DIR/<corpus>/<key>/<version>/`, so changed inputs are
prepared anew and never mixed with what was there. The folder is written under another name
and renamed when complete: a killed preparation leaves nothing that is read later, and of two
processes that prepare at once the second drops its copy.
"""

import contextlib
import dataclasses
import errno
import hashlib
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import tensorflow_datasets as tfds

from switchx.data import data_dir as locations
from switchx.data.corpora.corpus import Account, CorpusSource, require_split
from switchx.data.corpora.sound_records import SoundRecords

VERSION = "1.0.0"
# Beside the splits' fingerprints; no name of a split has a space.
_TALLY = "rows by what became of them"

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a corpus is prepared.

    Attributes:
        name: name of the corpus, a Python identifier.
        key: hexadecimal digest of all that determines the examples and is quickly known: for a
            large corpus, names, sizes and times of its files.
        fields: keys of an example.
        make_splits: function that prepares the corpus: it returns the examples of each split.
        account: account of the files, None if there are none; what was read from them is
            added.
        tally: counter of `rows`, and, by reason, of the rows that give no example, while the
            examples of `make_splits` are read.
        keeps_order: whether examples stay in their order; otherwise they are shuffled once.
    """

    name: str
    key: str
    fields: tuple[str, ...]
    make_splits: Callable[[], dict[str, Iterable[dict[str, str]]]]
    account: Account | None = None
    tally: Counter = dataclasses.field(default_factory=Counter)
    keeps_order: bool = False


class _Info(tfds.core.DatasetInfo):
    # Nothing is read from a bucket; TFDS would first make a temporary folder and leave it.
    def initialize_from_bucket(self): ...


class CorpusBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """The TFDS builder that writes a recipe's examples."""

    VERSION = tfds.core.Version(VERSION)
    # Nothing is downloaded through TFDS; looking for checksums, TFDS 4.9 would import
    # importlib_resources, which it does not require.
    url_infos = None

    def __init__(self, recipe: Recipe, data_dir: Path):
        self.name = recipe.name
        self._recipe = recipe
        super().__init__(data_dir=data_dir, file_format="array_record")

    def _info(self):
        features = {field: tfds.features.Text() for field in self._recipe.fields}
        return _Info(
            builder=self,
            features=tfds.features.FeaturesDict(features),
            description=self.name,
            metadata=tfds.core.MetadataDict(),
            disable_shuffling=self._recipe.keeps_order,
        )

    def _split_generators(self, download_manager):
        with _reading(self._recipe):
            splits = self._recipe.make_splits().items()
        return {split: self._generate_examples(split, examples) for split, examples in splits}

    def _generate_examples(self, split, examples):
        digest = hashlib.sha256()
        for number, example in enumerate(_read(self._recipe, examples)):
            for text in example.values():
                digest.update(text.encode() + b"\0")
            yield number, example
        self.info.metadata[split] = digest.hexdigest()[:16]
        self.info.metadata[_TALLY] = dict(self._recipe.tally)  # complete after the last split

    # TFDS prints these to standard output; the caller reports what matters.
    def _log_download_bytes(self): ...
    def _log_download_done(self): ...


def open_prepared(recipe: Recipe, split: str, data_dir: str | None) -> CorpusSource:
    """Examples of one split of a recipe, prepared first if they are not yet.

    Raises:
        ValueError: there is no such split, the disk is full, prepared data were damaged since,
            or `recipe.make_splits` raises it.
    """
    relative = f"{recipe.name}/{recipe.key}/{VERSION}"
    folder = locations.find_or_place(relative, data_dir)
    if not folder.exists():
        _prepare(recipe, folder)
    way_out = f"remove {folder}, and it is prepared anew"
    try:
        builder = tfds.builder_from_directory(folder)
        splits = list(builder.info.splits)
        metadata = builder.info.metadata
        fingerprint = metadata[split] if split in splits else None
    except Exception as error:  # of JSON, protocol buffers and TFDS
        raise _damaged(recipe, error, way_out) from error
    require_split(recipe.name, split, splits)
    try:
        records = builder.as_data_source(split=split)
        records[0]  # opens the file
    except Exception as error:
        raise _damaged(recipe, error, way_out) from error
    name = f"{recipe.name}/{split}"
    sound = SoundRecords.of_split(
        f"the prepared data of {name} is damaged", records, builder, split, way_out
    )
    tally = dict(metadata.get(_TALLY) or {})  # earlier versions kept none
    account = dataclasses.replace(
        recipe.account or Account(recipe.name),
        rows=tally.pop("rows", None),
        rows_left_out=tally,
        documents={name: each.num_examples for name, each in builder.info.splits.items()},
    )
    return CorpusSource(name, fingerprint, recipe.fields, sound, (account,))


def _damaged(recipe: Recipe, error: Exception, way_out: str) -> ValueError:
    reason = " ".join(f"{error}".split()) or type(error).__name__
    return ValueError(f"the prepared data of {recipe.name} is damaged: {reason}; {way_out}")


@contextlib.contextmanager
def _reading(recipe: Recipe) -> Iterator[None]:
    """Turns errors in the context into errors of reading, not of writing."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise
        if isinstance(error, RecursionError):
            hint = "a record is nested too deeply; take it out"
        else:
            hint = "see to what is read"
        raise ValueError(
            f"{recipe.name} cannot be prepared: {type(error).__name__} while its source is "
            f"read: {error}; {hint}"
        ) from error


def _read(recipe: Recipe, examples: Iterable[dict[str, str]]) -> Iterator[dict[str, str]]:
    examples = iter(examples)
    while True:
        with _reading(recipe):
            example = next(examples, None)
        if example is None:
            return
        yield example


def _prepare(recipe: Recipe, folder: Path) -> None:
    """Writes the dataset beside `folder`, then renames it to `folder`."""
    _log.info("preparing %s in %s", recipe.name, folder)
    tfds.disable_progress_bar()
    root = folder.parents[2]
    # Not TFDS's own incomplete folder: its name comes from the global `random`, so two
    # processes with one seed would write into the same folder.
    try:
        with tempfile.TemporaryDirectory(prefix=".preparing_", dir=root) as staging:
            builder = CorpusBuilder(recipe, Path(staging))
            builder.download_and_prepare()
            folder.parent.mkdir(parents=True, exist_ok=True)
            os.rename(builder.data_dir, folder)
    except (OSError, RuntimeError) as error:
        # A faster process may have left the same data here.
        if not folder.exists():
            raise ValueError(
                f"{recipe.name} cannot be prepared in {folder}: {error}; make room there, or "
                "set DATA_DIR to another folder"
            ) from error
