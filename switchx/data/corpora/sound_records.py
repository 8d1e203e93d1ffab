# SPDX-License-Identifier: Apache-2.0
"""Records of ArrayRecord or TFRecord files, where a damaged record is named with its file.

Libraries only say `Corrupted Riegeli/records file`, at whatever step a record is read.
"""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class SoundRecords:
    """Random access to the records of a split; can be pickled for Grain's workers.

    Attributes:
        name: name of the corpus, for messages.
        records: records over all files, a sequence of a library.
        files: paths in the order of their records.
        lengths: number of records in each file.
        way_out: end of a message about a damaged file, which says what to do.
    """

    name: str
    records: Sequence[Any] = dataclasses.field(repr=False)
    files: tuple[str, ...]
    lengths: tuple[int, ...]
    way_out: str

    @classmethod
    def of_split(cls, name: str, records, builder, split: str, way_out: str) -> "SoundRecords":
        """The records of a split of a TFDS builder."""
        info = builder.info.splits[split]
        files = tuple(map(os.fspath, info.filepaths))
        return cls(name, records, files, tuple(info.shard_lengths), way_out)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Any:
        """Record `index`, from 0.

        Raises:
            IndexError: `index` is not in [0, len).
            ValueError: the record cannot be read; the message names file, record and remedy.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name} has {len(self)} records; index={index}")
        try:
            return self.records[index]
        except MemoryError:
            raise
        except Exception as error:  # of several libraries, with no common base class
            raise self.refusal(index, error) from error

    def refusal(self, index: int, error: Exception) -> ValueError:
        """An error that names the file, the record and the remedy."""
        ends = np.cumsum(self.lengths)
        number = int(np.searchsorted(ends, index, side="right"))
        place = index - int(ends[number]) + self.lengths[number]
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        return ValueError(
            f"{self.name}: record {place} of {self.files[number]} cannot be read: {reason}; "
            f"{self.way_out}"
        )
