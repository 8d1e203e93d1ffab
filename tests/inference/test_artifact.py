# SPDX-License-Identifier: Apache-2.0
"""An artifact gives back what was written, or says which file of it is not whole."""

import hashlib
import json
import pathlib
import shutil
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

from pallas_kernels import QTensor
from switchx import tree
from switchx.inference import artifact
from switchx.inference.quantize import quantize_experts
from switchx.whole_folders import checksum_of
from tests.data.refusals import refused
from tests.training.jobs import ENCODER_DECODER, make_params
from tests.training.train_states import damage as flip_bit

ABOUT = {"step": 7, "versions": {"jax": "0.0"}}


@pytest.fixture(scope="module")
def quantized():
    """config, params: int4, the rest bfloat16."""
    return quantize_experts(
        ENCODER_DECODER, make_params(ENCODER_DECODER), bits=4, rest="bfloat16"
    )[:2]


@pytest.fixture(scope="module")
def written(quantized, tmp_path_factory):
    folder = tmp_path_factory.mktemp("artifact") / "int4"
    artifact.write_artifact(
        folder, *quantized, ABOUT, lambda path: (path / "words.txt").write_text("a b")
    )
    return folder


@pytest.fixture
def copy(written, tmp_path):
    return shutil.copytree(written, tmp_path / "copy")


def test_everything_comes_back(quantized, written):
    config, params = quantized
    got = artifact.read_artifact(written)
    assert (got.config, got.about) == (config, ABOUT)
    assert jax.tree.structure(got.params) == jax.tree.structure(params)
    leaves = tree.named_leaves(params)
    for name, leaf in tree.named_leaves(got.params).items():
        assert leaf.dtype == leaves[name].dtype
        np.testing.assert_array_equal(leaf, leaves[name], err_msg=name)
    dtypes = {str(leaf.dtype) for leaf in leaves.values()}
    assert dtypes == {"uint8", "bfloat16", "float32"}


def test_float8_comes_back_whole_and_with_experts_in_the_file(tmp_path):
    config, params, _, _ = quantize_experts(
        ENCODER_DECODER, make_params(ENCODER_DECODER), bits=8, dtype="float8_e4m3fn"
    )
    artifact.write_artifact(tmp_path / "float8", config, params, ABOUT)
    leaves = tree.named_leaves(params)
    assert {str(leaf.dtype) for leaf in leaves.values()} == {"float8_e4m3fn", "float32"}
    for read in (artifact.read_artifact, artifact.open_artifact):
        for name, leaf in tree.named_leaves(read(tmp_path / "float8").params).items():
            got = np.asarray(leaf[:] if leaf.ndim else leaf)
            assert got.dtype == leaves[name].dtype
            np.testing.assert_array_equal(got.view(np.uint8), leaves[name].view(np.uint8))
    # As another program sees it.
    with safetensors.safe_open(tmp_path / "float8" / artifact.WEIGHTS, "np") as file:
        values = file.get_slice("encoder/blocks/layer_1/ffn/experts/w_in_EDF/values")
        assert values.get_dtype() == "F8_E4M3"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", params)
    with ocp.StandardCheckpointer() as checkpointer:
        got = checkpointer.restore(tmp_path / "orbax", jax.eval_shape(lambda: params))
    for name, leaf in tree.named_leaves(got).items():
        np.testing.assert_array_equal(leaf.view(np.uint8), leaves[name].view(np.uint8))


def test_any_reader_of_safetensors_and_sha256_can_check_it(quantized, written):
    names = {path.name for path in written.iterdir()}
    assert names == {"artifact.json", "weights.safetensors", "words.txt"}
    modes = {path.stat().st_mode for path in written.iterdir()}
    assert len(modes) == 1  # words.txt has what the umask says
    arrays = safetensors.numpy.load_file(written / "weights.safetensors")
    matrix = "encoder/blocks/layer_1/ffn/experts/w_in_EDF"
    D, F = ENCODER_DECODER.d_model, ENCODER_DECODER.d_ff
    assert arrays[f"{matrix}/values"].shape == (8, F, D // 2)
    assert arrays[f"{matrix}/scales_EFG"].shape == (8, F, 1)
    content = json.loads((written / "artifact.json").read_text())
    assert content["quantized"][matrix] == {"bits": 4, "group_size": None}
    assert content["layout_version"] == QTensor.LAYOUT_VERSION
    for name, (size, sha256) in content["files"].items():
        data = (written / name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (size, sha256)


def test_it_may_be_moved_and_is_another_one_by_its_fingerprint(quantized, copy, tmp_path):
    moved = artifact.read_artifact(copy)
    artifact.write_artifact(tmp_path / "other", *quantized, ABOUT | {"step": 8})
    other = artifact.read_artifact(tmp_path / "other")
    assert moved.fingerprint != other.fingerprint


def cut(path):
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize("name", ["weights.safetensors", "words.txt"])
@pytest.mark.parametrize("damage", [flip_bit, cut, pathlib.Path.unlink])
def test_a_damaged_file_is_named(copy, name, damage):
    damage(copy / name)
    assert artifact.is_artifact(copy)
    with refused(f"{copy} is no whole artifact: its file {name} "):
        artifact.read_artifact(copy)


def rewrite(folder, **changes):
    """A manifest with other values and the right checksum."""
    file = folder / artifact.MANIFEST
    content = json.loads(file.read_text()) | changes
    content.pop("sha256")
    file.write_text(json.dumps(content | {"sha256": checksum_of(content, "sha256")}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut, "its artifact.json is damaged"),
        (pathlib.Path.unlink, "it has no artifact.json"),
        (
            lambda path: path.write_text(path.read_text().replace('"step": 7', '"step": 9')),
            "its artifact.json is damaged",
        ),
        (lambda path: path.write_text("[1]"), "its artifact.json is damaged"),
        (
            lambda path: rewrite(path.parent, layout_version=2),
            "its layout_version is 2, this switchx reads 1",
        ),
        (lambda path: rewrite(path.parent, format_version="x"), "its format_version is 'x'"),
        (lambda path: rewrite(path.parent, files={}), "names no weights.safetensors"),
    ],
)
def test_a_damaged_or_newer_manifest_is_named(copy, damage, said):
    damage(copy / artifact.MANIFEST)
    with refused(f"{copy} is no whole artifact: <any>{said}"):
        artifact.read_artifact(copy)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_class_is_not_imported_wherever_it_is_named(copy, depth):
    model = json.loads((copy / artifact.MANIFEST).read_text())["model"]
    described = model["switch"] if depth == 1 else model["switch"]["router"]
    described["type"] = "this.Zen"
    rewrite(copy, model=model)
    with refused(f"{copy} is no whole artifact: <any>names a class; a quantized model is one"):
        artifact.read_artifact(copy)
    assert "this" not in sys.modules


def test_weights_of_another_model_are_all_named(copy):
    model = json.loads((copy / artifact.MANIFEST).read_text())["model"]
    rewrite(copy, model=model | {"d_ff": 32, "tie_embeddings": False})
    with refused(
        f"{copy / 'weights.safetensors'} does not hold the model that "
        "artifact.json describes: <any>decoder/blocks/layer_0/ffn/w_in_DF is "
        "[16, 24], expected [16, 32]<any>experts/w_out_EFD is [8, 24, 16], "
        "expected [8, 32, 16]<any>embedding/w_logits_DV is missing"
    ):
        artifact.read_artifact(copy)


def test_nothing_is_overwritten(quantized, copy, tmp_path):
    with refused(f"{copy} exists"):
        artifact.write_artifact(copy, *quantized, ABOUT)
    (tmp_path / "empty").mkdir()
    artifact.write_artifact(tmp_path / "empty", *quantized, ABOUT)
    assert artifact.read_artifact(tmp_path / "empty").about == ABOUT


def test_nothing_is_left_of_an_artifact_that_could_not_be_written(tmp_path, quantized):
    assert not artifact.is_artifact(tmp_path)

    def fail(folder):
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        artifact.write_artifact(tmp_path / "a", *quantized, ABOUT, fail)
    assert list(tmp_path.iterdir()) == []
