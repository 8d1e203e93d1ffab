# SPDX-License-Identifier: Apache-2.0
"""The commands that a summary ends in, pasted into a shell as they stand."""

import shutil
import subprocess

import switchx
from tests.integration.runs import arguments
from tests.processes import child_environment, run_in_turn


def in_a_shell(line: str, folder, environment=None) -> str:
    """What a line prints."""
    done = subprocess.run(
        line,
        shell=True,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"{line}\n{done.stderr}"
    return done.stdout


def test_next_commands_run_as_they_stand(finished_run, session_cache, tmp_path, run_cli):
    """Of a run whose paths need quoting and whose gin file requires a macro."""
    shutil.copy(finished_run.files, tmp_path / "my corpus.txt")
    bindings = ("TRAIN_STEPS=1", "RouterConfig.jitter=0.0", "TrainingJob.eval_batches=1")
    words = arguments("my run/", "my corpus.txt", *bindings)
    process = run_cli("train", *words)
    assert process.returncode == 0, process.stderr
    commands = process.stdout.rpartition("\nNext\n")[2].splitlines()
    assert len(commands) == 4
    # The shell says what words it makes of the lines; a single process runs three of them.
    in_turn = []
    for command in commands[:3]:
        said = in_a_shell(f"set -- {command}\nprintf '%s\\0' \"$@\"", tmp_path)
        program, _, options = said.removesuffix("\0").partition("switchx\0")
        assert program.endswith("-m\0") or not program
        in_turn.append(options.split("\0"))
    done = run_in_turn(in_turn, tmp_path, session_cache)
    assert done.returncode == 0, done.stderr
    said = done.stderr.split("$ switchx ")[1:]
    assert [each.split()[0] for each in said] == ["eval", "train", "train"]
    assert switchx.load(tmp_path / "my run").step == 2
    assert "restored all" in said[2]
    assert switchx.load(tmp_path / "my run_finetuned").step == 1
    assert in_a_shell(commands[3], tmp_path, child_environment(session_cache, devices=1))
    assert (tmp_path / "my run/report.html").is_file()
