# SPDX-License-Identifier: Apache-2.0
"""What the command line takes, what is said of it, and how it is written down again."""

import argparse
import dataclasses
import os
import shlex
import sys
from typing import Literal

import pytest

from switchx.cli.arguments import (
    CommandParser,
    UsageError,
    accept_gin_bindings,
    add_command,
    add_flags,
    add_gin_arguments,
    add_model_dir,
    add_options,
    command_line,
    configuration_words,
    gin_of,
    options_of,
    simulate_devices,
)
from switchx.cli.devices import MESH_AXES, add_mesh, mesh_spec
from switchx.fields import FieldError, check_choices, check_options, option
from switchx.gin_config import building
from switchx.gin_config.files import close_match, did_you_mean
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
        (["bake", *GIVEN, "a.gin"], "unexpected 'a.gin'; options are written --NAME=VALUE"),
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
        gin_file=[str(SMALL)],
        gin_bindings=[f"FILES={tmp_path}", "TRAIN_STEPS=7"],
        gin_search_paths="",
    )
    job = building.parse_job(*gin_of(arguments))
    assert isinstance(job, TrainingJob)
    assert (job.train_steps, job.source.corpus.path) == (7, str(tmp_path))


@dataclasses.dataclass(frozen=True)
class Oven:
    """Of bread."""

    minutes: int = option(40, "of baking, at 100%", 1, 90)
    crust: Literal["thin", "thick"] = option("thin", "of a loaf")
    steam: float | None = option(None, "share of the air", 0, 1)
    owner: str = "the baker"

    def __post_init__(self):
        check_choices(self)
        check_options(self)


def test_flags_are_the_options_of_a_configuration(capsys):
    parser = CommandParser("switchx")
    add_options(parser, Oven, minutes=50)
    given = parser.parse_args(["--crust=thick"])
    assert options_of(given, Oven) == {"minutes": 50, "crust": "thick"}
    given = parser.parse_args(["--minutes", "91", "--steam=0.5"])
    assert (given.minutes, given.steam) == (91, 0.5)
    with pytest.raises(FieldError, match="Oven.minutes=91; use 1 to 90") as error:
        Oven(**options_of(given, Oven))
    assert error.value.field == "minutes"
    with pytest.raises(UsageError, match="'thic'.*did you mean thick"):
        parser.parse_args(["--crust=thic"])
    with pytest.raises(UsageError, match="--minutes: invalid int value: 'x'"):
        parser.parse_args(["--minutes=x"])
    parser.print_help()
    said = " ".join(capsys.readouterr().out.split())
    assert "--minutes N of baking, at 100% (default: 50)" in said
    assert "--steam N share of the air" in said and "owner" not in said
    few = CommandParser("switchx")
    add_options(few, Oven, ("steam",))
    assert options_of(few.parse_args(["--steam=1"]), Oven) == {"steam": 1.0}


def test_flags_of_a_table_have_the_types_that_their_metavars_say(capsys):
    table = {"--rows=N": "of a pan", "--crust=thin|thick": "", "--bits=4|8": (int, ""),
             "--sizes=N,N": "", "--hot": "", "--oven=NAME": "its name"}  # fmt: skip
    parser = CommandParser("switchx")
    add_flags(parser, table, required="oven", rows=2)
    given = ["--oven=", "--crust=thin", "--bits=8", "--sizes=1,2", "--hot"]
    assert vars(parser.parse_args(given)) == {
        "rows": 2, "crust": "thin", "bits": 8, "sizes": [1, 2], "hot": True, "oven": "",
    }  # fmt: skip
    for wrong in ("--rows=0", "--crust=flat", "--bits=6", "--sizes=1,0", "--hot"):
        with pytest.raises(UsageError):
            parser.parse_args(["--oven=a"] * (wrong != "--hot") + [wrong])
    parser.print_help()
    assert "--rows N              of a pan (default: 2)\n" in capsys.readouterr().out


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.1, 10**400])
def test_numbers_out_of_bounds_are_refused(value):
    with pytest.raises(FieldError, match=r"Oven.steam=.{1,40}; use 0 to 1"):
        Oven(steam=value)


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


def an_executable(path):
    path.parent.mkdir(exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def called(tmp_path, monkeypatch):
    """`called("bin/switchx")` makes this the program that runs, in `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    (tmp_path / "path").mkdir()

    def called(program):
        monkeypatch.setattr(sys, "argv", [program, "train"])

    return called


def test_switchx_on_the_path_goes_by_its_name(called, tmp_path):
    an_executable(tmp_path / "path/switchx")
    called("path/switchx")
    assert command_line("eval", "--model_dir=a b") == "switchx eval '--model_dir=a b'"


def test_switchx_beside_the_path_goes_by_how_it_was_called(called, tmp_path):
    """`make train` runs .venv/bin/switchx in a shell that has not activated it."""
    an_executable(tmp_path / ".venv/switchx")
    called(".venv/switchx")
    assert command_line("eval") == ".venv/switchx eval"
    an_executable(tmp_path / "path/switchx")  # another program
    assert command_line("eval") == ".venv/switchx eval"


def test_module_goes_by_its_python(called, tmp_path, monkeypatch):
    called("checkout/switchx/__main__.py")
    python = an_executable(tmp_path / "path/python")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "path/python3"))
    assert command_line("eval") == "python -m switchx eval"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "other venv/python3"))
    os.makedirs(tmp_path / "other venv")
    (tmp_path / "other venv/python3").symlink_to(python)
    assert command_line("eval") == f"'{tmp_path}/other venv/python3' -m switchx eval"


def test_configuration_is_repeated_so_that_a_shell_gives_it_back():
    given = argparse.Namespace(
        gin_file=["a b.gin", "c.gin"],
        gin_search_paths="x,y",
        gin_bindings=["TRAIN_STEPS=3", "FILES=['it is', \"$HOME\"]", "A.TRAIN_STEPS=4"],
    )
    options = configuration_words(given, "TRAIN_STEPS")
    assert options == [
        "--gin_file=a b.gin",
        "--gin_file=c.gin",
        "--gin_search_paths=x,y",
        "--gin.FILES=['it is', \"$HOME\"]",
        "--gin.A.TRAIN_STEPS=4",
    ]
    assert shlex.split(command_line("train", *options))[-5:] == options
    assert "--gin.TRAIN_STEPS=3" in configuration_words(given)
    given = argparse.Namespace(gin_file=None, gin_search_paths="", gin_bindings=[])
    assert configuration_words(given) == []


NAMES = ("TRAIN_STEPS", "WARMUP_STEPS", "SEED")


def test_nearest_name_is_found_and_none_made_up():
    assert close_match("TRAIN_STEP", NAMES) == "TRAIN_STEPS"
    assert did_you_mean("TRAIN_STEP", NAMES) == " (did you mean TRAIN_STEPS?)"
    assert close_match("LEARNING", NAMES) is None
    assert did_you_mean("LEARNING", NAMES) == ""
    assert did_you_mean("STEPS", NAMES, cutoff=0.85) == ""


def test_devices_are_simulated_beside_what_is_there(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x")
    monkeypatch.delenv("NPROC")
    simulate_devices(8)
    assert os.environ["XLA_FLAGS"] == "--xla_dump_to=x --xla_force_host_platform_device_count=8"
    assert os.environ["NPROC"] == "32"
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    monkeypatch.setenv("NPROC", "5")
    simulate_devices(8)
    assert os.environ["XLA_FLAGS"] == "--xla_force_host_platform_device_count=2"
    assert os.environ["NPROC"] == "5"
