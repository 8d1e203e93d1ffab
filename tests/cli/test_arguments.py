# SPDX-License-Identifier: Apache-2.0
"""What is said of options: unknown ones, missing values, values that are empty."""

import argparse

import pytest

from switchx.cli.arguments import (
    MESH_AXES,
    CommandParser,
    UsageError,
    accept_gin_bindings,
    add_command,
    add_gin_arguments,
    add_mesh,
    add_model_dir,
    mesh_spec,
    parse_job,
)
from switchx.partitioning.mesh import AXES, MeshSpec
from switchx.training.job import TrainingJob
from tests.integration.runs import SMALL


@pytest.fixture
def parse():
    """`parse("bake --gin_file=a ...")` with a command that takes gin files and one without."""
    parser = CommandParser("switchx")
    commands = parser.add_subparsers(metavar="COMMAND")
    bake = add_command(commands, "bake", print, "bake bread", "Bakes.\n\n  switchx bake\n")
    add_gin_arguments(bake)
    add_model_dir(bake, "where to")
    add_command(commands, "rest", print, "do nothing", "Rests.").add_argument("what", nargs="?")

    def parse(*words: str) -> argparse.Namespace:
        arguments, rest = parser.parse_known_args(words)
        accept_gin_bindings(arguments, rest)
        return arguments

    return parse


def test_gin_files_and_bindings_keep_their_order(parse):
    arguments = parse(
        "bake", "--gin.A=1", "--gin_file=a.gin", "--model_dir", "here",
        "--gin.B.c=two words", "--gin_file", "b.gin", "--gin.A=x=y",
    )  # fmt: skip
    assert arguments.gin_file == ["a.gin", "b.gin"]
    assert arguments.gin_bindings == ["A=1", "B.c=two words", "A=x=y"]
    assert (arguments.command, arguments.model_dir, arguments.traceback) == (
        "bake", "here", False,
    )  # fmt: skip


GIVEN = ("--gin_file=a.gin", "--model_dir=d")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bake"], "give: --gin_file, --model_dir"),
        (
            ["bake", *GIVEN, "--model-dir=x"],
            "unknown option --model-dir (did you mean --model_dir?)",
        ),
        (
            ["bake", "--gin_fil=a", *GIVEN],
            "unknown option --gin_fil (did you mean --gin_file?)",
        ),
        (["bake", *GIVEN, "--x"], "unknown option --x"),
        (
            ["bake", *GIVEN, "a.gin"],
            "unexpected 'a.gin'; options are written --NAME=VALUE",
        ),
        (
            ["bake", *GIVEN, "--gin.TRAIN_STEPS", "100"],
            "--gin.TRAIN_STEPS has no value; write --gin.TRAIN_STEPS=100",
        ),
        (
            ["bake", *GIVEN, "--gin.TRAIN_STEPS", "--traceback"],
            "--gin.TRAIN_STEPS has no value; write --gin.TRAIN_STEPS=VALUE",
        ),
        (
            ["bake", "--gin_file=a.gin", "--model_dir="],
            "argument --model_dir: it is empty; is a shell variable not set?",
        ),
        (
            ["bake", *GIVEN, "--traceback=yes"],
            "argument --traceback: ignored explicit argument 'yes'",
        ),
        (["rest", "--gin.A=1"], "unknown option --gin.A"),
        (["bakke"], "there is no 'bakke' (did you mean bake?); use bake, rest"),
    ],
)
def test_usage_errors_say_what_was_meant(parse, words, message):
    with pytest.raises(UsageError) as error:
        parse(*words)
    program = f"switchx {words[0]}" if words[0] in ("bake", "rest") else "switchx"
    assert str(error.value) == f"{message} (`{program} --help` explains)"
    assert error.value.prog == program


def test_help_shows_the_text_as_it_is_written(parse, capsys):
    with pytest.raises(SystemExit) as leaving:
        parse("bake", "--help")
    assert leaving.value.code == 0
    out = capsys.readouterr().out
    assert "Bakes.\n\n  switchx bake\n" in out
    assert "--gin.NAME=VALUE sets a macro or a parameter" in out


def test_job_is_that_of_the_files_and_bindings(tmp_path):
    arguments = argparse.Namespace(
        gin_file=None, gin_bindings=[f"FILES={tmp_path}", "TRAIN_STEPS=7"], gin_search_paths=""
    )
    job = parse_job(arguments, default_file=str(SMALL))
    assert isinstance(job, TrainingJob)
    assert (job.train_steps, job.source.corpus.path) == (7, str(tmp_path))


def test_job_has_no_binding_in_vain(tmp_path):
    arguments = argparse.Namespace(
        gin_file=[str(SMALL), "optimizers/adamw.gin"],
        gin_bindings=[f"FILES={tmp_path}", "WARMUP_STEPS=1", "Adafactor.decay_rate=0.9"],
        gin_search_paths="",
    )
    with pytest.raises(ValueError, match="--gin.Adafactor.decay_rate has no effect"):
        parse_job(arguments)


def test_a_mesh_is_its_axes():
    parser = CommandParser("switchx")
    add_mesh(parser, "one device")
    assert tuple(axis for axis in AXES if axis != "pipe") == MESH_AXES
    for words, spec in (
        ([], None),
        (["--mesh=expert=4,model=2"], MeshSpec(expert=4, model=2)),
        (["--mesh", "data=1"], MeshSpec(data=1)),
    ):
        assert mesh_spec(parser.parse_args(words)) == spec
    for text in ("", "expert", "experts=4", "expert=-1", "expert=2,expert=2", "model=2,"):
        with pytest.raises(UsageError, match="is no axis of a mesh; write AXIS=N"):
            parser.parse_args([f"--mesh={text}"])
