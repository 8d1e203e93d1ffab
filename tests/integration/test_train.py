# SPDX-License-Identifier: Apache-2.0
"""`switchx train`, `eval` and `load` on a whole small run, and how it survives faults."""

import contextlib
import json
import shlex
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest

import switchx
from switchx import tree
from switchx.cli.main import main
from switchx.gin_config import building
from switchx.malloc import keep_freed_memory
from switchx.training.job import TrainingJob
from tests.integration.runs import arguments, lines

pytestmark = pytest.mark.usefixtures("steps_traced_once")

# A run whose steps take a while, for signals to come in time. It has as many devices as this
# process, though it uses one: they decide how products are split over threads, so their bits.
SLOWLY = """
import sys, time
from switchx.cli.main import main
from switchx.training.program import TrainingProgram
from tests.compilation import on_devices
place = TrainingProgram.place
def place_later(self, batch):
    time.sleep(0.3)
    return place(self, batch)
TrainingProgram.place = place_later
with on_devices(1):
    sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def run(in_a_folder, one_device, capsys):
    """`run("train", ...)` in this process: what it printed; `status` is what it ends with."""

    def run(*words, status: int = 0):
        capsys.readouterr()
        assert main(list(map(str, words))) == status, capsys.readouterr().err
        return capsys.readouterr()

    return run


def final_params(folder) -> dict[str, np.ndarray]:
    return {
        n: np.asarray(leaf)
        for n, leaf in tree.named_leaves(switchx.load(folder).params).items()
    }


def require_bit_equal(folder, other):
    got, want = final_params(folder), final_params(other)
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


def wait_for(path, process, timeout_s=200):
    end = time.monotonic() + timeout_s
    while not path.exists():
        assert process.poll() is None, process.log.read_text()
        assert time.monotonic() < end, f"{path} did not appear: {process.log.read_text()}"
        time.sleep(0.02)


def test_the_run_folder_holds_what_the_readme_says(finished_run):
    folder = finished_run.folder
    metrics, validation = lines(folder / "metrics.jsonl"), lines(folder / "validation.jsonl")
    assert [line["step"] for line in metrics] == [2, 4, 6, 8, 10, 12]
    assert [line["step"] for line in validation] == [0, 6, 12]
    names = "loss neg_log_perplexity accuracy grad_norm learning_rate tokens_per_s"
    names += " examples_per_s model_flops_per_s dropped_fraction routing"
    assert set(names.split()) <= metrics[-1].keys()
    routing = metrics[-1]["routing"]
    assert np.shape(routing["load"]) == (2, 8)  # one sparse block a stack, 8 experts
    np.testing.assert_allclose(np.sum(routing["load"], axis=1), 1.0, atol=1e-5)
    assert validation[-1]["neg_log_perplexity"] > validation[0]["neg_log_perplexity"]
    assert list((folder / "tensorboard").glob("events*"))
    assert f"tensorboard --logdir={folder}/tensorboard\n" in finished_run.stderr
    assert f"  {keep_freed_memory()}\n" in finished_run.stderr
    assert {path.name for path in (folder / "checkpoints").iterdir()} >= {"4", "8", "12"}
    assert (folder / "git_commit.txt").read_text().strip()
    (account,) = json.loads((folder / "corpora.json").read_text())
    assert account["corpus"] == "text_files"
    assert account["rows"] >= sum(account["documents"].values()) > 0


def test_the_summary_says_what_to_look_at_next(finished_run):
    out = finished_run.stdout
    texts = "validation negative log perplexity, tokens per second, dropped choices, "
    texts += "load per expert, metrics.jsonl, tensorboard, operative_config.gin, "
    texts += f"switchx eval, switchx train, {finished_run.folder / 'checkpoints' / '12'}"
    for text in texts.split(", "):
        assert text in out


def test_eval_of_the_folder_alone_repeats_the_last_validation(finished_run, run):
    """The operative configuration builds the job that was trained."""
    said = run("eval", f"--model_dir={finished_run.folder}", "--json")
    metrics = json.loads(said.out.splitlines()[-1])
    assert metrics == lines(finished_run.folder / "validation.jsonl")[-1]
    words = arguments("x", finished_run.files)
    files, bindings = (
        [word.partition("=")[2] for word in words if word.startswith("--gin_file")],
        [word.removeprefix("--gin.") for word in words if word.startswith("--gin.")],
    )
    building.parse_files(files, bindings)
    job = building.build("JOB", TrainingJob)
    building.parse_files([str(finished_run.folder / "operative_config.gin")], [])
    assert building.build("JOB", TrainingJob) == job


def test_sigterm_and_kill_9_and_the_same_command_end_bit_equal(
    finished_run, start_cli, run, tmp_path
):
    folder = tmp_path / "stopped"
    saved = folder / "checkpoints"
    words = arguments(folder, finished_run.files, "CHECKPOINT_EVERY=100")
    process = start_cli("train", *words, program=SLOWLY, devices=8)
    wait_for(folder / "metrics.jsonl", process)
    while not lines(folder / "metrics.jsonl"):
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0, process.log.read_text()
    (stopped,) = [int(path.name) for path in saved.iterdir()]
    assert 2 <= stopped < 10
    said = f"stopped by a signal; the state is saved at step {stopped}"
    assert said in process.log.read_text()

    words = arguments(folder, finished_run.files, "CHECKPOINT_EVERY=2")
    process = start_cli("train", *words, program=SLOWLY, devices=8)
    killed = stopped + 2 - stopped % 2
    wait_for(saved / str(killed), process)
    process.kill()
    process.wait()
    assert f"resumed from step {stopped}" in process.log.read_text()
    said = run("train", *words)
    assert "resumed from step" in said.err
    require_bit_equal(folder, finished_run.folder)
    assert [line["step"] for line in lines(folder / "metrics.jsonl")] == [2, 4, 6, 8, 10, 12]


def test_a_damaged_checkpoint_is_skipped_and_kept(finished_run, run, tmp_path, monkeypatch):
    folder = tmp_path / "damaged"
    shutil.copytree(finished_run.folder, folder)
    newest = folder / "checkpoints" / "12"
    data = max(newest.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 0xFF
    data.write_bytes(content)
    monkeypatch.setenv("SWITCHX_MALLOC", "system")  # and what says so, in passing
    said = run("train", *arguments(folder, finished_run.files)).err
    assert "malloc gives freed memory to the system (SWITCHX_MALLOC=system)" in said
    assert str(newest) in said and "is skipped" in said and "resumed from step 8" in said
    kept = next((folder / "checkpoints").glob("12.damaged*"))
    assert (kept / data.relative_to(newest)).read_bytes() == bytes(content)
    require_bit_equal(folder, finished_run.folder)


def test_an_alarm_ends_training_and_the_same_command_goes_on(finished_run, run, tmp_path):
    """The one fault is the threshold: more information than there can be."""
    folder = tmp_path / "alarmed"
    words = [
        *arguments(folder, finished_run.files, "RoutingAlarms.least_information=9.0"),
        *("--gin.RoutingAlarms.first_lines=1", "--gin.RoutingAlarms.lines_in_a_row=2"),
        "--gin.RoutingAlarms.dropped_factor=None",
        "--stop_on_alarm",
    ]
    said = run("train", *words, status=3).err
    text = "encoder 0: a token tells "
    assert f"step     6  alarm: {text}" in said  # lines 2 and 3, of steps 4 and 6
    assert f"switchx train: error: alarm at step 6: {text}" in said
    assert "the state is saved at step 6, and the same command goes on from there" in said
    alarms = lines(folder / "alarms.jsonl")
    assert [(alarm["step"], alarm["layer"]) for alarm in alarms] == [
        (6, "encoder 0"), (6, "decoder 0")
    ]  # fmt: skip
    run("train", *words)  # it is still raised, and not raised again
    require_bit_equal(folder, finished_run.folder)
    assert lines(folder / "alarms.jsonl") == alarms


@contextlib.contextmanager
def small_disk(folder, mebibytes: int):
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs to mount a tmpfs: root, outside of a sandbox")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
def test_disk_that_is_full_while_saving(finished_run, run, tmp_path):
    """Nothing is lost: with space made, the same command goes on and ends bit-equal."""
    disk = tmp_path / "disk"
    with small_disk(disk, mebibytes=5):
        words = arguments(disk / "run", finished_run.files)
        run("train", *words, "--gin.TRAIN_STEPS=4")
        filler = disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb") as file:
            while shutil.disk_usage(disk).free > 1 << 20:
                file.write(bytes(1 << 16))
        said = run("train", *words, status=1).err
        for part in (
            f"checkpoint 8 could not be written to {disk}/run/checkpoints: it needs about ",
            " MiB free. Intact: 4. ",
            "then run the same command to resume\n",
        ):
            assert part in said
        filler.unlink()
        said = run("train", *words).err
        assert "resumed from step 4" in said
        got = lines(disk / "run/metrics.jsonl")
    want = lines(finished_run.folder / "metrics.jsonl")
    assert [row["step"] for row in got] == [row["step"] for row in want]
    assert [row["loss"] for row in got] == [row["loss"] for row in want]


def test_the_commands_that_the_summary_ends_in_run_as_they_stand(finished_run, run, tmp_path):
    """Of a run whose paths need quoting and whose gin file requires a macro."""
    shutil.copy(finished_run.files, tmp_path / "my corpus.txt")
    bindings = ("TRAIN_STEPS=1", "TrainingJob.eval_batches=1")
    said = run("train", *arguments("my run/", "my corpus.txt", *bindings))
    commands = said.out.rpartition("\nNext\n")[2].splitlines()
    assert len(commands) == 4
    said = {}
    for command in commands:
        # The shell says what words it makes of a line.
        shell = f"set -- {command}\nprintf '%s\\0' \"$@\""
        words = subprocess.check_output(["sh", "-c", shell], text=True).split("\0")[:-1]
        assert words == shlex.split(command)
        name, *options = words[words.index("switchx") + 1 :]
        said[f"{name} {len(said)}"] = run(name, *options)
    assert list(said) == ["eval 0", "train 1", "train 2", "report 3"]
    assert switchx.load(tmp_path / "my run").step == 2
    assert "restored 28 parameter arrays" in said["train 2"].err
    assert switchx.load(tmp_path / "my run_finetuned").step == 1
    assert (tmp_path / "my run/report.html").is_file()
