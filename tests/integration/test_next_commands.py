# SPDX-License-Identifier: Apache-2.0
"""The commands that a summary ends in, pasted into a shell as they stand."""

import shutil
import subprocess

import switchx
from tests.integration.runs import arguments
from tests.processes import child_environment


def test_next_commands_run_as_they_stand(finished_run, session_cache, tmp_path, run_cli):
    """Of a run whose paths need quoting and whose gin file requires a macro."""
    shutil.copy(finished_run.files, tmp_path / "my corpus.txt")
    bindings = ("TRAIN_STEPS=1", "RouterConfig.jitter=0.0", "TrainingJob.eval_batches=1")
    words = arguments("my run/", "my corpus.txt", *bindings)
    process = run_cli("train", *words)
    assert process.returncode == 0, process.stderr
    commands = process.stdout.rpartition("\nNext\n")[2].splitlines()
    assert len(commands) == 4
    said = []
    for command in commands:
        done = subprocess.run(
            command,
            shell=True,
            cwd=tmp_path,
            env=child_environment(session_cache, devices=1),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        assert done.stdout
        said.append(done.stderr)
    assert switchx.load(tmp_path / "my run").step == 2
    assert "restored all" in said[2]
    assert (tmp_path / "my run/report.html").is_file()
    assert switchx.load(tmp_path / "my run_finetuned").step == 1
