# SPDX-License-Identifier: Apache-2.0
"""TFRecord read without TensorFlow equals TFDS' ArrayRecord; damage is named, not read.

Oracle: TFDS' own reader of the same examples, frames and checksums of `tfds_folders.py`, and
the CRC-32C of RFC 3720, appendix B.4.
"""

import gzip
import pickle
import re

import numpy as np
import pytest
import tensorflow_datasets as tfds

from switchx.data.corpora.c4 import C4
from switchx.data.corpora.tfds_folder import find_folder, plain
from switchx.data.corpora.tfrecord import masked_checksum, read_records, record_offsets
from tests.data.refusals import refused
from tests.data.tfds_folders import _checksum, as_tf_records, frame, write

ROWS = [
    {
        "text": f"page {i} é",
        "answers": {"text": ["p", "q"][: 1 + i % 2], "n": [1, 2][: 1 + i % 2]},
        "label": i % 2,
        "inner": {"score": 0.5 * i},
    }
    for i in range(7)
]
FEATURES = {
    "text": tfds.features.Text(),
    "answers": tfds.features.Sequence({"text": tfds.features.Text(), "n": np.int32}),
    "label": tfds.features.ClassLabel(names=["no", "yes"]),
    "inner": {"score": np.float32},
}


@pytest.fixture
def folder(tmp_path):
    write(tmp_path, "c4/en", FEATURES, train=ROWS, validation=ROWS[:2])
    return tmp_path / "c4/en/1.0.0"


def test_checksum_of_the_standard():
    zeros, ones = bytes(32), b"\xff" * 32

    def unmasked(checksum):
        rotated = (checksum - 0xA282EAD8) & 0xFFFFFFFF
        return (rotated >> 17 | rotated << 15) & 0xFFFFFFFF

    assert unmasked(masked_checksum(zeros)) == 0x8A9136AA
    assert unmasked(masked_checksum(ones)) == 0x62A8AB43
    assert masked_checksum(b"abc").to_bytes(4, "little") == _checksum(b"abc")


def test_all_examples_in_both_formats(folder, tmp_path):
    found = find_folder("c4/en", str(tmp_path))
    want = [plain(found.records("train")[i]) for i in range(7)]
    assert want == ROWS == list(map(plain, found.examples("train")))
    as_tf_records(folder, shards=3)
    found = find_folder("c4/en:1.0.0", str(tmp_path))
    records = found.records("train")
    assert [plain(records[i]) for i in (6, 0, 3, 2, 5, 1, 4)] == [
        ROWS[i] for i in (6, 0, 3, 2, 5, 1, 4)
    ]
    assert list(map(plain, found.examples("train"))) == ROWS
    assert len(list(tmp_path.glob("tfrecord_indexes/*.npy"))) == 3
    # Grain's workers receive it by pickle; the index is read again.
    assert plain(pickle.loads(pickle.dumps(records))[4]) == ROWS[4]
    assert found.fingerprint("train") != found.fingerprint("validation")


@pytest.mark.parametrize("form", ["array_record", "tfrecord", "packed"])
def test_a_text_that_is_not_utf8_is_named_with_its_record(tmp_path, form):
    """In the middle of a split, and whoever reads it: a task by number, or what prepares it."""
    rows = [{"text": "an expert"}, {"text": b"\xff gate"}, {"text": "a slot"}]
    write(tmp_path, "c4/en", {"text": tfds.features.Text()}, train=rows)
    folder = tmp_path / "c4/en/1.0.0"
    path = next(iter(folder.glob("*array_record*")))
    if form != "array_record":
        (path,) = as_tf_records(folder, shards=1)
    name = path.name
    if form == "packed":
        name = f"{path.name}.gz"
        path.with_name(name).write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    said = (
        f"<any>record 1 of {folder / name} cannot be read: 'utf-8' codec can't decode byte "
        f"0xff<any>; get the file anew, or remove {folder} and prepare the data set again"
    )
    with refused(said):
        list(find_folder("c4/en", str(tmp_path)).examples("train"))
    with refused(said):
        source = C4().open("train", str(tmp_path))
        assert (source[0]["text"], source[2]["text"]) == ("an expert", "a slot")
        source[1]


def test_c4_as_it_lies_on_disks(folder, tmp_path):
    """The same corpus from ArrayRecord, TFRecord, and TFRecord packed by gzip."""

    def texts(split="train"):
        source = C4().open(split, str(tmp_path))
        return [source[i]["text"] for i in range(len(source))]

    want = [row["text"] for row in ROWS]
    assert texts() == want
    paths = as_tf_records(folder)
    assert texts() == want and texts("validation") == want[:2]
    for path in paths:
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert sorted(texts()) == want
    with refused("is packed and cannot be read by number"):
        find_folder("c4/en", str(tmp_path)).records("train")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda b: b[:-6] + b"\0" + b[-5:], "the 40 bytes at 68 have the checksum"),
        (lambda b: b"\1" + b[1:], "the 8 bytes at 0 have the checksum"),
        (lambda b: b[:-1], "ends at byte 111, inside of a record"),
        (lambda b: b[:60], "ends at byte 60, inside of a record"),
        (lambda b: b"no TFRecord at all", "the 8 bytes at 0 have the checksum"),
    ],
)  # fmt: skip
def test_damage_is_named(tmp_path, damage, said):
    whole = frame(b"a" * 40) + frame(b"b" * 40)
    assert len(whole) == 112
    path = tmp_path / "x.tfrecord"
    path.write_bytes(whole)
    assert list(read_records(str(path))) == [b"a" * 40, b"b" * 40]
    path.write_bytes(damage(whole))
    with refused(said):
        list(read_records(str(path)))
    packed = tmp_path / "x.tfrecord.gz"
    packed.write_bytes(gzip.compress(damage(whole)))
    with refused(said):
        list(read_records(str(packed)))


def test_index_is_made_anew_for_a_changed_file(tmp_path):
    path = tmp_path / "x.tfrecord"
    path.write_bytes(frame(b"ab") + frame(b""))
    assert record_offsets(str(path), str(tmp_path)).tolist() == [0, 18]
    path.write_bytes(frame(b"") + frame(b"ab") + frame(b"c"))
    assert record_offsets(str(path), str(tmp_path)).tolist() == [0, 16, 34]
    path.write_bytes(frame(b"ab")[:-3])
    with refused("x.tfrecord ends at byte 15, inside of a record"):
        record_offsets(str(path), str(tmp_path))


def test_what_is_missing_or_too_short_is_named(folder, tmp_path):
    first, second, *_ = as_tf_records(folder)
    second.write_bytes(frame(b"x"))
    records = find_folder("c4/en", str(tmp_path)).records("train")
    with refused(f"{second} holds 1 records, its dataset_info.json says 4"):
        records[6]
    first.unlink()
    with refused(f"{first} is not there"):
        find_folder("c4/en", str(tmp_path)).records("train")
    with refused(f"c4/en:2.0.0 is not prepared below {tmp_path}"):
        find_folder("c4/en:2.0.0", str(tmp_path))
    info = folder / "dataset_info.json"
    info.write_text(
        re.sub('"fileFormat": "tfrecord"', '"fileFormat": "riegeli"', info.read_text())
    )
    with refused(f"{folder} is in the format riegeli, expected array_record or tfrecord"):
        list(find_folder("c4/en", str(tmp_path)).examples("train"))
