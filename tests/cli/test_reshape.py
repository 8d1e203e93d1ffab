# SPDX-License-Identifier: Apache-2.0
"""`switchx reshape`: docs/shrinking.md's commands, what they leave and print, refusals."""

import json
import re
import shlex
import shutil

import numpy as np
import pytest

import switchx
from switchx.checkpoint.run_folder import RunFolder
from switchx.cli.main import main
from switchx.gin_config.building import job_from_gin
from switchx.inference.generate import without_capacity
from switchx.models.config import ModelConfig, SwitchConfig
from switchx.models.params import forward
from switchx.training.initialize import Source
from switchx.training.program import TrainingProgram
from switchx.tree import named_leaves, num_elements
from tests.compilation import T5
from tests.data.refusals import refused
from tests.processes import ROOT
from tests.training.jobs import DENSE, make_batch
from tests.training.saved_runs import arrays_of, save_run

PAGE = (ROOT / "docs/shrinking.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [
    shlex.split(line)
    for block in BLOCKS
    for line in block.replace("\\\n", "").splitlines()
    if not line.startswith("#")
]
# Those of `tiny_run` that a dense model has too.
SIZES = [each for each in T5 if "SwitchConfig" not in each]
MODEL = ModelConfig("encoder_decoder", 384, 8, 8, 2, 4, 1, 1, switch=SwitchConfig(6, every=1))


def run_commands(commands, cli) -> dict[str, list[dict]]:
    """In their order: later ones read what earlier ones wrote. Rows of reshapes by output."""
    reports = {}
    for program, command, *words in commands:
        assert program == "switchx"
        files = " ".join(word for word in words if word.startswith("--gin_file"))
        if "pretrain_tiny" in files or "distill" in files:
            words += SIZES
            words += ["--gin.SwitchConfig.every=1"] * ("switch_tiny" in files)
        elif command == "train":  # of the size that is in model.gin
            words += SIZES[:2]
        if command == "reshape":
            words += ["--json"] + ["--every=1"] * (
                "--experts=4" in words and "dense" in words[0]
            )
        said = cli(command, *words).out
        if command == "reshape":
            output = next(word for word in words if word.startswith("--output="))
            reports[output.partition("=")[2]] = json.loads(said.splitlines()[-1])["results"]
    return reports


@pytest.mark.slow
def test_all_commands_of_the_page_run(in_a_folder, tiny_run, one_device, cli):
    shutil.copytree(tiny_run, in_a_folder / "runs/tiny")
    assert len(run_commands(COMMANDS, cli)) == 7


@pytest.mark.slow  # commands one after another
def test_reshaping_of_the_page_keeps_what_it_says(in_a_folder, tiny_run, one_device, cli):
    shutil.copytree(tiny_run, in_a_folder / "runs/tiny")
    reports = run_commands(COMMANDS[: "".join(BLOCKS[:2]).count("\n")], cli)
    experts = {name: [row["experts"] for row in rows] for name, rows in reports.items()}
    assert experts == {
        **{"runs/fewer": [8, 4], "runs/dense": [8, 0], "runs/sparse": [0, 4]},
        **{"runs/more": [8, 16], "runs/wide": [8, 16], "runs/exclusive": [4, 8]},
        "runs/groups": [0, 4],
    }
    for name, (before, after) in reports.items():
        model = switchx.load(name)
        assert after["parameters"] == num_elements(model.params)
        assert (after["bytes"] < before["bytes"]) == (name in ("runs/fewer", "runs/dense"))
        assert before["loss_nats"] > 0 and after["loss_nats"] > 0
    same = {"sparse": "dense", "groups": "dense", "exclusive": "sparse"}
    for after, before in (same | {"more": "tiny", "wide": "tiny"}).items():
        difference = logits_of(f"runs/{after}") - logits_of(f"runs/{before}")
        assert np.abs(difference).max() < 1e-5, after
    assert switchx.load("runs/exclusive").config.switch.router.num_copies == 2
    # Training goes on from `runs/more` with copies of the moments of `runs/tiny`.
    old = arrays_of(RunFolder("runs/tiny"), 2)
    job = job_from_gin("runs/more_tuned/operative_config.gin")
    state = Source(job, TrainingProgram(job)).state()
    moments = named_leaves({"opt_state": state.opt_state})
    names = [n for n in moments if "layer_0/ffn/" in n and "log_count" not in n]
    assert sum(np.any(moments[name]) for name in names) >= 3
    for name in names:
        was, at = old[f"train_state/{name}"], name.rpartition("_")[2].find("E")
        expected = was if at < 0 else np.concatenate([was, was], at)
        np.testing.assert_array_equal(moments[name], expected, err_msg=name)


def logits_of(name: str) -> np.ndarray:
    """Logits of a fixed batch, nothing dropped, at its tokens."""
    model = switchx.load(name)
    batch = make_batch(model.config, 8)
    config = without_capacity(model.config)
    logits_BLV, _ = forward(config, model.params, batch, is_training=False)
    return np.asarray(logits_BLV)[batch["decoder_segment_ids"] > 0]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A sparse and a dense run whose task is in no gin file."""
    base = tmp_path_factory.mktemp("runs")
    return {
        "sparse": save_run(base / "sparse", MODEL),
        "dense": save_run(base / "dense", DENSE),
    }


@pytest.mark.parametrize(
    ("kind", "words", "said"),
    [
        ("sparse", "--experts=4", "--experts=4 of a model with 6: "),
        # A novice is an expert, so any number of them divides as before: nothing else is wrong.
        ("sparse", "--experts=4 --reduce=drop --novice", "it has no operative_config.gin"),
        ("sparse", "--experts=13", "--experts=13 of a model with 6<any>all get as many copies"),
        ("sparse", "--experts=12 --upcycle=exclusive", "num_selected=1: use 'counts_merged'"),
        ("sparse", "--experts=12 --upcycle=drop", "upcycle='drop'"),
        ("sparse", "--experts=12 --novice", "--novice=True of 6 experts, which become more"),
        ("sparse", "--experts=2 --upcycle=copies", "--upcycle=copies where none are added"),
        (
            "sparse",
            "--experts=2 --novice",
            "--novice=True without --reduce=drop of some experts",
        ),
        ("dense", "--experts=4 --share=0.5", "--share=0.5 without --upcycle=drop"),
        ("dense", "--experts=4 --upcycle=drop --share=2", "--share=2.0 is no part"),
        ("dense", "--experts=5 --upcycle=virtual_groups", "virtual_groups' with experts=5"),
        ("sparse", "--experts=6", "--experts=6 of a model with 6"),
        ("sparse", "--experts=-1", "--experts=-1 of a model with 6"),
        ("sparse", "--experts=2 --every=2", "--every=2 of a sparse model"),
        ("sparse", "--experts=2 --num_selected=1", "--num_selected=1 of a sparse model"),
        ("dense", "--experts=4 --reduce=merge", "--reduce=merge of a dense model"),
        ("dense", "--experts=0", "experts=0 of a dense model"),
        ("dense", "--experts=1", "experts=1 of a dense model"),
        ("dense", "--experts=4 --every=3", "num_decoder_layers=2 is not divisible"),
        ("dense", "--experts=2 --num_selected=3", "num_selected=3 with num_experts=2"),
        ("sparse", "--experts=2", "it has no operative_config.gin<any>or --gin_file"),
        ("sparse", "--experts=2 --score=reap", "--score=reap without --reduce=drop"),
        ("dense", "--experts=2 --score=reap", "--score=reap of a dense model"),
        ("sparse", "--experts=2 --reduce=drop --score=best", "there is no 'best'"),
        ("sparse", "--experts=two", "invalid int value: 'two'"),
    ],
)
def test_what_cannot_be_made_is_refused_in_a_line(runs, in_a_folder, cli, kind, words, said):
    given = [f"--model_dir={runs[kind]}", "--output=out", *shlex.split(words)]
    error = cli.refused("reshape", *given).splitlines()[-1]
    with refused(said):
        raise ValueError(error)
    assert list(in_a_folder.iterdir()) == []


@pytest.mark.slow  # a model with experts removed one by one
def test_experts_are_scored_and_the_scores_compared(
    in_a_folder, tiny_run, tmp_path, one_device, cli
):
    shutil.copytree(tiny_run, in_a_folder / "runs/tiny")
    words = ["--model_dir=runs/tiny", "--experts=4", "--reduce=drop"]
    output = f"--output={tmp_path / 'forced'}"
    said = cli("reshape", *words, output, "--score=brute_force").err
    found = re.findall(r"(\w+): rank correlation with brute force (-?[\d.]+) \(", said)
    assert {name for name, _ in found} == {"frequency", "ean", "reap", "mean_norm", "aimer"}
    values = [float(value) for _, value in found]
    assert values == sorted(values, reverse=True)
    assert main(["reshape", *words, f"--output={tmp_path / 'reap'}", "--score=reap"]) == 0
    assert switchx.load(tmp_path / "reap").config.switch.num_experts == 4


def test_teaching_without_a_teacher_is_refused(in_a_folder, capsys, cli):
    words = ["teach", "--gin_file=configs/runs/pretrain_tiny.gin", "--output=out"]
    assert "there is no teacher: use --gin_file=configs/runs/distill.gin" in cli.refused(*words)
    (in_a_folder / "answers").mkdir()
    (in_a_folder / "answers/teacher.json").touch()
    words = ["teach", "--gin_file=configs/runs/distill.gin", "--output=out"]
    assert main([*words, "--gin.TEACHER=answers"]) == 2
    assert "answers is what `switchx teach` wrote" in capsys.readouterr().err
