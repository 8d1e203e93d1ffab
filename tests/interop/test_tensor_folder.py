# SPDX-License-Identifier: Apache-2.0
"""Safetensors files and PyTorch's layout, against loops over single numbers."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from switchx.data.tokenizers import SentencePieceVocabulary
from switchx.data.vocabularies import load_vocabulary
from switchx.inference.run_exported import ExportedModel
from switchx.interop.t5x import T5XFolder
from switchx.interop.tensor_folder import (
    INDEX,
    MODEL,
    MOST_LINES,
    TensorFolder,
    from_torch,
    read_json,
    require_same_tensors,
    to_torch,
    torch_shape,
    write_safetensors,
)
from switchx.interop.tokenizer_json import sentencepiece_model
from switchx.npz import read_arrays
from switchx.whole_folders import read_manifest
from tests.data.refusals import refused
from tests.interop.folders import SWITCH, D, F, H, K

TENSORS = {
    name: np.arange(12, dtype=np.float32).reshape(3, 4) + i for i, name in enumerate("abc")
}


def test_what_was_written_in_one_file_or_in_shards(tmp_path):
    for most_bytes, files in ((1000, {MODEL}), (100, None), (1, None)):
        folder = tmp_path / str(most_bytes)
        folder.mkdir()
        write_safetensors(folder, TENSORS.items(), most_bytes)
        names = {path.name for path in folder.iterdir()}
        shards = 2 if most_bytes == 100 else 3
        assert names == (
            files
            or {INDEX, *(f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards))}
        )
        source = TensorFolder(folder)
        assert source.shapes == dict.fromkeys("abc", (3, 4))
        for name, tensor in TENSORS.items():
            np.testing.assert_array_equal(source.read(name), tensor)
    index = json.loads((tmp_path / "100" / INDEX).read_text())
    assert index["metadata"] == {"total_size": 3 * 12 * 4}


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float64])
def test_other_floats_are_read_as_float32(tmp_path, dtype):
    save_file({"a": np.array([0.5, -3.0], dtype)}, tmp_path / MODEL)
    tensor = TensorFolder(tmp_path).read("a")
    assert tensor.dtype == np.float32
    np.testing.assert_array_equal(tensor, [0.5, -3.0])


@pytest.mark.parametrize("kind", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
def test_numbers_that_are_not_finite_are_refused(tmp_path, kind):
    """NaN, infinities, and what float32 cannot hold; the tensors beside them are read."""
    for number in [np.nan, np.inf, -np.inf, *([1e300] if kind is np.float64 else [])]:
        bad = np.array([[0.5, number], [-3.0, number]]).astype(kind)
        save_file({"a": bad, "b": bad[:, 0].copy()}, tmp_path / MODEL)
        source = TensorFolder(tmp_path)
        np.testing.assert_array_equal(source.read("b"), [0.5, -3.0])
        with refused(f"{tmp_path}: 2 of the 4 numbers of the tensor a are not finite"):
            source.read("a")


def test_quantized_tensors_are_refused(tmp_path):
    save_file({"a": np.zeros(3, np.int8)}, tmp_path / MODEL)
    with refused(f"{tmp_path / MODEL}: tensor a has the type I8"):
        TensorFolder(tmp_path)


def test_other_formats_are_never_opened_and_a_folder_may_have_none(tmp_path):
    with refused(
        f"{tmp_path} has no model.safetensors and no "
        "model.safetensors.index.json, and no pytorch_model.bin"
    ):
        TensorFolder(tmp_path)
    # Unpickling this would make a file.
    (tmp_path / "model.pt").write_bytes(b"cos\nsystem\n(S'touch opened'\ntR.")
    with refused(f"{tmp_path} has model.pt and no model.safetensors or pytorch_model.bin"):
        TensorFolder(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "header", "empty"])
def test_a_damaged_file(tmp_path, damage):
    save_file(TENSORS, tmp_path / MODEL)
    data = (tmp_path / MODEL).read_bytes()
    data = {"cut": data[:-3], "header": b"\xff" * 8 + data[8:], "empty": b""}[damage]
    (tmp_path / MODEL).write_bytes(data)
    with refused(f"{tmp_path / MODEL} cannot be read as safetensors (<any>)"):
        TensorFolder(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["../model.safetensors", "/x/model.safetensors", "a\\b.safetensors", "model.bin", ""],
)
def test_an_index_that_leads_elsewhere(tmp_path, name):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with refused(f"{tmp_path / INDEX} names the file {name!r}"):
        TensorFolder(tmp_path)


def test_an_index_without_its_files_or_names(tmp_path):
    file = tmp_path / INDEX
    file.write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    with refused(f"{file} names x.safetensors, which is not there"):
        TensorFolder(tmp_path)
    for wrong in ({}, {"weight_map": ["a"]}, {"weight_map": {"a": 3}}):
        file.write_text(json.dumps(wrong))
        with refused(f"{file} has no weight_map of names"):
            TensorFolder(tmp_path)


@pytest.mark.parametrize("kind", [".safetensors", ".bin"])
def test_an_index_beside_a_single_file(tmp_path, kind):
    """transformers reads the file; an index of other tensors beside it is refused."""
    write_safetensors(tmp_path, TENSORS.items(), 1)
    write_safetensors(tmp_path, TENSORS.items(), 1000)
    (tmp_path / "model-00001-of-00003.safetensors").rename(tmp_path / "a.safetensors")
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["a"] = "a.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    one = MODEL
    if kind == ".bin":
        torch = pytest.importorskip("torch")
        one, names = "pytorch_model.bin", {}
        for file in list(tmp_path.glob("*.safetensors")):
            tensors = {name: torch.tensor(array) for name, array in load_file(file).items()}
            stem = "pytorch_model" if file.name == MODEL else file.stem
            torch.save(tensors, tmp_path / f"{stem}.bin")
            names |= {} if file.name == MODEL else dict.fromkeys(tensors, f"{stem}.bin")
            file.unlink()
        (tmp_path / INDEX).unlink()
        (tmp_path / f"{one}.index.json").write_text(json.dumps({"weight_map": names}))
    source = TensorFolder(tmp_path)
    assert source.shapes == dict.fromkeys("abc", (3, 4)) and source.unread == []
    (tmp_path / f"a{kind}").unlink()
    said = f"{tmp_path / one} and {one}.index.json are both there, and not all of these can be"
    with refused(f"{said} read: {tmp_path / one}.index.json names a{kind}"):
        TensorFolder(tmp_path)
    if kind == ".bin":
        torch.save({"a": torch.zeros(3, 4)}, tmp_path / "a.bin")
    else:
        save_file({"a": np.zeros((3, 4), np.float32)}, tmp_path / "a.safetensors")
    with refused(f"{one} and {one}.index.json are both there, whose tensors differ"):
        TensorFolder(tmp_path)


def test_weights_of_another_kind_and_tensors_in_two_files_are_named(tmp_path):
    write_safetensors(tmp_path, TENSORS.items(), 1000)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert TensorFolder(tmp_path).unread == ["pytorch_model.bin"]
    (tmp_path / MODEL).unlink()
    places = {}
    for name in ("x.safetensors", "y.safetensors"):
        save_file(TENSORS, tmp_path / name)
        places[name] = name
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ValueError, match="tensor a is in two files, y.safetensors the second"):
        TensorFolder(tmp_path)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 990345061\n"


@pytest.mark.parametrize("name", [MODEL, "pytorch_model.bin", INDEX, "x.safetensors"])
def test_pointers_of_git_lfs_for_weights(tmp_path, name):
    if name == "x.safetensors":
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    (tmp_path / name).write_text(POINTER)
    with refused(f"{tmp_path / name}<any> a pointer of Git LFS <any>: run `git lfs pull` in"):
        TensorFolder(tmp_path)


def test_pointers_of_git_lfs_for_vocabularies_and_what_we_write(tmp_path):
    said = "is a pointer of Git LFS and not the file itself: run `git lfs pull` in the clone"
    for name, read in (
        ("spiece.model", lambda file: SentencePieceVocabulary(str(file)).num_pieces),
        ("tokenizer.json", sentencepiece_model),
        ("vocabulary.json", lambda file: load_vocabulary(file.parent)),
        ("checkpoint", lambda file: T5XFolder(file.parent)),
        ("export.json", lambda file: ExportedModel(file.parent)),
    ):
        (tmp_path / name).write_text(POINTER)
        with refused(f"{tmp_path}<any>{said}"):
            read(tmp_path / name)
    for read in (  # to be said after the name of the folder, or of the file
        lambda file: read_arrays(file, {}),
        lambda file: read_manifest(file.parent, file.name, "sha256"),
    ):
        with refused(said):
            read(tmp_path / "export.json")


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o077, 0o600), (0o027, 0o640)])
def test_files_have_the_mode_that_the_umask_says(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        for most_bytes, names in ((1000, [MODEL]), (100, [INDEX])):
            folder = tmp_path / str(most_bytes)
            folder.mkdir()
            write_safetensors(folder, TENSORS.items(), most_bytes)
            assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {mode}
            assert set(names) <= {path.name for path in folder.iterdir()}
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    "text, reason",
    [
        ("[1]", "expected an object, got a list"),
        ("{", "Expecting property name"),
        ('{"a": ' * 100_000, "nested more than 64 times"),
        ("9" * 5000, "Exceeds the limit"),
        (" " * 2_000_000, "it has more than 1048576 bytes"),
    ],
)
def test_json_that_is_no_description(tmp_path, text, reason):
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=f"config.json cannot be read .*{reason}"):
        read_json(file)
    with pytest.raises(ValueError, match="no.json is not there; fetch it, or"):
        read_json(tmp_path / "no.json")


E = 4
rng = np.random.default_rng(0)


def test_heads_are_joined_maps_transposed_and_experts_apart():
    w_DHK = rng.normal(size=(D, H, K))
    (w,) = to_torch("a/w_query_DHK", w_DHK)
    assert w.shape == torch_shape("a/w_query_DHK", SWITCH) == (H * K, D)
    assert all(w[h * K + k, d] == w_DHK[d, h, k] for d, h, k in np.ndindex(D, H, K))
    np.testing.assert_array_equal(from_torch("a/w_query_DHK", SWITCH, [w]), w_DHK)

    w_HKD = rng.normal(size=(H, K, D))
    (w,) = to_torch("a/w_out_HKD", w_HKD)
    assert w.shape == torch_shape("a/w_out_HKD", SWITCH) == (D, H * K)
    assert all(w[d, h * K + k] == w_HKD[h, k, d] for d, h, k in np.ndindex(D, H, K))
    np.testing.assert_array_equal(from_torch("a/w_out_HKD", SWITCH, [w]), w_HKD)
    w_EDF = rng.normal(size=(E, D, F))
    tensors = to_torch("a/w_in_EDF", w_EDF)
    assert len(tensors) == E
    for e, w in enumerate(tensors):
        assert w.shape == torch_shape("a/w_in_EDF", SWITCH) == (F, D)
        np.testing.assert_array_equal(w, w_EDF[e].T)
    np.testing.assert_array_equal(from_torch("a/w_in_EDF", SWITCH, iter(tensors)), w_EDF)
    for name in ("embedding_VD", "bias_UH", "scale_D"):
        value = rng.normal(size=torch_shape(f"a/{name}", SWITCH))
        assert to_torch(f"a/{name}", value)[0].shape == value.shape
        assert np.shares_memory(from_torch(f"a/{name}", SWITCH, [value]), value)


@pytest.mark.parametrize("name, shape", [("w_router_DE", (E, D)), ("w_in_DF", (F, D))])
def test_a_router_is_one_map(name, shape):
    value = rng.normal(size=shape[::-1])
    (w,) = to_torch(f"a/{name}", value)
    assert w.shape == torch_shape(f"a/{name}", SWITCH) == shape
    np.testing.assert_array_equal(from_torch(f"a/{name}", SWITCH, [w]), value)


def test_all_differences_are_in_one_error():
    with refused("there does not hold the model that is described"):
        require_same_tensors(
            {"a": (1,), "b": (2, 3), "c": (1,)},
            {"a": (1,), "b": (3, 2), "d": ()},
            "there",
            "do this",
        )
    many = {f"t{i}": (1,) for i in range(MOST_LINES + 5)}
    with pytest.raises(ValueError, match="got nothing\n  and 5 more\n"):
        require_same_tensors(many, {}, "there", "do this")
