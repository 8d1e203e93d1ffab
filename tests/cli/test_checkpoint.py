# SPDX-License-Identifier: Apache-2.0
"""`switchx checkpoint`: what it shows is what is there; what it writes is new."""

import numpy as np
import pytest

from switchx.checkpoint.restore import restore_params
from switchx.checkpoint.run_folder import RunFolder
from switchx.checkpoint.verify import checkpoint_faults
from switchx.models.params import abstract_params
from switchx.tree import named_leaves, num_bytes, num_elements
from tests.training.saved_runs import MODEL, save_run
from tests.training.train_states import damage


@pytest.fixture
def folder(tmp_path):
    return save_run(tmp_path / "run", MODEL)


def test_inspect_shows_what_is_there(folder, cli):
    report = cli.json("checkpoint", "inspect", folder, "--json")
    assert report["step"] == 9
    assert [row["step"] for row in report["checkpoints"]] == [5, 9]
    assert [row["score"] for row in report["checkpoints"]] == [-1.0, -2.0]
    params = [each for each in report["arrays"] if each["name"].startswith("params/")]
    wanted = named_leaves(abstract_params(MODEL))
    assert {each["name"].removeprefix("params/") for each in params} == wanted.keys()
    for each in params:
        leaf = wanted[each["name"].removeprefix("params/")]
        assert (each["shape"], each["dtype"]) == (list(leaf.shape), leaf.dtype)
    assert sum(each["bytes"] for each in params) == num_bytes(abstract_params(MODEL))
    assert report["config"]["model"]["d_model"] == 8
    said = cli("checkpoint", "inspect", folder, "--step=best").out
    assert "step 5: name, shape" in said
    assert f"{len(params)} arrays, {num_elements(abstract_params(MODEL)):,} numbers" in said


def test_inspect_goes_past_what_is_not_whole(folder, cli, tmp_path):
    (folder / "checkpoints" / "9" / "manifest.json").unlink()
    said = cli("checkpoint", "inspect", folder).out
    assert "9  not whole: it has no manifest.json" in said and "step 5: name" in said
    assert "no whole checkpoint 9 among 5, 9 in" in cli.refused(
        "checkpoint", "inspect", folder, "--step=9"
    )
    assert "give: inspect|verify" in cli.refused("checkpoint")
    for action in ("inspect", "verify"):
        assert "has no checkpoints: nothing is there" in cli.refused(
            "checkpoint", action, tmp_path / "none"
        )


def test_verify_names_every_fault_and_fails(folder, cli):
    assert cli("checkpoint", "verify", folder).out.count(": sound\n") == 2
    (index,) = (folder / "checkpoints" / "9" / "params").glob("d/*")
    damage(index)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    faults = cli.json("checkpoint", "verify", folder, "--json", status=1)["faults"]
    assert faults["5"] == [] and len(faults["9"]) == 1
    assert faults["9"][0].startswith("its arrays of params cannot be read: ")
    cli("checkpoint", "verify", folder, "--step=5")
    assert "has no checkpoint 6, but 5, 9" in cli.refused(
        "checkpoint", "verify", folder, "--step=6"
    )
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_verify_takes_a_deletion_for_no_fault(folder, cli, monkeypatch):
    def too_late(run, step):
        (run.checkpoints / str(step)).rename(run.root / f"deleted_{step}")
        return checkpoint_faults(run, step)

    monkeypatch.setattr("switchx.checkpoint.verify.checkpoint_faults", too_late)
    said = cli("checkpoint", "verify", folder, "--step=5").out
    assert "5: deleted while it was read" in said
    assert cli.json("checkpoint", "verify", folder, "--json")["faults"] == {}


def test_average_writes_the_mean_as_a_run_that_loads(folder, tmp_path, cli):
    out = tmp_path / "mean"
    assert (
        "the mean of steps 5, 9" in cli("checkpoint", "average", folder, out, "--steps=5,9").out
    )
    got, first, second = (
        named_leaves(restore_params(run, step))
        for run, step in ((out, 0), (folder, 5), (folder, 9))
    )
    for name, leaf in got.items():
        expected = (first[name].astype(np.float64) + second[name]) / 2
        np.testing.assert_allclose(leaf, expected, rtol=1e-6, err_msg=name)
    cli("checkpoint", "verify", out)
    for words, said in (
        (["--steps=5,6"], "no complete checkpoint of step 6 in"),
        (["--steps=5"], "steps 5; use two or more"),
        (["--steps=5,a"], "'5,a' are no whole numbers"),
        (["--steps=5,9", "--step=5"], "--step is for --moving"),
        (["--moving"], "9 has no average of parameters; train with StepConfig.ema_decay"),
    ):
        other = tmp_path / "other"
        assert (
            said in cli.refused("checkpoint", "average", folder, other, *words)
            and not other.exists()
        )


def test_rewind_makes_an_earlier_one_the_newest_and_deletes_nothing(folder, cli):
    checkpoints = folder / "checkpoints"
    for words, said in (
        ([], "give --step=N or --step=best"),
        (["--step=6"], "no complete checkpoint of step 6 in"),
    ):
        assert said in cli.refused("checkpoint", "rewind", folder, *words)
    run = RunFolder(folder)
    with run.locked():
        assert "is being trained by process" in cli.refused(
            "checkpoint", "rewind", folder, "--step=5"
        )
    assert {path.name for path in checkpoints.iterdir()} == {"5", "9"}
    want = restore_params(folder, 5)
    for renamed in (["9.superseded-1"], []):
        report = cli.json("checkpoint", "rewind", folder, "--step=best", "--json")
        assert (report["step"], report["renamed"]) == (5, renamed)
    assert {path.name for path in checkpoints.iterdir()} == {"5", "9.superseded-1"}
    for name, values in named_leaves(restore_params(folder)).items():
        np.testing.assert_array_equal(values, named_leaves(want)[name])
