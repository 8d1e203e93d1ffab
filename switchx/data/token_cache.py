# SPDX-License-Identifier: Apache-2.0
"""Tokens of a corpus's records, made on request or kept on disk.

Kept tokens are in `tokens/<corpus>_<key>/` of the data folder: all ids in one file, the end of
each sequence in another, the CRC-32 of each in a third, and a description. The key hashes
everything that determines the ids: the records' content, the vocabulary, the objective and
`VERSION`. Another text, vocabulary or prefix is tokenized anew under another key, never mixed
with what was there. The folder is written under another name and renamed when it is complete:
a killed process leaves nothing that is read, and of two that write at once the second drops
its copy.

Dims: L length of a sequence in tokens
"""

import dataclasses
import functools
import json
import logging
import os
import re
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from switchx.data import data_dir as locations
from switchx.data.corpora.corpus import CorpusSource, fingerprint_of
from switchx.data.features import Example
from switchx.data.objectives import Objective, RecordObjective
from switchx.data.tokenizers import Vocabulary
from switchx.fields import describe, require

# Version of kept tokens; raise it whenever they are made or laid out differently.
VERSION = 2
_IDS, _ENDS, _DESCRIPTION = "ids.int32", "ends.npy", "description.json"
_CHECKSUMS, _WAY_OUT = "crc32.npy", "remove the folder, and they are made anew"

_log = logging.getLogger(__name__)


class Encoded(Protocol):
    """The tokens of each record: an `Example`, or for raw text an array [L] without EOS."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Example | np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Tokenizes a record whenever it is asked for."""

    records: CorpusSource
    objective: Objective
    vocabulary: Vocabulary

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Example | np.ndarray:
        """Tokens of record `index`."""
        record = self.records[index]
        if isinstance(self.objective, RecordObjective):
            return self.objective.example(record, self.vocabulary)
        return np.array(self.vocabulary.encode(record["text"]), np.int32)


@dataclasses.dataclass(frozen=True)
class KeptTokens:
    """Tokens on disk; can be pickled for Grain's workers."""

    folder: Path
    sequences_per_record: int

    def __len__(self) -> int:
        return (len(self._ends) - 1) // self.sequences_per_record

    def __getitem__(self, index: int) -> Example | np.ndarray:
        """Tokens of record `index`.

        Raises:
            ValueError: the tokens are not what was written.
        """
        first = index * self.sequences_per_record
        ends = self._ends[first : first + self.sequences_per_record + 1].tolist()
        parts = [
            np.array(self._ids[start:end])
            for start, end in zip(ends[:-1], ends[1:], strict=True)
        ]
        expected = self._checksums[first : first + self.sequences_per_record].tolist()
        require(
            list(map(zlib.crc32, parts)) == expected,
            f"the tokens in {self.folder} are damaged: those of record {index} have changed "
            f"since they were written; {_WAY_OUT}",
        )
        return Example(*parts) if self.sequences_per_record == 2 else parts[0]

    def __getstate__(self) -> dict:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @functools.cached_property
    def _ends(self) -> np.ndarray:
        return np.load(self.folder / _ENDS, mmap_mode="r")

    @functools.cached_property
    def _checksums(self) -> np.ndarray:
        return np.load(self.folder / _CHECKSUMS, mmap_mode="r")

    @functools.cached_property
    def _ids(self) -> np.ndarray:
        path = self.folder / _IDS
        is_empty = not path.stat().st_size  # an empty file cannot be mapped
        return np.zeros(0, np.int32) if is_empty else np.memmap(path, np.int32, "r")


def open_tokens(tokenizer: Tokenizer, data_dir: str | None) -> KeptTokens:
    """Opens the tokens of all records on disk, and makes them first if they are missing.

    Args:
        data_dir: writable data folder, as `Corpus.open` takes it.

    Raises:
        ValueError: there is no room on the disk, or files are damaged.
    """
    records, objective = tokenizer.records, tokenizer.objective
    description = {
        "version": VERSION,
        "records": records.fingerprint,
        "vocabulary": tokenizer.vocabulary.fingerprint(),
    }
    if isinstance(objective, RecordObjective):
        description["objective"] = describe(objective, "the objective")
    key = fingerprint_of(json.dumps(description, sort_keys=True))
    name = re.sub(r"\W+", "_", records.name).strip("_")
    where = locations.local_or_none(data_dir)
    folder = locations.find_or_place(f"tokens/{name}_{key}", where)
    if not folder.exists():
        _keep(tokenizer, folder, description)
    kept = KeptTokens(folder, _sequences(tokenizer))
    _check(kept, description, len(records))
    return kept


def _sequences(tokenizer: Tokenizer) -> int:
    return 2 if isinstance(tokenizer.objective, RecordObjective) else 1


def _keep(tokenizer: Tokenizer, folder: Path, description: dict) -> None:
    _log.info("tokenizing %d records of %s", len(tokenizer), tokenizer.records.name)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".preparing_", dir=folder.parent) as staging:
            made = Path(staging) / "tokens"
            made.mkdir()
            _write(tokenizer, made, description)
            os.rename(made, folder)
    except OSError as error:
        # A faster process may have left the same tokens here.
        if not folder.exists():
            raise ValueError(
                f"tokens cannot be kept in {folder}: {error}; make room there, set DATA_DIR to "
                "another folder, or leave CACHE_TOKENS out"
            ) from error


def _write(tokenizer: Tokenizer, folder: Path, description: dict) -> None:
    ends = np.zeros(_sequences(tokenizer) * len(tokenizer) + 1, np.int64)
    checksums = np.zeros(len(ends) - 1, np.uint32)
    number = 0
    with open(folder / _IDS, "wb") as file:
        for index in range(len(tokenizer)):
            tokens = tokenizer[index]
            parts: Sequence[np.ndarray] = (
                (tokens.inputs, tokens.targets) if isinstance(tokens, Example) else (tokens,)
            )
            for part_L in parts:
                part_L = np.ascontiguousarray(part_L, np.int32)
                file.write(part_L)
                checksums[number] = zlib.crc32(part_L)
                number += 1
                ends[number] = ends[number - 1] + len(part_L)
    np.save(folder / _ENDS, ends)
    np.save(folder / _CHECKSUMS, checksums)
    (folder / _DESCRIPTION).write_text(json.dumps(description, indent=2))


def _check(kept: KeptTokens, description: dict, num_records: int) -> None:
    """Refuses files that are incomplete, or belong to something else."""
    try:
        written = json.loads((kept.folder / _DESCRIPTION).read_text())
        num_ids = (kept.folder / _IDS).stat().st_size // np.dtype(np.int32).itemsize
        found = len(kept), int(kept._ends[-1]), len(kept._checksums)
    except Exception as error:  # NumPy's reader of headers raises a dozen kinds
        written, found, num_ids = {}, error, None
    num_sequences = num_records * kept.sequences_per_record
    if written != description or found != (num_records, num_ids, num_sequences):
        raise ValueError(
            f"the tokens in {kept.folder} are damaged: expected {num_records} records of "
            f"{num_ids} ids in {num_sequences} sequences and the description {description}, "
            f"got {found} and {written}; {_WAY_OUT}"
        )
