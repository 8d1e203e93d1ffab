# SPDX-License-Identifier: Apache-2.0
"""The summary of training and the load of each expert, as a person sees them."""

import argparse
import dataclasses
import json
import shlex

import pytest
from rich.console import Console

from switchx.checkpoint.run_folder import RunFolder
from switchx.cli import summary
from switchx.cli.arguments import gin_of
from switchx.data.tokenizers import ByteVocabulary
from switchx.data.vocabularies import save_vocabulary
from switchx.fields import describe
from switchx.gin_config import building
from switchx.models.config import ModelConfig, SwitchConfig
from switchx.training.loop import Outcome
from tests.integration.runs import SMALL

FINISHED = Outcome(12, True, {})
TINY = "configs/runs/pretrain_tiny.gin"


@pytest.fixture(autouse=True)
def clean_gin(monkeypatch):
    monkeypatch.setattr("sys.argv", ["switchx"])
    monkeypatch.setattr("switchx.cli.arguments.shutil.which", lambda name: None)


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    run = RunFolder(tmp_path / "a run").create()
    validation = [{"step": 0, "neg_log_perplexity": -6.0, "accuracy": 0.0}]
    validation += [{"step": 12, "neg_log_perplexity": -2.5, "accuracy": 0.125}]
    metrics = [
        {"tokens_per_s": rate, "skipped_steps": skipped, "dropped_fraction": 0.0625}
        for rate, skipped in ((10.0, 0), (3000.0, 1), (2000.0, 2), (4000.0, 0))
    ]
    metrics[-1]["routing"] = {"load": [[0.125] * 8, [1.0] + [0.0] * 7]}
    for path, rows in ((run.validation, validation), (run.metrics, metrics)):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run.checkpoints / "12").mkdir(parents=True)
    save_vocabulary(ByteVocabulary(), run.root)
    return run


def given(*files: str, bindings=(), search_paths="", mesh=None) -> argparse.Namespace:
    return argparse.Namespace(
        gin_file=list(files),
        gin_bindings=list(bindings),
        gin_search_paths=search_paths,
        mesh=mesh,
        hardware=None,
    )


def job_of(arguments):
    return building.parse_job(*gin_of(arguments))


def printed(capsys, folder, arguments, outcome=FINISHED) -> list[str]:
    summary.print_summary(job_of(arguments), folder, outcome, arguments)
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_numbers_are_those_of_the_run_folder(capsys, folder):
    lines = printed(capsys, folder, given(str(SMALL), bindings=[f"FILES={folder.root}"]))
    assert lines[:7] == [
        "",
        "Training finished; the state is saved at step 12",
        "validation negative log perplexity  -6.0000 (step 0) -> -2.5000 (step 12)",
        "validation accuracy                 12.5%",
        "tokens per second (median)          3,000",
        "dropped choices                     6.25%",
        "skipped steps                       3",
    ]
    assert lines[7:11] == [
        "load per expert (1.00 is an even share)",
        "layer         0     1     2     3     4     5     6     7",
        "encoder 0  1.00  1.00  1.00  1.00  1.00  1.00  1.00  1.00",
        "decoder 0  8.00  0.00  0.00  0.00  0.00  0.00  0.00  0.00",
    ]
    assert f"checkpoint     {folder.root}/checkpoints/12" in lines
    assert f"metrics        {folder.root}/metrics.jsonl, validation.jsonl" in lines


def test_goodput_says_what_took_the_time_and_who_was_slow(capsys, folder):
    seconds = {"step": 80.0, "start": 0.0, "compile": 15.0, "data": 0.0, "checkpoint": 5.0}
    goodput = {"share": 0.8, "seconds": seconds, "restarts": 2, "lost_steps": 7}
    folder.goodput.write_text(json.dumps(goodput))
    even = {"median_s": 0.5, "max_s": 0.75, "max_process": 0, "slow_steps": 0, "late_s": 0.1}
    even |= {"late_process": 0, "late_median_s": 0.1}
    odd = {"max_s": 2.0, "max_process": 3, "slow_steps": 4, "late_s": 6.0, "late_process": 5}
    rows = [{"tokens_per_s": 1.0, "skipped_steps": 0, "step_time": each}
            for each in ({}, even, even | odd, even)]  # fmt: skip
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = printed(capsys, folder, given(str(SMALL), bindings=[f"FILES={folder.root}"]))
    assert lines[5:9] == [
        "goodput                    80.0% of 100 s in steps, compile 15.0%, checkpoint 5.0%",
        "restarts                   2, 7 steps taken again",
        "seconds per step (median)  0.500; longest 2.000 (process 3); slow steps 4",
        "latest process             5, whose devices waited 6.0 s for it (the median process' "
        "0.1 s) before a line of metrics",
    ]


def test_evaluation_that_was_not_finite_and_a_run_that_logged_nothing(capsys, folder):
    row = {"step": 12, "neg_log_perplexity": None, "accuracy": 0.0}
    with folder.validation.open("a") as file:
        file.write(json.dumps(row) + "\n")
    lines = printed(capsys, folder, given(str(SMALL), bindings=[f"FILES={folder.root}"]))
    assert lines[2].endswith("-6.0000 (step 0) -> not finite (step 12)")
    folder.metrics.unlink()
    folder.validation.unlink()
    lines = printed(capsys, folder, given(str(SMALL), bindings=[f"FILES={folder.root}"]))
    assert lines[2] == f"run folder     {folder.root}"


def test_commands_repeat_what_was_given_quoted(folder, tmp_path):
    bindings = [f"FILES=['{tmp_path}/it is']", "TRAIN_STEPS=12", "RouterConfig.jitter=0.0"]
    arguments = given(
        str(SMALL), "meshes/data.gin", bindings=bindings, search_paths="/,.", mesh="auto"
    )
    job = job_of(arguments)
    eval_, train, finetune, report = summary.next_commands(job, folder, FINISHED, arguments)
    words = shlex.split(eval_)
    assert words[words.index("eval") :] == ["eval", f"--model_dir={folder.path}"]
    same = [
        f"--gin_file={SMALL}",
        "--gin_file=meshes/data.gin",
        "--gin_search_paths=/,.",
        f"--gin.FILES=['{tmp_path}/it is']",
    ]
    words = shlex.split(train)
    assert words[words.index("train") :] == [
        "train", *same, "--gin.RouterConfig.jitter=0.0", "--gin.TRAIN_STEPS=24",
        "--mesh=auto", f"--model_dir={folder.path}",
    ]  # fmt: skip
    words = shlex.split(finetune)
    assert words[words.index("train") :] == [
        "train", *same, "--gin.TRAIN_STEPS=12", "--gin.RouterConfig.jitter=0.0",
        f"--gin.INIT_FROM={folder.path}", f"--model_dir={folder.path}_finetuned",
        "--mesh=auto",
    ]  # fmt: skip
    words = shlex.split(report)
    assert words[words.index("report") :] == ["report", f"--model_dir={folder.path}"]
    arguments.coordinator, arguments.num_processes, arguments.process_id = "a:1", 2, 0
    _, train, *_ = summary.next_commands(job, folder, FINISHED, arguments)
    processes = ["--mesh=auto", "--coordinator=a:1", "--num_processes=2", "--process_id=0"]
    assert shlex.split(train)[-5:] == [*processes, f"--model_dir={folder.path}"]


def test_a_student_is_fine_tuned_from_itself(folder):
    """Its teacher teaches on."""
    arguments = given("runs/distill.gin", bindings=["TEACHER=runs/tiny"])
    job = job_of(arguments)
    assert job.distillation.starts_from_teacher
    folder.config.write_text(json.dumps({"model": describe(job.model)}))
    words = shlex.split(summary.next_commands(job, folder, FINISHED, arguments)[2])
    assert "--gin.Distillation.starts_from_teacher=False" in words
    assert f"--gin.INIT_FROM={folder.path}" in words


@pytest.mark.parametrize("bindings", [[], ["NUM_EXPERTS=16"]])
def test_model_of_any_size_goes_on_to_the_shipped_fine_tuning(folder, bindings):
    arguments = given(TINY, bindings=bindings)
    folder.config.write_text(json.dumps({"model": describe(job_of(arguments).model)}))
    command = summary.next_commands(job_of(arguments), folder, FINISHED, arguments)[2]
    words = shlex.split(command)
    assert words[words.index("train") + 1] == "--gin_file=configs/runs/finetune.gin"


def test_stopped_run_goes_on_with_the_same_command(capsys, folder):
    bindings = [f"FILES={folder.root}", "TRAIN_STEPS=100"]
    arguments = given(str(SMALL), bindings=bindings)
    lines = printed(capsys, folder, arguments, Outcome(12, False, {}))
    assert lines[1] == "Training stopped by a signal; the state is saved at step 12"
    assert f"--gin.TRAIN_STEPS=100 '--model_dir={folder.path}'" in lines[-3]
    arguments = given(str(SMALL), bindings=[f"FILES={folder.root}"])
    lines = printed(capsys, folder, arguments, Outcome(0, False, {}))
    assert lines[1] == "Training stopped by a signal; there is nothing to save at step 0"
    assert "checkpoint     none" in lines
    assert lines[-2] == "Next" and " train " in lines[-1]
    # The grace of the signal was too short for a save.
    lines = printed(capsys, folder, arguments, Outcome(15, False, {}, saved=12))
    assert "step 15 is not saved, the newest checkpoint is of step 12" in lines[1]
    assert any(line.startswith("checkpoint") and line.endswith("/12") for line in lines)
    lines = printed(capsys, folder, arguments, Outcome(15, False, {}, saved=0))
    assert lines[1].endswith("step 15 is not saved") and "checkpoint     none" in lines


MODEL = ModelConfig(
    "encoder_decoder", 64, 8, 16, 2, 4, num_decoder_layers=2, num_encoder_layers=4,
    switch=SwitchConfig(num_experts=4, every=2),
)  # fmt: skip


def shown(model, load) -> list[list[str]]:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(summary.load_table(model, load))
    return [line.split() for line in capture.get().splitlines()]


def test_rows_are_named_by_stack_and_block():
    assert MODEL.sparse_layer_names == ["encoder 1", "encoder 3", "decoder 1"]
    every_block = dataclasses.replace(MODEL, switch=SwitchConfig(4, every=1))
    assert every_block.sparse_layer_names[3:] == ["encoder 3", "decoder 0", "decoder 1"]
    encoder = dataclasses.replace(MODEL, switch=SwitchConfig(4, stacks="encoder"))
    assert encoder.sparse_layer_names == ["encoder 1", "encoder 3"]
    both = dataclasses.replace(MODEL, switch=SwitchConfig(4, sublayers="both"))
    assert both.sparse_layer_names[:2] == ["encoder 1 attention", "encoder 1 ffn"]


def test_even_share_is_one_for_any_number_of_choices():
    load = [[0.25, 0.25, 0.25, 0.25], [0.5, 0.5, 0.0, 0.0], [0.1, 0.2, 0.3, 0.4]]
    assert shown(MODEL, load) == [
        "load per expert (1.00 is an even share)".split(),
        ["layer", "0", "1", "2", "3"],
        ["encoder", "1", "1.00", "1.00", "1.00", "1.00"],
        ["encoder", "3", "2.00", "2.00", "0.00", "0.00"],
        ["decoder", "1", "0.40", "0.80", "1.20", "1.60"],
    ]
    load = [[0.5, 0.5, 0.5, 0.5], [1.0, 0.5, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]]
    rows = shown(MODEL, load)[2:]
    assert [row[2:] for row in rows] == [
        ["1.00", "1.00", "1.00", "1.00"],
        ["2.00", "1.00", "1.00", "0.00"],
        ["0.00", "0.00", "0.00", "0.00"],
    ]


def test_many_experts_are_shown_by_their_extremes():
    model = dataclasses.replace(MODEL, switch=SwitchConfig(num_experts=32, every=2))
    shares = [0.5] + [0.5 / 30] * 30 + [0.0]
    rows = shown(model, [shares] * 3)
    assert rows[1] == ["layer", "least", "median", "most"]
    assert rows[2] == ["encoder", "1", "0.00", "0.53", "16.00"]
