# SPDX-License-Identifier: Apache-2.0
"""Who takes the checksum of which part of an array, and what is compared when it is read."""

import json
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx import whole_folders
from switchx.checkpoint import manifest, parts
from switchx.checkpoint.checkpointer import Checkpointer, Retention
from switchx.checkpoint.items import read_items
from switchx.checkpoint.run_folder import RunFolder
from tests.training.train_states import filled_state

AUTO = (jax.sharding.AxisType.Auto,) * 2


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("data", "expert"), axis_types=AUTO)


@pytest.fixture(autouse=True)
def all_are_sliced(monkeypatch):
    monkeypatch.setattr(parts, "LEAST_SLICE_BYTES", 0)


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((16, 6), jax.P("data", None)),  # four replicas: rows of 8 are cut by 4
        ((16, 6), jax.P("expert", "data")),  # none
        ((3, 8), jax.P()),  # eight: the second dimension is cut
        ((3, 5), jax.P()),  # cannot be cut: the first replica has it
        ((), jax.P()),
    ],
)
def test_all_parts_together_are_the_array_once(mesh, shape, spec):
    values = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    array = jax.device_put(jnp.array(values), jax.NamedSharding(mesh, spec))
    seen = np.zeros(shape, int)
    with jax.set_mesh(mesh):
        for index, data in parts.own_parts(array):
            np.testing.assert_array_equal(np.asarray(data), values[index])
            seen[index] += 1
    assert np.all(seen == 1)


@pytest.mark.parametrize("num_rows", [8, 16])
def test_a_small_shard_is_written_whole(mesh, monkeypatch, num_rows, tmp_path):
    """By its first replica; Orbax writes as many bytes as are hashed."""
    monkeypatch.setattr(parts, "LEAST_SLICE_BYTES", 100)
    value = jax.device_put(jnp.ones((num_rows, 13)), jax.NamedSharding(mesh, jax.P()))
    assert len(parts.own_parts(value)) == (8 if num_rows == 16 else 1)  # of 104 or 52 bytes
    with Checkpointer(RunFolder(tmp_path), Retention()) as checkpointer:
        checkpointer.save(1, {"params": {"w": value}, "step": jnp.asarray(1)})
    (name,) = (tmp_path / "checkpoints/1/params" / parts.LISTS).glob("*.json")
    written = json.loads(name.read_text())["arrays"]["w"]["parts"]
    (chunks,) = (tmp_path / "checkpoints/1/params").glob("array_metadatas/process_0")
    (described,) = json.loads(chunks.read_text())["array_metadatas"]
    whole = described["array_metadata"]["write_shape"]
    assert [num_rows // len(written), 13] == whole


def test_checksums_are_of_values_in_row_major_order():
    values = np.arange(12, dtype=np.int16).reshape(3, 4)
    assert parts.crc32_of(values.T) == zlib.crc32(values.T.tobytes())
    assert parts.crc32_of(np.asarray(jnp.ones(3, jnp.bfloat16))) == zlib.crc32(b"\x80\x3f" * 3)


def test_parts_are_compared_on_the_mesh_that_saved_them_and_on_fewer_devices(mesh, tmp_path):
    """On a finer one, what is cut further is not, and `verify` is there for that."""
    coarse = jax.NamedSharding(mesh, jax.P("data"))
    values = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
    state = {"params": {"w": jax.device_put(jnp.array(values), coarse)}, "step": jnp.asarray(1)}
    run = RunFolder(tmp_path)
    with Checkpointer(run, Retention()) as checkpointer:
        checkpointer.save(1, state)
    path = run.checkpoints / "1"
    (name,) = (path / "params" / parts.LISTS).glob("*.json")
    content = json.loads(name.read_text())
    content["arrays"]["w"]["parts"][-1][1] ^= 1  # as if a value had changed on its way
    write_checked(name, content)
    for spec, is_held in ((jax.P("data"), True), (jax.P(), True), (jax.P(None, "data"), False)):
        sharding = jax.NamedSharding(mesh, spec)
        target = {"w": jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=sharding)}
        if is_held:
            with pytest.raises(parts.DamagedCheckpoint, match="params/w is not what was saved"):
                read_items(path, {"params": target})
        else:
            read_items(path, {"params": target})


def write_checked(path, content: dict) -> None:
    """Writes a manifest or a list whose checksum fits, whatever it says."""
    content = {name: value for name, value in content.items() if name != "crc32"}
    checksum = whole_folders.checksum_of(content, "crc32")
    path.write_text(json.dumps(content | {"crc32": checksum}))


@pytest.mark.parametrize(
    "change", [{"metrics": [1]}, {"metrics": {"loss": "low"}}, {"score": "low"}]
)
def test_a_manifest_of_another_form_is_damaged_whatever_its_checksum(tmp_path, change):
    with Checkpointer(RunFolder(tmp_path), Retention()) as checkpointer:
        checkpointer.save(1, filled_state(1))
    path = tmp_path / "checkpoints" / "1"
    content = json.loads((path / "manifest.json").read_text())
    write_checked(path / "manifest.json", content | change)
    assert manifest.find_damage(path) == "its manifest.json is damaged"


@pytest.mark.parametrize(
    "arrays", [None, {"w": {"shape": [1]}}, {"w": {"shape": [], "dtype": "", "parts": [1]}}]
)
def test_a_list_of_another_form_is_damaged_whatever_its_checksum(tmp_path, arrays):
    (tmp_path / parts.LISTS).mkdir()
    content = {"files": {}, "arrays": arrays}
    write_checked(tmp_path / parts.LISTS / "process_0_of_1.json", content)
    with pytest.raises(parts.DamagedCheckpoint, match="process_0_of_1.json is damaged"):
        parts.read_lists(tmp_path)


def test_a_list_that_a_process_did_not_write_is_missed(tmp_path):
    with Checkpointer(RunFolder(tmp_path), Retention()) as checkpointer:
        checkpointer.save(1, filled_state(1))
    path = tmp_path / "checkpoints" / "1"
    lists = path / "params" / parts.LISTS
    (lists / "process_0_of_1.json").rename(lists / "process_1_of_2.json")
    with pytest.raises(parts.DamagedCheckpoint, match="one list of each of 2 processes"):
        parts.read_lists(path / "params")
    with pytest.raises(parts.DamagedCheckpoint, match="one list of each of 2 processes"):
        manifest.write_manifest(path, manifest.read_manifest(path))
