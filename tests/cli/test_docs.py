# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/command_line.md run, in their order, in one folder."""

import itertools
import re
import shlex

import pytest

from switchx.cli import train
from switchx.cli.arguments import gin_of
from switchx.cli.main import _parse, _parser
from switchx.gin_config import building
from tests.commands import parsers
from tests.compilation import T5, TINY_RUN
from tests.gin_files import describe_run
from tests.processes import ROOT

PAGE = (ROOT / "docs/command_line.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = [line for block in BLOCK.findall(PAGE) for line in block.splitlines()]


def words_of(command: str) -> list[str]:
    """What stands behind `switchx`."""
    words = shlex.split(command)
    return words[words.index("switchx") + 1 :]


@pytest.fixture
def my_text(in_a_folder):
    """Files of one's own, as the page has them."""
    folder = in_a_folder / "my_text"
    folder.mkdir()
    for path in ROOT.glob("*.md"):
        (folder / f"{path.stem}.txt").write_text(path.read_text(encoding="utf-8"))


def job_of(words):
    return building.parse_job(*gin_of(_parse(_parser(), words)))


def test_training_commands_are_understood(my_text, in_a_folder):
    describe_run(in_a_folder / "runs/tiny")
    training = [words for words in map(words_of, COMMANDS) if words[0] == "train"]
    assert training
    for words in training:
        job_of(words)


@pytest.mark.slow
def test_commands_run(my_text, one_device, cli):
    assert COMMANDS
    steps = 0
    for command in COMMANDS:
        name, *options = words_of(command)
        if name == "train":
            steps += 1
            options = [each.replace("WARMUP_STEPS=40", "WARMUP_STEPS=1") for each in options]
            options += [*T5, f"--gin.TRAIN_STEPS={steps}"]
        assert cli(name, *options).out


def switchx_lines() -> list[tuple[str, str]]:
    """Every line of a ```bash block of all pages that begins with switchx."""
    found = []
    for page in sorted((ROOT / "docs").glob("*.md")):
        for block in BLOCK.findall(page.read_text(encoding="utf-8")):
            lines = block.replace("\\\n", " ").splitlines()
            found += [(page.name, line) for line in lines if "switchx " in line]
    return found


def test_commands_of_all_pages_are_understood():
    """Options and gin files exist; the pages' own tests run what can be run."""
    num_commands = 0
    for page, line in switchx_lines():
        words = shlex.split(line, comments=True)
        if "switchx" not in words or "$hosts" in words:
            continue
        words = words[words.index("switchx") + 1 :]
        words = list(itertools.takewhile(lambda word: word not in ("|", ">", "&"), words))
        assert _parse(_parser(), words).run, page
        for file in re.findall(r"configs/[\w/]+\.gin", line):
            assert (ROOT / file).exists(), f"{file} in {page}"
        num_commands += 1
    assert num_commands > 50


def subcommands() -> dict[str, list[str]]:
    """Each command, and what its first word may be where that is one of a few."""
    (actions,) = [each for each in _parser()._actions if isinstance(each.choices, dict)]
    found = {}
    for name, parser in actions.choices.items():
        words = [each for each in parser._actions if each.choices and not each.option_strings]
        found[name] = list(words[0].choices) if words else []
    return found


def test_all_commands_are_on_the_pages():
    synopsis = PAGE.partition("    switchx ")[2].partition("\n\n")[0]
    assert sorted(re.findall("[a-z]+", synopsis)) == sorted(subcommands())
    table = (ROOT / "docs/capabilities.md").read_text(encoding="utf-8")
    for name, words in subcommands().items():
        for command in [f"switchx {name} {word}" for word in words] or [f"switchx {name} "]:
            assert command in table, command
    assert subcommands()["check"][-1] == "accelerator"
    page = (ROOT / "docs/several_hosts.md").read_text(encoding="utf-8")
    said = re.findall("`(switchx [a-z ]+)`", page.partition(" run on many machines")[0])
    have = [name for name, each in parsers(_parser()) if "--coordinator" in each.format_help()]
    assert sorted(said) == sorted(have)


def test_names_for_users_of_t5x_are_there(in_a_folder):
    describe_run(in_a_folder / "x")
    rows = PAGE.partition("| T5X | here |")[2].partition("\n\n")[0].splitlines()[2:]
    assert 0 < len(rows) <= 10
    job = job_of(["train", *TINY_RUN[1:], "--model_dir=x"])
    words = "train --gin_file=runs/finetune_task.gin --gin.INIT_FROM=x --gin.CACHE_TOKENS=True"
    words += " --gin.INPUTS_LENGTH=9 --gin.INIT_RULES=() --model_dir=x"
    assert job_of(words.split()).source.cache_tokens
    parts = {"Task": job.source, "ModelConfig": job.model, "SwitchConfig": job.model.switch}
    here = " ".join(row.split("|")[2] for row in rows)
    for name, field in re.findall(r"`(\w+)\.([a-z_]+)`", here):
        assert hasattr(parts[name], field)


def test_macros_are_those_of_the_runs(in_a_folder):
    table = PAGE.partition("Macros that every file")[2].partition("**From T5X")[0]
    cells = re.findall(r"^\| (`[A-Z_`, ]+`) \|", table, re.MULTILINE)
    macros = {macro for cell in cells for macro in re.findall(r"[A-Z_]{2,}", cell)}
    words = ["train", "--gin_file=runs/pretrain_tiny.gin", "--model_dir=x"]
    values = {"DATA_DIR": "a", "INIT_FROM": "b", "BEST_METRIC": "c/d", "EVAL_TIME_SHARE": 0.7}
    values |= {"LOCAL_DIR": "/e", "VOCABULARY_FILE": "v.model"}
    values["NUM_MICROBATCHES"] = 1
    values["TEXT_EVALUATION"] = "@text_evaluation.TextEvaluation()"
    named = sorted(macros | {"TEXT_EVALUATION"})
    words += [f"--gin.{macro}={values.get(macro, 7)}" for macro in named]
    job = job_of(words)
    assert len(macros) == 19
    listed = re.findall(r"^  ([A-Z_]+)  ", train.DESCRIPTION, re.MULTILINE)
    assert macros <= {*listed}
    assert (job.train_steps, job.batch_size, job.seed, job.log_every) == (7, 7, 7, 7)
    assert (job.eval_every, job.checkpoint_every) == (7, 7)
    assert (job.data_dir, job.init_from) == ("a", "b")
    assert (job.inputs_length, job.targets_length, job.step.num_microbatches) == (7, 7, 1)
    assert (job.schedule.base, job.schedule.warmup_steps) == (7, 7)
    retention = job.retention
    assert (retention.local_dir, retention.local_every, retention.grace_s) == ("/e", 7, 7)
    assert (job.retention.best_metric, job.text_evaluation.time_share) == ("c/d", 0.7)
