# SPDX-License-Identifier: Apache-2.0
"""Data sets that TFDS prepared, found by name and read without TensorFlow.

ArrayRecord is read by TFDS itself. TFRecord, today's format of most data sets on disk, is
read in place by `tfrecord.py`; examples of files that were compressed with gzip afterwards are
first written as ArrayRecord, since they cannot be read by number.
"""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from etils import epath

from switchx.data import data_dir as locations
from switchx.data.corpora.corpus import Account, fingerprint_of
from switchx.data.corpora.sound_records import SoundRecords
from switchx.data.corpora.tables import shortest
from switchx.data.corpora.tfrecord import TfRecordFiles, read_records, wrong_number
from switchx.fields import require

_FORMATS = tfds.core.FileFormat
_SHORT = (np.float32, np.float16)


@dataclasses.dataclass(frozen=True)
class TfdsFolder:
    """One prepared version of a data set.

    Attributes:
        builder: TFDS's reader of its description.
        data_dir: local folder in which indexes are kept, as `Corpus.open` takes it.
    """

    builder: Any
    data_dir: str | None

    @property
    def folder(self) -> str:
        return os.fspath(self.builder.data_dir)

    @property
    def splits(self) -> list[str]:
        return list(self.builder.info.splits)

    def fingerprint(self, split: str) -> str:
        """Hex digest of the data set's full name and the lengths of the split's files."""
        info = self.builder.info
        return fingerprint_of("tfds", info.full_name, info.splits[split].shard_lengths)

    def account(self, corpus: str, *splits: str) -> Account:
        """The account of some splits by TFDS's description, with their numbers of examples."""
        infos = {split: self.builder.info.splits[split] for split in splits}
        return Account(
            corpus,
            {
                f".{self.builder.info.file_format.value}": sum(
                    i.num_shards for i in infos.values()
                )
            },
            sum(each.num_bytes for each in infos.values()),
            documents={split: each.num_examples for split, each in infos.items()},
        )

    def records(self, split: str) -> SoundRecords:
        """Random access to the examples of a split, as TFDS decodes them.

        Raises:
            ValueError: files are in another format, packed, or missing.
        """
        if self.builder.info.file_format is _FORMATS.ARRAY_RECORD:
            return self._sound(self.builder.as_data_source(split=split), split)
        paths = self._tf_records(split)
        packed = [path for path in paths if path.endswith(".gz")]
        require(
            not packed,
            f"{', '.join(packed[:1])} is packed and cannot be read by number; unpack it with "
            "`gunzip`, or read it through a task, which prepares its examples",
        )
        lengths = tuple(self.builder.info.splits[split].shard_lengths)
        files = TfRecordFiles(paths, lengths, self.data_dir)
        return self._sound(_Parsed(files, self.builder.info.features), split)

    def _sound(self, records: Sequence[dict[str, Any]], split: str) -> SoundRecords:
        name = f"{self.builder.info.full_name}, {split}"
        return SoundRecords.of_split(name, records, self.builder, split, self._way_out)

    def examples(self, split: str) -> Iterator[dict[str, Any]]:
        """The examples of a split in order, from any of the formats, in the form of `plain`.

        Raises:
            ValueError: as for `records`, but files may be packed; or a file is damaged, or
                holds another number of records.
        """
        features = self.builder.info.features
        if self.builder.info.file_format is _FORMATS.ARRAY_RECORD:
            records = self.records(split)
            for i in range(len(records)):
                try:
                    yield plain(records[i], features)
                except UnicodeDecodeError as error:
                    raise records.refusal(i, error) from error
            return
        lengths = self.builder.info.splits[split].shard_lengths
        for path, length in zip(self._tf_records(split), lengths, strict=True):
            num_records = 0
            for number, data in enumerate(read_records(path)):
                num_records += 1
                try:
                    yield plain(features.deserialize_example_np(data), features)
                except Exception as error:  # of protocol buffers and TFDS
                    reason = " ".join(str(error).split())[:300]
                    what = f"record {number} of {path} cannot be read: {reason}"
                    raise ValueError(f"{what}; {self._way_out}") from error
            require(num_records == length, wrong_number(path, num_records, length))

    @property
    def _way_out(self) -> str:
        return f"get the file anew, or remove {self.folder} and prepare the data set again"

    def is_packed(self, split: str) -> bool:
        """Whether a file of the split was compressed with gzip."""
        is_tf_record = self.builder.info.file_format is _FORMATS.TFRECORD
        return is_tf_record and any(path.endswith(".gz") for path in self._tf_records(split))

    def _tf_records(self, split: str) -> tuple[str, ...]:
        info = self.builder.info
        require(
            info.file_format is _FORMATS.TFRECORD,
            f"{self.folder} is in the format {info.file_format.value}, expected array_record "
            "or tfrecord; convert it where TensorFlow is installed: `tfds convert_format "
            f"--dataset_version_dir={self.folder} --out_file_format=array_record "
            "--out_dir=DIR`",
        )
        found = []
        for path in map(os.fspath, info.splits[split].filepaths):
            existing = [name for name in (path, f"{path}.gz") if epath.Path(name).exists()]
            require(
                existing, f"{path} is not there; the split {split!r} is not whole: copy it anew"
            )
            found.append(existing[0])
        return tuple(found)


@dataclasses.dataclass(frozen=True)
class _Parsed:
    """TFRecords as the examples that they encode."""

    records: TfRecordFiles
    features: Any

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.features.deserialize_example_np(self.records[index])


def find_folder(name: str, data_dir: str | None) -> TfdsFolder:
    """The data set `glue/cola`, or the version `glue/cola:2.0.0`; by default the newest.

    Args:
        data_dir: data folder as `Corpus.open` takes it, or an address that TFDS can read
            (`gs://...`).

    Raises:
        ValueError: the data set is not prepared in any of the folders, or not in this
            version.
    """
    path, _, version = name.partition(":")
    is_local = locations.local_or_none(data_dir) == data_dir
    folders = locations.data_dirs(data_dir) if is_local else [data_dir]
    for folder in folders:
        versions = epath.Path(folder) / path
        children = versions.iterdir() if versions.exists() else ()
        valid = (each for each in children if tfds.core.Version.is_valid(each.name))
        found = {tfds.core.Version(each.name): each for each in valid}
        if version:
            found = {each: child for each, child in found.items() if str(each) == version}
        if found:
            builder = tfds.builder_from_directory(found[max(found)])
            return TfdsFolder(builder, locations.local_or_none(data_dir))
    raise ValueError(
        f"{name} is not prepared below {', '.join(map(str, folders))}; set DATA_DIR to TFDS' "
        "data folder, or prepare it where TensorFlow is installed: "
        f"`tfds build {path} --file_format=array_record --data_dir=DIR`"
    )


def plain(value, feature=None) -> Any:
    """A decoded value in Python types: texts, numbers, lists and dictionaries of these.

    A single-precision number becomes the shortest that rounds to it, 3.8 and not 3.79999995.

    Args:
        feature: TFDS feature of the value; TFDS decodes a single number in double precision.
    """
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, dict):
        return {name: plain(item, _inner(feature, name)) for name, item in value.items()}
    if isinstance(value, np.ndarray | list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and getattr(feature, "np_dtype", None) in map(np.dtype, _SHORT):
        value = np.dtype(feature.np_dtype).type(value)
    if isinstance(value, _SHORT):
        return shortest(value)
    return value.item() if isinstance(value, np.generic) else value


def _inner(feature, name: str):
    return feature[name] if isinstance(feature, tfds.features.FeaturesDict) else None
