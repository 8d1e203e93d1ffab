# SPDX-License-Identifier: Apache-2.0
"""Data sets as TFDS prepares them, ArrayRecord or TFRecord, written by the test.

TFRecord's frames are written here from the definition in TensorFlow's record_writer.h, with a
CRC-32C of our own, bit by bit (the polynomial 0x1EDC6F41, reflected): an oracle for the reader.
"""

import json
import pathlib
import struct
from collections.abc import Iterable

import tensorflow_datasets as tfds
from tensorflow_datasets.core import decode


class _Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    name = "written"
    VERSION = tfds.core.Version("1.0.0")
    url_infos = None

    def __init__(self, features, splits, **options):
        self._features, self._splits = features, splits
        super().__init__(file_format="array_record", **options)

    def _info(self):
        features = tfds.features.FeaturesDict(self._features)
        return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

    def _split_generators(self, download_manager):
        return {name: self._generate_examples(rows) for name, rows in self._splits.items()}

    def _generate_examples(self, rows):
        yield from enumerate(rows)


def write(data_dir: pathlib.Path, name: str, features: dict, **splits: Iterable[dict]) -> None:
    """Writes `data_dir/name/1.0.0`, the splits' examples in their order."""
    tfds.disable_progress_bar()
    builder = _Builder(features, splits, data_dir=data_dir / ".made" / name)
    builder.download_and_prepare()
    folder = data_dir / name / "1.0.0"
    folder.parent.mkdir(parents=True, exist_ok=True)
    pathlib.Path(builder.data_dir).rename(folder)


def as_tf_records(folder: pathlib.Path, shards: int = 2) -> list[pathlib.Path]:
    """Writes the examples of a folder of `write` anew as TFRecord, in so many files a split."""
    builder = tfds.builder_from_directory(folder)
    info = json.loads((folder / "dataset_info.json").read_text())
    written = []
    for split in info["splits"]:
        name = split["name"]
        raw = builder.as_data_source(
            split=name, deserialize_method=decode.DeserializeMethod.RAW_BYTES
        )
        data = [bytes(raw[i]) for i in range(len(raw))]
        bounds = [len(data) * i // shards for i in range(shards + 1)]
        split["shardLengths"] = [str(b - a) for a, b in zip(bounds, bounds[1:], strict=False)]
        for i in range(shards):
            path = folder / f"{info['name']}-{name}.tfrecord-{i:05}-of-{shards:05}"
            path.write_bytes(b"".join(map(frame, data[bounds[i] : bounds[i + 1]])))
            written.append(path)
    info["fileFormat"] = "tfrecord"
    for path in folder.glob("*.array_record-*"):
        path.unlink()
    (folder / "dataset_info.json").write_text(json.dumps(info))
    return written


def frame(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def _checksum(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
