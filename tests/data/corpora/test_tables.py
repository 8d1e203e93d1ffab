# SPDX-License-Identifier: Apache-2.0
"""Tables of Apache Arrow: Parquet, streams, files, and folders of `datasets`."""

import json
from collections import Counter

import pyarrow
import pyarrow.parquet
import pytest

from switchx.data.corpora.tables import read_table
from switchx.data.corpora.text_files import TextFiles
from switchx.data.downstream.templates import Templates
from tests.data.refusals import refused

COLUMNS = {
    "question": ["a", "b", "c"],
    "score": pyarrow.array([3.8, 0.1, 1e10], pyarrow.float32()),
    "more": [{"ids": [1, 2]}, {"ids": []}, {"ids": [3]}],
}
ROWS = [
    {"question": "a", "score": 3.8, "more": {"ids": [1, 2]}},
    {"question": "b", "score": 0.1, "more": {"ids": []}},
    {"question": "c", "score": 1e10, "more": {"ids": [3]}},
]


def write(path, table, batch_size=2):
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, write_page_checksum=True)
        return
    make = pyarrow.ipc.new_file if path.stem == "file" else pyarrow.ipc.new_stream
    with make(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch_size)


def rows(path, columns=None):
    return [row for _, row in read_table(path, Counter(), columns)]


@pytest.mark.parametrize("name", ["t.parquet", "file.arrow", "stream.arrow"])
def test_tables_are_read_whole_or_refused(tmp_path, name):
    path = tmp_path / name
    write(path, pyarrow.table(COLUMNS))
    assert rows(path) == ROWS
    assert rows(path, ["question"]) == [{"question": each} for each in "abc"]
    with refused(f"{path} has no column text"):
        rows(path, ["text"])
    content = path.read_bytes()
    for cut in [*range(0, len(content), 37), len(content) - 1]:
        path.write_bytes(content[:cut])
        with refused(f"{path} cannot be read: "):
            rows(path)
    schema = pyarrow.schema([("a", pyarrow.string()), ("a", pyarrow.string())])
    write(path, pyarrow.Table.from_arrays([pyarrow.array(["x"])] * 2, schema=schema))
    with refused(f"{path} has the column a twice"):
        rows(path)
    write(path, pyarrow.table([["x"], ["y"], ["z"]], names=["a", "a", "b"]))
    assert rows(path, ["b"]) == [{"b": "z"}]  # what is not read need not be told apart


def saved(folder, table, split):
    """As `datasets.Dataset.save_to_disk` writes it."""
    folder.mkdir(parents=True)
    name = "data-00000-of-00001.arrow"
    write(folder / name, table)
    state = {"_data_files": [{"filename": name}], "_split": split, "_indices_data_files": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


def test_folders_of_datasets(tmp_path):
    features = {"label": {"names": ["bad", "good"], "_type": "ClassLabel"}}
    about = json.dumps({"info": {"features": features}})
    table = pyarrow.table({"text": ["x", "y", "z"], "label": [0, 1, 1]})
    table = table.replace_schema_metadata({"huggingface": about})
    root = tmp_path / "saved"
    for split in ("train", "test"):
        saved(root / split, table, split)
    (root / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    # What `map` leaves there is no part of the data set.
    write(root / "train/cache-1.arrow", table)
    corpus, data = Templates(str(root), "t: {text}", "{label}"), str(tmp_path / "data")
    source = corpus.open("test", data)
    assert [source[n]["targets"] for n in range(3)] == ["bad", "good", "good"]
    # The same table alone, in a folder of one's own.
    (tmp_path / "own").mkdir()
    write(tmp_path / "own/train.parquet", table)
    own = Templates(str(tmp_path / "own"), "t: {text}", "{label}").open("train", data)
    assert [own[n]["targets"] for n in range(3)] == ["bad", "good", "good"]
    texts = TextFiles(str(root / "train"), validation_fraction=0.4)
    found = [*texts.open("train", data), *texts.open("validation", data)]
    assert sorted(each["text"] for each in found) == ["x", "y", "z"]
    account = texts.open("train", data).accounts[0]
    assert account.left_out["not listed in state.json"] == (1, ["cache-1.arrow"])
    (root / "train/data-00000-of-00001.arrow").unlink()
    with refused("has no data-00000-of-00001.arrow of state.json"):
        corpus.open("train", data)


def test_times_of_nanoseconds_beside_a_text(tmp_path):
    """Python has none; a column that no template names is no reason to refuse its table."""
    (tmp_path / "own").mkdir()
    times = pyarrow.array([1, None], pyarrow.timestamp("ns"))
    write(tmp_path / "own/train.parquet", pyarrow.table({"a": ["x", "y"], "time": times}))
    data = str(tmp_path / "data")
    source = Templates(str(tmp_path / "own"), "{a}", "b").open("train", data)
    assert [source[n]["inputs"] for n in range(2)] == ["x", "y"]
    with refused("the field 'time' is a TimestampScalar"):
        Templates(str(tmp_path / "own"), "{time}", "b").open("train", data)


def test_missing_values_beside_times_of_nanoseconds(tmp_path):
    (tmp_path / "own").mkdir()
    inner = pyarrow.struct({"t": pyarrow.timestamp("ns"), "x": pyarrow.float32()})
    rows = [{"t": 1, "x": 3.8}, None, {"t": None, "x": None}]
    table = {
        "a": ["x", "y", "z"],
        "m": pyarrow.array(rows, inner),
        "l": pyarrow.array([[1, None], None, []], pyarrow.list_(pyarrow.timestamp("ns"))),
    }
    write(tmp_path / "own/train.parquet", pyarrow.table(table))
    found = [row for _, row in read_table(tmp_path / "own/train.parquet", Counter())]
    assert [row["a"] for row in found] == ["x", "y", "z"]
    assert [row["m"] and row["m"]["x"] for row in found] == [3.8, None, None]
    assert [row["l"] and row["l"][-1] for row in found] == [None, None, []]
    source = Templates(str(tmp_path / "own"), "{a}", "b").open("train", str(tmp_path / "data"))
    assert len(source) == 3


def test_templates_of_parquet(tmp_path):
    (tmp_path / "own").mkdir()
    write(tmp_path / "own/train.parquet", pyarrow.table(COLUMNS))
    source = Templates(str(tmp_path / "own"), "{question}", "{score}").open(
        "train", str(tmp_path / "data")
    )
    assert [source[n]["targets"] for n in range(3)] == ["3.8", "0.1", "10000000000.0"]


def test_classes_within_a_column_have_names(tmp_path):
    names = {"_type": "ClassLabel", "names": ["joy", "anger"]}
    features = {
        "text": {"dtype": "string", "_type": "Value"},
        "labels": {"feature": names, "_type": "Sequence"},
        "old": [names],
        "inner": {"of": names, "number": {"dtype": "int64", "_type": "Value"}},
    }
    about = json.dumps({"info": {"features": features}})
    columns = {"text": ["a", "b"], "labels": [[0, 1], [1]], "old": [[1], [0]],
               "inner": [{"of": 0, "number": 0}, {"of": 1, "number": 1}]}  # fmt: skip
    (tmp_path / "own").mkdir()
    table = pyarrow.table(columns).replace_schema_metadata({"huggingface": about})
    write(tmp_path / "own/train.parquet", table)

    def targets(template: str) -> list[str]:
        source = Templates(str(tmp_path / "own"), "{text}", template)
        opened = source.open("train", str(tmp_path / "data"))
        return [opened[n]["targets"] for n in range(2)]

    assert targets("{labels/0} {old/0} {inner/of} {inner/number}") == [
        "joy anger joy 0", "anger joy anger 1",
    ]  # fmt: skip
    with refused("the field 'labels' is a list; name a text or a number in it"):
        targets("{labels}")
