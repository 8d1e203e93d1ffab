# SPDX-License-Identifier: Apache-2.0
"""Folders of a deployment: whole or not there, none made twice, whoever is killed when."""

import fcntl
import json
import subprocess
import sys

import pytest

from switchx.deploy.folders import LOG, MANIFEST, Step, run_steps, steps_done_twice
from tests.data.refusals import refused
from tests.processes import ROOT

SOURCE = {"model_dir": "/runs/a", "fingerprint": "abc"}
NAMES = ("one", "two", "three")
# Writes two files a step, and is killed by itself where its argument says: before a step, in
# the middle of one, or when its folder is there and its line in the log is not.
PROGRAM = """
import os, signal, sys
from switchx.deploy import folders

place, root = sys.argv[1:]
def reached(here):
    if here == place:
        os.kill(os.getpid(), signal.SIGKILL)

def step(name):
    def make(made, folder):
        (folder / "a").write_text(name)
        reached(f"in {name}")
        (folder / "b").write_text(name)
        return {}
    return folders.Step(name, {}, make)

append = folders._append
def appended(root, entry):
    reached(f"{entry['event']} {entry.get('step')}")
    append(root, entry)
folders._append = appended
source = {"model_dir": "/runs/a", "fingerprint": "abc"}
folders.run_steps(root, source, [step(name) for name in ("one", "two", "three")])
"""


def steps(calls: list[str], **settings) -> list[Step]:
    """Steps that note that they were made; `settings` by the step's name."""

    def step(name: str) -> Step:
        def make(made, folder):
            calls.append(name)
            (folder / "file").write_text(f"{name} after {', '.join(made)}")
            return {"number": len(made)}

        return Step(name, {"value": settings.get(name)}, make)

    return [step(name) for name in NAMES]


def run(root, source=SOURCE, **settings) -> list[str]:
    """The steps that were made."""
    calls: list[str] = []
    made = run_steps(root, source, steps(calls, **settings))
    assert [each.path.name for each in made] == ["1_one", "2_two", "3_three"]
    assert [each.measured["number"] for each in made] == [0, 1, 2]
    assert [name for name, each in zip(NAMES, made, strict=True) if each.is_new] == calls
    return calls


def test_all_is_made_once(tmp_path):
    root = tmp_path / "d"
    assert run(root) == ["one", "two", "three"]
    assert (root / "3_three/file").read_text() == "three after one, two"
    assert run(root) == []
    manifest = json.loads((root / "2_two" / MANIFEST).read_text())
    first = json.loads((root / "1_one" / MANIFEST).read_text())
    assert manifest["made_of"] == first["sha256"] and first["made_of"] == "abc"
    assert set(manifest["files"]) == {"file"}
    assert steps_done_twice(root) == 0


def test_other_settings_begin_with_the_first_step_that_they_concern(tmp_path):
    assert run(tmp_path) == ["one", "two", "three"]
    assert run(tmp_path, two=4) == ["two", "three"]
    assert run(tmp_path, two=4, three=1) == ["three"]
    assert run(tmp_path, three=1) == ["two", "three"]
    assert run(tmp_path, SOURCE | {"fingerprint": "later"}) == ["one", "two", "three"]
    assert steps_done_twice(tmp_path) == 0


@pytest.mark.parametrize("damage", ["changed", "missing", "manifest"])
def test_a_step_that_is_not_whole_is_made_again_with_all_that_follow(tmp_path, damage):
    run(tmp_path)
    file = tmp_path / "2_two" / (MANIFEST if damage == "manifest" else "file")
    if damage == "missing":
        file.unlink()
    else:
        file.write_text(file.read_text().replace("two", "owt", 1))
    assert run(tmp_path) == ["two", "three"]
    assert steps_done_twice(tmp_path) == 0


def test_a_step_that_was_made_in_vain_is_counted(tmp_path):
    run(tmp_path)
    lines = (tmp_path / LOG).read_text().splitlines()
    done = next(line for line in lines if '"done"' in line)
    (tmp_path / LOG).write_text("\n".join([*lines, done, '{"half']))
    assert steps_done_twice(tmp_path) == 1
    assert run(tmp_path) == []  # the half line is no entry


@pytest.mark.parametrize(
    ("place", "there"),
    [
        ("in one", []),
        ("done one", ["1_one"]),
        ("begun two", ["1_one"]),
        ("in three", ["1_one", "2_two"]),
        ("done three", ["1_one", "2_two", "3_three"]),
    ],
)
def test_a_killed_process_is_followed_by_one_that_goes_on(tmp_path, place, there):
    for argument in (place, "never"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, argument, str(tmp_path)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == (-9 if argument == place else 0), done.stderr
        if argument == place:
            found = sorted(each.name for each in tmp_path.glob("[0-9]*"))
            assert found == there
            times = {each: each.stat().st_mtime_ns for each in tmp_path.glob("[0-9]*/a")}
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(
        ["1_one", "2_two", "3_three", LOG]
    )
    assert {each: each.stat().st_mtime_ns for each in times} == times
    assert steps_done_twice(tmp_path) == 0


def test_folders_of_others_are_refused(tmp_path):
    run(tmp_path / "d")
    other = {"model_dir": "/runs/b", "fingerprint": "xyz"}
    with refused(f"{tmp_path / 'd'} holds the deployment of another model, /runs/a; <any>"):
        run_steps(tmp_path / "d", other, steps([]))
    # The same model, moved.
    assert run(tmp_path / "d", SOURCE | {"model_dir": "/runs/moved"}) == []
    (tmp_path / "e").mkdir()
    (tmp_path / "e/file").touch()
    with refused(f"{tmp_path / 'e'} exists and holds no deployment; give <any>"):
        run_steps(tmp_path / "e", SOURCE, steps([]))
    with (tmp_path / "d" / LOG).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with refused(f"another process is making {tmp_path / 'd'}; wait for it<any>"):
            run_steps(tmp_path / "d", SOURCE, steps([]))
