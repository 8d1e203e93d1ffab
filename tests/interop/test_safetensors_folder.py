# SPDX-License-Identifier: Apache-2.0
"""Reading safetensors of a folder: dtypes, shards, and every way in which it may be no good."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from switchx.interop.safetensors_folder import (
    INDEX,
    MODEL,
    SafetensorsFolder,
    read_json,
    write_safetensors,
)
from tests.data.refusals import refused

TENSORS = {
    name: np.arange(12, dtype=np.float32).reshape(3, 4) + i for i, name in enumerate("abc")
}


def test_what_was_written_in_one_file_or_in_shards(tmp_path):
    for most_bytes, files in ((1000, {MODEL}), (100, None), (1, None)):
        folder = tmp_path / str(most_bytes)
        folder.mkdir()
        write_safetensors(folder, TENSORS, most_bytes)
        names = {path.name for path in folder.iterdir()}
        shards = 2 if most_bytes == 100 else 3
        assert names == (
            files
            or {INDEX, *(f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards))}
        )
        source = SafetensorsFolder(folder)
        assert source.shapes == dict.fromkeys("abc", (3, 4))
        for name, tensor in TENSORS.items():
            np.testing.assert_array_equal(source.read(name), tensor)
    index = json.loads((tmp_path / "100" / INDEX).read_text())
    assert index["metadata"] == {"total_size": 3 * 12 * 4}


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float64])
def test_other_floats_are_read_as_float32(tmp_path, dtype):
    save_file({"a": np.array([0.5, -3.0], dtype)}, tmp_path / MODEL)
    tensor = SafetensorsFolder(tmp_path).read("a")
    assert tensor.dtype == np.float32
    np.testing.assert_array_equal(tensor, [0.5, -3.0])


def test_quantized_tensors_are_refused(tmp_path):
    save_file({"a": np.zeros(3, np.int8)}, tmp_path / MODEL)
    with refused(
        f"{tmp_path / MODEL}: tensor a has the type I8; expected one of F64, F32, F16, BF16: "
        "export the model without quantization"
    ):
        SafetensorsFolder(tmp_path)


def test_pickles_are_never_opened(tmp_path):
    # Unpickling this would make a file.
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch opened'\ntR.")
    with refused(
        f"{tmp_path} has pytorch_model.bin and no model.safetensors; such a file may run any "
        "program when it is opened and is never read here: load the model in transformers and "
        "save it with `model.save_pretrained(DIR)`, which writes model.safetensors, or take "
        "the repository's safetensors"
    ):
        SafetensorsFolder(tmp_path)


def test_a_folder_without_tensors(tmp_path):
    with refused(
        f"{tmp_path} has no model.safetensors and no model.safetensors.index.json; give a "
        "folder that `save_pretrained` wrote"
    ):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "header", "empty"])
def test_a_damaged_file(tmp_path, damage):
    save_file(TENSORS, tmp_path / MODEL)
    data = (tmp_path / MODEL).read_bytes()
    data = {"cut": data[:-3], "header": b"\xff" * 8 + data[8:], "empty": b""}[damage]
    (tmp_path / MODEL).write_bytes(data)
    with refused(
        f"{tmp_path / MODEL} cannot be read as safetensors (<any>); it is damaged or cut "
        "short: fetch or write it again"
    ):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["../model.safetensors", "/x/model.safetensors", "a\\b.safetensors", "model.bin", ""],
)
def test_an_index_that_leads_elsewhere(tmp_path, name):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with refused(
        f"{tmp_path / INDEX} names the file {name!r}; expected .safetensors files in its own "
        "folder: do not use this checkpoint, or correct its index"
    ):
        SafetensorsFolder(tmp_path)


def test_an_index_without_its_files_or_names(tmp_path):
    file = tmp_path / INDEX
    file.write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    with refused(f"{file} names x.safetensors, which is not there; fetch that file"):
        SafetensorsFolder(tmp_path)
    for wrong in ({}, {"weight_map": ["a"]}, {"weight_map": {"a": 3}}):
        file.write_text(json.dumps(wrong))
        with refused(f"{file} has no weight_map of names; restore the file"):
            SafetensorsFolder(tmp_path)


def test_a_tensor_in_two_files(tmp_path):
    places = {}
    for name in ("x.safetensors", "y.safetensors"):
        save_file(TENSORS, tmp_path / name)
        places[name] = name
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ValueError, match="tensor a is in two files, y.safetensors the second"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    "text, reason",
    [
        ("[1]", "expected an object, got a list"),
        ("{", "Expecting property name"),
        ('{"a": ' * 100_000, "recursion"),
        ("9" * 5000, "Exceeds the limit"),
        (" " * 2_000_000, "it has 2000000 bytes, expected 1048576 at most"),
    ],
)
def test_json_that_is_no_description(tmp_path, text, reason):
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=f"config.json cannot be read .*{reason}"):
        read_json(file)
    with pytest.raises(ValueError, match="cannot be read .*No such file"):
        read_json(tmp_path / "no.json")
