# SPDX-License-Identifier: Apache-2.0
"""Two processes save together: each lists what it wrote, and names what it could not write."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

from switchx import whole_folders
from switchx.checkpoint import parts
from switchx.checkpoint.restore import restore_params
from tests.cases import slow
from tests.checkpoint.two_processes import in_two
from tests.processes import child_environment, free_port, run_together
from tests.promises import saves
from tests.training.saved_runs import MODEL, kept, save_run
from tests.training.train_states import damage

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def saved(tmp_path_factory, session_cache):
    folder = tmp_path_factory.mktemp("saved")
    assert [status for status, _ in in_two(folder, "save", session_cache)] == [0, 0]
    return folder


def test_copies_on_local_disks_are_those_that_all_processes_have(tmp_path, session_cache):
    outcomes = in_two(tmp_path, "copy", session_cache)
    assert [status for status, _ in outcomes] == [0, 0], outcomes
    first, second = (json.loads(output.splitlines()[-1]) for _, output in outcomes)
    assert first[:2] == second[:2] == [[3, 2], [{"process": 0}, {"process": 1}]]
    assert first[2] == "its part that another process read has changed"
    assert second[2].endswith(" is not what was written (CRC-32)")


def test_one_process_reads_what_two_have_listed(saved):
    arrays, files = parts.read_lists(saved / "checkpoints" / "2" / "params")
    assert {name.split("/")[0] for name in files} == {
        "array_metadatas", "ocdbt.process_0", "ocdbt.process_1",
    }  # fmt: skip
    assert {name: len(each.parts) for name, each in arrays.items()} == {
        "by_both": 4, "by_data": 4, "by_expert": 4, "whole": 4,
    }  # fmt: skip
    got, want = restore_params(saved), saves.random_state()["params"]
    for name, values in want.items():
        np.testing.assert_array_equal(got[name], np.asarray(values))


def test_values_that_one_process_finds_changed_are_set_aside_by_both(
    saved, tmp_path, session_cache
):
    folder = tmp_path / "run"
    subprocess.run(["cp", "-r", str(saved), str(folder)], check=True)
    path = folder / "checkpoints" / "2" / "params" / parts.LISTS / "process_1_of_2.json"
    content = json.loads(path.read_text())
    del content["crc32"]
    content["arrays"]["by_expert"]["parts"][0][1] ^= 1
    path.write_text(
        json.dumps(content | {"crc32": whole_folders.checksum_of(content, "crc32")})
    )
    whole = folder / "checkpoints" / "2" / "manifest.json"
    about = json.loads(whole.read_text())
    about["files"][f"params/{parts.LISTS}/{path.name}"][0] = path.stat().st_size
    del about["crc32"]
    whole.write_text(json.dumps(about | {"crc32": whole_folders.checksum_of(about, "crc32")}))
    outcomes = in_two(folder, "resume", session_cache)
    assert [status for status, _ in outcomes] == [0, 0], outcomes
    assert [output.splitlines()[-1] for _, output in outcomes] == ["1", "1"]
    assert (folder / "checkpoints" / "2.damaged-1").is_dir() and kept(folder) == [1]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("full_disk", "No space left on device"),
        ("killed", "process 1"),
        slow("no_manifest", "No space left on device"),
    ],
)
def test_a_process_that_cannot_finish_ends_both_and_loses_nothing(
    tmp_path, session_cache, what, said
):
    outcomes = in_two(tmp_path, f"save {what}", session_cache)
    assert all(status for status, _ in outcomes)
    assert said in outcomes[0][1], outcomes
    assert kept(tmp_path) == [1]
    outcomes = in_two(tmp_path, "resume", session_cache)
    assert [output.splitlines()[-1] for _, output in outcomes] == ["1", "1"], outcomes
    assert (tmp_path / "checkpoints" / "2.unfinished-1").is_dir()


def test_two_processes_verify_together(tmp_path, session_cache):
    # Its parameters are larger than Orbax' index of them.
    run = save_run(tmp_path / "run", dataclasses.replace(MODEL, d_model=64))
    params = run / "checkpoints" / "9" / "params"
    for harm, status in ((False, 0), (True, 1)):
        if harm:
            damage(max(params.rglob("d/*"), key=lambda path: path.stat().st_size))
        port, words = free_port(), [sys.executable, "-m", "switchx", "checkpoint", "verify"]
        words += [str(run), "--json", f"--coordinator=localhost:{port}", "--num_processes=2"]
        commands = [[*words, f"--process_id={index}"] for index in range(2)]
        outcomes = run_together(commands, child_environment(session_cache, devices=2))
        assert [each for each, _ in outcomes] == [status, status], outcomes
        faults = json.loads(outcomes[0][1].splitlines()[-1])["faults"]
        assert faults["5"] == [] and len(faults["9"]) == harm
        assert all("its array params/" in fault for fault in faults["9"])
        assert "faults" not in outcomes[1][1]
