# SPDX-License-Identifier: Apache-2.0
"""`switchx train`, `eval` and `load` on a whole small run, and how it survives faults."""

import json
import os
import shutil
import signal
import time

import numpy as np
import pytest

import switchx
from switchx import tree
from switchx.cli.config import building
from switchx.training.job import TrainingJob
from tests.integration.runs import SMALL, arguments, lines
from tests.processes import run_in_turn


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
    names = {
        "loss",
        "neg_log_perplexity",
        "accuracy",
        "grad_norm",
        "learning_rate",
        "tokens_per_s",
        "examples_per_s",
        "model_flops_per_s",
        "dropped_fraction",
        "routing",
    }
    assert names <= metrics[-1].keys()
    routing = metrics[-1]["routing"]
    assert np.shape(routing["load"]) == (2, 8)  # one sparse block a stack, 8 experts
    np.testing.assert_allclose(np.sum(routing["load"], axis=1), 1.0, atol=1e-5)
    assert validation[-1]["neg_log_perplexity"] > validation[0]["neg_log_perplexity"]
    assert list((folder / "tensorboard").glob("events*"))
    assert {path.name for path in (folder / "checkpoints").iterdir()} >= {"4", "8", "12"}
    assert (folder / "git_commit.txt").read_text().strip()


def test_the_summary_says_what_to_look_at_next(finished_run):
    out = finished_run.stdout
    for text in (
        "validation negative log perplexity",
        "tokens per second",
        "dropped tokens",
        "load per expert",
        str(finished_run.folder / "checkpoints" / "12"),
        "metrics.jsonl",
        "tensorboard",
        "operative_config.gin",
        "switchx eval",
        "switchx train",
    ):
        assert text in out


def test_the_operative_config_builds_the_same_job(finished_run):
    building.parse_files([str(SMALL)], [f"FILES={finished_run.files}"])
    job = building.build("JOB", TrainingJob)
    building.parse_files([str(finished_run.folder / "operative_config.gin")], [])
    assert building.build("JOB", TrainingJob) == job


def test_eval_repeats_the_last_validation(finished_run, run_cli):
    process = run_cli("eval", *arguments(finished_run.folder, finished_run.files), "--json")
    assert process.returncode == 0, process.stderr
    metrics = json.loads(process.stdout.splitlines()[-1])
    assert metrics == lines(finished_run.folder / "validation.jsonl")[-1]


def test_load_gives_config_params_and_vocabulary(finished_run):
    model = switchx.load(finished_run.folder)
    assert model.step == 12 and model.config.d_model == 32
    assert model.params["embedding"]["embedding_VD"].shape == (384, 32)
    assert model.vocabulary.decode(model.vocabulary.encode("gate")) == "gate"


def test_kill_9_and_the_same_command_end_bit_equal(finished_run, start_cli, run_cli, tmp_path):
    folder = tmp_path / "killed"
    command = arguments(folder, finished_run.files, "CHECKPOINT_EVERY=2")
    process = start_cli("train", *command)
    wait_for(folder / "checkpoints" / "4", process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    again = run_cli("train", *command)
    assert again.returncode == 0, again.stderr
    assert "resumed from step" in again.stderr
    require_bit_equal(folder, finished_run.folder)
    assert [line["step"] for line in lines(folder / "metrics.jsonl")] == [2, 4, 6, 8, 10, 12]


def test_sigterm_saves_and_leaves_cleanly(finished_run, start_cli, run_cli, tmp_path):
    folder = tmp_path / "stopped"
    command = arguments(folder, finished_run.files, "CHECKPOINT_EVERY=1000")
    process = start_cli("train", *command, "--gin.TRAIN_STEPS=100000")
    wait_for(folder / "metrics.jsonl", process)
    while not lines(folder / "metrics.jsonl"):
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0, process.log.read_text()
    saved = [int(path.name) for path in (folder / "checkpoints").iterdir()]
    assert len(saved) == 1 and saved[0] >= 2
    assert (
        f"stopped by a signal; the state is saved at step {saved[0]}" in process.log.read_text()
    )
    if saved[0] < 12:
        assert run_cli("train", *command).returncode == 0
        require_bit_equal(folder, finished_run.folder)


def test_a_damaged_checkpoint_is_skipped_and_kept(finished_run, run_cli, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(finished_run.folder, folder)
    newest = folder / "checkpoints" / "12"
    data = max(newest.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 0xFF
    data.write_bytes(content)
    process = run_cli("train", *arguments(folder, finished_run.files))
    assert process.returncode == 0, process.stderr
    assert str(newest) in process.stderr and "is skipped" in process.stderr
    assert "resumed from step 8" in process.stderr
    kept = next((folder / "checkpoints").glob("12.damaged*"))
    assert (kept / data.relative_to(newest)).read_bytes() == bytes(content)
    require_bit_equal(folder, finished_run.folder)


def test_finetuning_starts_from_the_named_parameters(finished_run, session_cache, tmp_path):
    folder = tmp_path / "finetuned"
    commands = [
        ["train"]
        + arguments(
            folder,
            finished_run.files,
            f"INIT_FROM={finished_run.folder}",
            f"TRAIN_STEPS={steps}",
            "SwitchConfig.expert_dropout_rate=0.4",
        )
        for steps in (0, 2)
    ]
    process = run_in_turn(commands, tmp_path, session_cache)
    assert process.returncode == 0, process.stderr
    assert "restored all" in process.stderr
    first = lines(folder / "validation.jsonl")[0]
    last = lines(finished_run.folder / "validation.jsonl")[-1]
    assert first["step"] == 0
    assert first["neg_log_perplexity"] == pytest.approx(last["neg_log_perplexity"], rel=1e-6)


def test_data_and_expert_parallel_training_gives_the_same_losses(
    finished_run, run_cli, tmp_path
):
    folder = tmp_path / "sharded"
    process = run_cli(
        "train",
        *arguments(folder, finished_run.files, "TRAIN_STEPS=4"),
        "--gin_file=configs/meshes/data_expert.gin",
        devices=8,
    )
    assert process.returncode == 0, process.stderr
    for got, want in zip(
        lines(folder / "metrics.jsonl"),
        lines(finished_run.folder / "metrics.jsonl"),
        strict=False,
    ):
        assert got["loss"] == pytest.approx(want["loss"], rel=2e-4)
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=2e-3)


def test_non_finite_steps_change_nothing_and_stop_after_n(finished_run, run_cli, tmp_path):
    folder = tmp_path / "nan"
    process = run_cli(
        "train",
        *arguments(
            folder,
            finished_run.files,
            "LossConfig.z_loss=1e38",
            "TrainingJob.max_skipped_in_a_row=3",
        ),
    )
    assert process.returncode == 1
    assert "3 steps in a row had a loss or gradient that is not finite" in process.stderr
    assert len(list((folder / "skipped_batches").glob("*.npz"))) >= 3
    identity = json.loads((folder / "skipped_batches" / "1.0.json").read_text())
    assert identity["step"] == 1 and len(identity["batch"]) == 12
    model = switchx.load(folder)
    assert model.step >= 3
    assert all(np.all(np.isfinite(leaf)) for leaf in final_params(folder).values())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_model_dir_that_cannot_be_written(finished_run, run_cli, tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    process = run_cli("train", *arguments(locked / "run", finished_run.files))
    assert process.returncode == 2 and "cannot be written" in process.stderr
