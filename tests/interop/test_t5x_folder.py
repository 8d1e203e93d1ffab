# SPDX-License-Identifier: Apache-2.0
"""T5X's files: what is read, and what is damaged, hostile or of another version."""

import json

import numpy as np
import pytest
from flax import serialization

from switchx.interop.t5x import T5XFolder
from tests.data.refusals import refused
from tests.interop.t5x_files import write_t5x

NAME = "target/encoder/a/kernel"
ARRAY = np.arange(35, dtype=np.float32).reshape(5, 7)


@pytest.fixture
def folder(tmp_path):
    return write_t5x(tmp_path / "checkpoint_7", {NAME: ARRAY, "target/b/scale": ARRAY[0]})


def change_index(folder, change):
    """`change(optimizer)` on the content of the index."""
    content = serialization.msgpack_restore((folder / "checkpoint").read_bytes())
    content = change(content) or content
    (folder / "checkpoint").write_bytes(serialization.msgpack_serialize(content))


def spec_of(content) -> dict:
    return content["optimizer"]["target"]["encoder"]["a"]["kernel"]


def test_arrays_in_the_index_and_beside_it_also_of_an_older_tensorstore(folder):
    source = T5XFolder(folder)
    assert source.shapes == {NAME: (5, 7), "target/b/scale": (7,)}
    np.testing.assert_array_equal(source.read(NAME), ARRAY)
    np.testing.assert_array_equal(source.read("target/b/scale"), ARRAY[0])

    def change(content):
        spec = spec_of(content)
        spec["path"] = spec["kvstore"].pop("path") + "/"

    change_index(folder, change)
    np.testing.assert_array_equal(T5XFolder(folder).read(NAME), ARRAY)
    with refused(f"{folder.parent} has no file 'checkpoint'"):
        T5XFolder(folder.parent)


@pytest.mark.parametrize("name", [NAME, "target/b/scale"])
def test_numbers_that_are_not_finite_are_refused(tmp_path, name):
    """In an array beside the index, and in one within it."""
    arrays = {NAME: ARRAY.copy(), "target/b/scale": ARRAY[0].copy()}
    arrays[name].flat[3] = np.inf
    source = T5XFolder(write_t5x(tmp_path / "checkpoint_7", arrays))
    with refused(f"1 of the {arrays[name].size} numbers of the tensor {name} are not finite"):
        source.read(name)


@pytest.mark.parametrize("length", [0, 5, 100])
def test_an_index_that_is_cut_short(folder, length):
    file = folder / "checkpoint"
    file.write_bytes(file.read_bytes()[:length])
    with refused(f"{file} cannot be read as msgpack (<any>)"):
        T5XFolder(folder)


def test_other_versions_and_contents(folder):
    file = folder / "checkpoint"
    change_index(folder, lambda content: content | {"version": 2})
    with refused(f"{file} has version=2"):
        T5XFolder(folder)
    change_index(folder, lambda content: {"version": 3})
    with refused(f"{file} has no parameters, optimizer/target"):
        T5XFolder(folder)
    change_index(folder, lambda content: {"version": 3, "optimizer": {"target": {"a": "b"}}})
    with refused("target/a is a str"):
        T5XFolder(folder)


@pytest.mark.parametrize("path", ["../other", "/elsewhere", "a/b", "..", "", None, "a\\b", 3])
def test_an_array_in_another_folder(folder, path):
    change_index(folder, lambda content: spec_of(content)["kvstore"].update(path=path))
    with refused(
        f"{folder / 'checkpoint'} describes {NAME} as driver='zarr' with path={path!r}"
    ):
        T5XFolder(folder)


def test_missing_and_damaged_chunks(folder):
    array = folder / NAME.replace("/", ".")
    chunk = array / "1.0"
    data = chunk.read_bytes()
    chunk.write_bytes(data[:-4])
    with refused(f"{array} cannot be read (<any>)<any>: fetch it again"):
        T5XFolder(folder).read(NAME)
    chunk.unlink()  # zarr would take it for zeros
    with refused(f"{array} has no chunk 1.0"):
        T5XFolder(folder).read(NAME)
    (array / ".zarray").unlink()
    with refused(f"{array / '.zarray'} describes no array of floats that can be read ("):
        T5XFolder(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [5, -7]},
        {"shape": [5, "7"]},
        {"shape": [5]},
        {"chunks": [0, 4]},
        {"dtype": "|O"},
        {"dtype": "<i4"},
        {"shape": None},
    ],
)
def test_a_header_that_describes_no_array(folder, change):
    file = folder / NAME.replace("/", ".") / ".zarray"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match="describes no array of floats that can be read"):
        T5XFolder(folder)


def test_another_driver_and_chunks_that_are_too_many_or_too_large(folder):
    file = folder / NAME.replace("/", ".") / ".zarray"
    header = json.loads(file.read_text())
    for change in ({"chunks": [2**40, 2**40]}, {"shape": [2**30, 2**30], "chunks": [1, 1]}):
        file.write_text(json.dumps(header | change))
        with pytest.raises(ValueError, match="expected at most 1048576 chunks, none larger"):
            T5XFolder(folder).read(NAME)
    change_index(folder, lambda content: spec_of(content).update(driver="json"))
    with pytest.raises(ValueError, match="as driver='json' with path="):
        T5XFolder(folder)
