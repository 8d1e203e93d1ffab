# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds as items by name; every fault of one is found and named."""

import dataclasses
import json
import shutil
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx import whole_folders
from switchx.checkpoint import items as checkpoint_items
from switchx.checkpoint import manifest as checkpoint_manifest
from switchx.checkpoint.checkpointer import Checkpointer, Retention
from switchx.checkpoint.manifest import Manifest, read_manifest, write_manifest
from switchx.checkpoint.parts import LISTS, MANIFEST
from switchx.checkpoint.run_folder import RunFolder
from switchx.checkpoint.verify import checkpoint_faults
from switchx.training.resume import write_run_config
from switchx.training.step import init_state
from switchx.tree import named_leaves
from tests.cases import slow
from tests.training.jobs import DENSE, make_job, make_params
from tests.training.train_states import damage, filled_state, raw


def test_parameters_stand_apart_and_the_state_comes_back():
    state = filled_state(3)
    items = checkpoint_items.to_items(state)
    assert items.keys() == {"params", "train_state"}
    assert named_leaves(items["params"]).keys() == named_leaves(state.params).keys()
    assert "step" in items["train_state"]
    again = checkpoint_items.from_items(items, state)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    for got, want in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(raw(got), raw(want))


@pytest.mark.parametrize("data_state", [None, b"\x00\xff", {"step": 3, "rows": [1, 2]}])
def test_a_data_state_survives_json(data_state, tmp_path):
    encoded = json.loads(json.dumps(checkpoint_items.encode_data_state(data_state)))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / checkpoint_items.data_file()).write_text(json.dumps(encoded))
    assert checkpoint_items.read_data_states(tmp_path) == [data_state]


def test_data_states_of_all_processes_come_back_or_none(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for index in (0, 10, *range(2, 10)):
        (folder / f"process_{index}_of_11.json").write_text(f'{{"json": {index}}}')
    with pytest.raises(ValueError, match="process_9_of_11.json, not one of each process that"):
        checkpoint_items.read_data_states(tmp_path)
    (folder / "process_1_of_11.json").write_text('{"json": 1}')
    assert checkpoint_items.read_data_states(tmp_path) == list(range(11))
    with pytest.raises(ValueError, match="has data iterator states none, not one of each"):
        checkpoint_items.read_data_states(folder)


MODEL = dataclasses.replace(DENSE, num_decoder_layers=1)
STEP = 7


def save(path, change=lambda params: params, *, rows=8, step=STEP, data_step=STEP) -> RunFolder:
    """A run of the model whose checkpoint has other parameters, rows or steps."""
    run, job = RunFolder(path).create(), make_job(MODEL)
    write_run_config(run, job)
    params = change(make_params(MODEL))
    state = init_state(MODEL, job.optimizer.build(job.schedule), seed=0, params=params)
    state = dataclasses.replace(state, step=jnp.asarray(step, jnp.int32))
    data = {
        "pipeline": {},
        "step": data_step,
        "rows": list(range(rows)),
        "cursors": [[0]] * rows,
    }
    with Checkpointer(run, Retention()) as checkpointer:
        checkpointer.save(STEP, state, data)
    return run


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return save(tmp_path_factory.mktemp("run"))


@pytest.fixture
def run(sound, tmp_path) -> RunFolder:
    """A copy that a test may damage."""
    return RunFolder(shutil.copytree(sound.root, tmp_path / "run"))


def test_a_sound_one_has_no_fault_and_one_never_finished_one(sound, tmp_path):
    assert checkpoint_faults(sound, STEP) == []
    run = RunFolder(tmp_path)
    (run.checkpoints / "7" / "params").mkdir(parents=True)
    assert checkpoint_faults(run, STEP) == [
        "it has no manifest.json, so it was not written to its end"
    ]


def test_what_may_not_be_read_is_a_fault_beside_others(sound, monkeypatch):
    refused = PermissionError(13, "Permission denied")
    monkeypatch.setattr(whole_folders, "files_in", Mock(side_effect=refused))
    (fault, *_) = checkpoint_faults(sound, STEP)
    assert fault == "it cannot be read ([Errno 13] Permission denied)"


def test_every_file_that_is_cut_or_gone_is_named(run):
    path = run.checkpoints / str(STEP)
    files = sorted(read_manifest(path).files)
    cut, gone = files[-1], files[len(files) // 2]
    (path / cut).write_bytes((path / cut).read_bytes()[:-1])
    (path / gone).unlink()
    faults = checkpoint_faults(run, STEP)
    assert len(faults) == 2
    assert f"its file {gone} is missing" in faults
    assert any(f"its file {cut} has " in fault and " bytes, not " in fault for fault in faults)


def test_a_flipped_bit_is_named_in_arrays_lists_and_data(run):
    path = run.checkpoints / str(STEP)
    lists = [f"{item}/checksums/process_0_of_1.json" for item in ("params", "train_state")]
    for name in (*lists, "data/process_0_of_1.json"):
        contents = (path / name).read_bytes()
        damage(path / name)
        said = f"its file {name} has changed since it was written"
        assert checkpoint_faults(run, STEP) == [said]
        (path / name).write_bytes(contents)
    arrays = path.glob("*/ocdbt.process_0/d/*")
    damage(max(arrays, key=lambda file: file.stat().st_size))
    (fault,) = checkpoint_faults(run, STEP)
    assert fault.startswith("its array ")


def test_values_that_are_not_finite(tmp_path):
    def spoil(params):
        ffn = params["decoder"]["blocks"]["layer_0"]["ffn"]
        matrix = np.array(ffn["w_in_DF"])
        matrix[3, :2], matrix[5, 1] = np.nan, np.inf
        ffn["w_in_DF"] = jnp.asarray(matrix)
        return params

    assert checkpoint_faults(save(tmp_path, spoil), STEP) == [
        "decoder/blocks/layer_0/ffn/w_in_DF has 3 of 384 values that are not finite"
    ]


def test_steps_rows_and_models_that_do_not_belong_together(run, tmp_path):
    description = json.loads(run.config.read_text())
    description["model"]["d_ff"] = 32
    run.config.write_text(json.dumps(description))
    faults = checkpoint_faults(run, STEP)
    assert "it is not of the run's model: it does not fit; 2 of " in faults[0]
    assert any("expected float32[16, 32], got float32[16, 24]" in fault for fault in faults)
    assert checkpoint_faults(save(tmp_path / "a", step=6), STEP) == [
        "its state is of step 6, its folder of step 7"
    ]
    assert checkpoint_faults(save(tmp_path / "b", data_step=6, rows=6), STEP) == [
        "its data goes on at step 6, its state at step 7",
        "its data has no state of rows 6, 7",
    ]


def test_a_missing_process(run):
    path = run.checkpoints / str(STEP)
    file = path / "data" / "process_0_of_1.json"
    file.rename(file.with_name("process_0_of_2.json"))
    (path / "manifest.json").unlink()
    write_manifest(path, Manifest(STEP, None, {}))
    (fault,) = checkpoint_faults(run, STEP)
    assert "has data iterator states process_0_of_2.json, not one of each process" in fault


def test_a_manifest_of_another_step_or_with_other_fields_is_no_manifest(tmp_path):
    folder = tmp_path / "30"
    folder.mkdir()
    write_manifest(folder, Manifest(30, -1.5, {"neg_log_perplexity": -1.5}))
    assert read_manifest(folder) == Manifest(30, -1.5, {"neg_log_perplexity": -1.5})
    moved = folder.rename(tmp_path / "40")
    assert checkpoint_manifest.find_damage(moved) == ("its manifest.json is of step 30")
    whole_folders.write_manifest(moved, "manifest.json", {"step": 40}, "crc32")
    assert checkpoint_manifest.find_damage(moved) == ("its manifest.json is damaged")


def write_manifest_of_before(path, *, has_lists: bool) -> None:
    """Makes a checkpoint as it was: with lists, then no file has a CRC-32 but they; without,
    every file has one."""
    about = vars(read_manifest(path))
    files = about.pop("files")
    (path / MANIFEST).unlink()
    if not has_lists:
        data = path / "data" / checkpoint_items.data_file()
        data.write_text(json.dumps({"json": json.loads(data.read_text())["json"]}))
        for folder in path.glob(f"*/{LISTS}"):
            shutil.rmtree(folder)
    bare = {name: [size, crc if LISTS in name else None] for name, (size, crc) in files.items()}
    known, left_out = bare if has_lists else {}, checkpoint_manifest._COMMIT_FILES
    whole_folders.write_manifest(path, MANIFEST, about, "crc32", left_out=left_out, known=known)


# Of the two that were: before small files had a CRC-32, and before there were lists.
AGES = ("now", "lists alone", "no lists")


@pytest.mark.parametrize(
    ("age", "samples"),
    [(age, 1) for age in AGES] + [slow(age, 16) for age in AGES],  # a minute or two
)
def test_no_flipped_byte_is_sound_for_verify_and_damaged_for_resume(
    age, samples, run, monkeypatch
):
    """Of each file so many bytes, all where it has no more: both refuse it, or neither does and
    the state is as it was."""
    path = run.checkpoints / str(STEP)
    if age != "now":
        write_manifest_of_before(path, has_lists=age == "lists alone")
    if age == "no lists":  # some files are not small, and read with the arrays
        monkeypatch.setattr(checkpoint_manifest, "_SMALL_BYTES", 1000)
    job = make_job(MODEL)
    state = init_state(
        MODEL, job.optimizer.build(job.schedule), seed=0, params=make_params(MODEL)
    )
    rng = np.random.default_rng(0)
    with Checkpointer(run, Retention()) as checkpointer:

        def resumed() -> list | None:
            try:
                restored, data = checkpointer.restore(state, STEP)
            except ValueError:
                return None
            return [*(raw(leaf).tobytes() for leaf in jax.tree.leaves(restored)), data]

        whole = resumed()
        assert whole and checkpoint_faults(run, STEP) == []
        for name, (num_bytes, crc) in sorted(read_manifest(path).files.items()):
            contents = (path / name).read_bytes()
            for at in sorted(rng.permutation(num_bytes)[:samples]):
                flipped = bytearray(contents)
                flipped[at] ^= 1 << rng.integers(8)
                (path / name).write_bytes(flipped)
                found, faults = resumed(), checkpoint_faults(run, STEP)
                assert found in (None, whole), (name, at)
                assert bool(faults) == (found is None), (name, at, faults)
                assert faults or crc is None, (name, at)
            (path / name).write_bytes(contents)
        assert resumed() == whole and checkpoint_faults(run, STEP) == []
