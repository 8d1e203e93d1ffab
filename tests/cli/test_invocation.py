# SPDX-License-Identifier: Apache-2.0
"""Commands to paste: they reach this installation, with the configuration that was given."""

import argparse
import os
import shlex
import sys

import pytest

from switchx.cli.arguments import command_line, configuration_options


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
    an_executable(tmp_path / "path/switchx")  # somebody else's
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
    options = configuration_options(given, without="TRAIN_STEPS")
    assert options == [
        "--gin_file=a b.gin",
        "--gin_file=c.gin",
        "--gin_search_paths=x,y",
        "--gin.FILES=['it is', \"$HOME\"]",
        "--gin.A.TRAIN_STEPS=4",
    ]
    assert shlex.split(command_line("train", *options))[-5:] == options
    assert "--gin.TRAIN_STEPS=3" in configuration_options(given)


def test_nothing_given_is_nothing_repeated():
    given = argparse.Namespace(gin_file=None, gin_search_paths="", gin_bindings=[])
    assert configuration_options(given) == []
