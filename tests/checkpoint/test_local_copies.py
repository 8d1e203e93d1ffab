# SPDX-License-Identifier: Apache-2.0
"""Copies on a local disk: what comes back, what is refused, what is left after a kill."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx import whole_folders
from switchx.checkpoint.local_copies import LocalCopies
from switchx.checkpoint.parts import DamagedCheckpoint
from switchx.checkpoint.run_folder import RunFolder
from tests.data.refusals import refused
from tests.training.train_states import assert_same, damage

AUTO = (jax.sharding.AxisType.Auto,) * 2


def state_of(step: int, spec=None, dtype=jnp.float32) -> dict:
    """A state on eight devices: a split array, a whole one, a scalar."""
    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=AUTO)
    spec = jax.P("expert", None) if spec is None else spec
    values = np.arange(64, dtype=np.float32).reshape(8, 8) + step
    split = jax.device_put(jnp.asarray(values, dtype), jax.NamedSharding(mesh, spec))
    whole = jax.NamedSharding(mesh, jax.P())
    bias = jax.device_put(jnp.asarray(values[0], jnp.bfloat16), whole)
    return {"params": {"w": split, "b": bias}, "step": jax.device_put(jnp.asarray(step), whole)}


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path / "run").create()


@pytest.fixture
def copies(tmp_path, run):
    made = LocalCopies(str(tmp_path / "local"), run)
    yield made
    made.close()


def files_of(tmp_path, step):
    (folder,) = (tmp_path / "local").glob(f"run-*/process_0_of_1/{step}")
    return folder


def test_the_last_two_come_back_bit_equal_each_part_written_once(copies, tmp_path):
    for step in (1, 2, 3):
        state = state_of(step)
        copies.save(step, state, {"position": step})
        jax.tree.map(lambda leaf: leaf.delete(), state)  # as if it were donated
    copies.wait()
    assert copies.seconds > 0
    assert {path.name for path in files_of(tmp_path, 3).parent.glob("[0-9]*")} == {"2", "3"}
    want = state_of(3)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(want))
    assert (files_of(tmp_path, 3) / "arrays.bin").stat().st_size == size
    assert copies.newest(want) == 3
    for step in (2, 3):
        got, data = copies.restore(step, want)
        assert_same(got, state_of(step))
        assert data == [{"position": step}]
        for leaf, like in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert leaf.sharding == like.sharding


def test_training_may_write_where_a_restored_state_lies(copies):
    copies.save(1, state_of(1), None)
    copies.wait()
    got, _ = copies.restore(1, state_of(1))
    add = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    after = add(got)
    np.testing.assert_array_equal(after["params"]["w"], state_of(2)["params"]["w"])
    for shard in after["params"]["b"].addressable_shards:
        np.testing.assert_array_equal(shard.data, np.asarray(state_of(1)["params"]["b"]) + 1)
    assert_same(copies.restore(1, state_of(1))[0], state_of(1))


def test_what_a_killed_process_left_is_deleted(copies, run, tmp_path):
    copies.save(1, state_of(1), {})
    copies.wait()
    folder = files_of(tmp_path, 1).parent
    (folder / ".2.0123abcd.partial").mkdir()
    LocalCopies(str(tmp_path / "local"), run).close()
    assert sorted(each.name for each in folder.iterdir()) == ["1", "probe"]


def test_what_does_not_fit_is_not_taken(copies, run, tmp_path):
    for step in (1, 2):
        copies.save(step, state_of(step), None)
    copies.wait()
    assert copies.newest(state_of(0)) == 2
    for other in (
        state_of(0, spec=jax.P("data")),
        state_of(0, dtype=jnp.bfloat16),
        {"params": state_of(0)["params"]},
    ):
        assert copies.newest(other) is None
    content = {"files": {}, "run": run.identity.read_text(), "step": 2}  # of another form
    checksum = whole_folders.checksum_of(content, "crc32")
    whole = files_of(tmp_path, 2) / "manifest.json"
    whole.write_text(json.dumps(content | {"crc32": checksum}))
    assert copies.newest(state_of(0)) == 1
    whole.unlink()  # as one that was not finished
    assert copies.newest(state_of(0)) == 1
    copies.forget(lambda step: step == 1)
    assert copies.newest(state_of(0)) is None
    copies.save(3, state_of(3), None)
    copies.wait()
    run.identity.unlink()  # as `rewind` does, or one who begins a run of this name again
    assert LocalCopies(str(tmp_path / "local"), run).newest(state_of(0)) is None


def test_a_flipped_bit_is_found_when_it_is_read(copies, tmp_path):
    copies.save(1, state_of(1), None)
    copies.wait()
    damage(files_of(tmp_path, 1) / "arrays.bin")
    with pytest.raises(DamagedCheckpoint, match="its array params/w is not what was written"):
        copies.restore(1, state_of(1))


def test_a_copy_or_folder_that_cannot_be_written_is_named(
    copies, tmp_path, caplog, monkeypatch, run
):
    copies.save(1, state_of(1), None)
    copies.wait()

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    copies.save(2, state_of(2), None)
    copies.wait()
    assert "no local copy of the state in" in caplog.text and "No space left" in caplog.text
    monkeypatch.undo()
    monkeypatch.setattr("pathlib.Path.mkdir", lambda *_, **__: fail(0))
    copies.save(3, state_of(3), None)
    caplog.clear()
    copies.wait()
    assert "no local copy of the state in" in caplog.text and "No space left" in caplog.text
    monkeypatch.undo()
    assert copies.newest(state_of(0)) == 1
    assert not list(files_of(tmp_path, 1).parent.glob("*.partial"))
    (tmp_path / "file").write_text("")
    with refused(f"Retention.local_dir='{tmp_path}/file' cannot be written (Not a directory: "):
        LocalCopies(str(tmp_path / "file"), run)


def test_the_manifest_says_where_each_part_is(copies, tmp_path):
    copies.save(1, state_of(1), None)
    copies.wait()
    content = json.loads((files_of(tmp_path, 1) / "manifest.json").read_text())
    listed = content["arrays"]["params/w"]
    assert listed["dtype"] == "float32"
    assert [bounds for bounds, _, _ in listed["parts"]] == [
        [[start, start + 2], [0, 8]] for start in (0, 2, 4, 6)
    ]
