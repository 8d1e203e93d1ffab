# SPDX-License-Identifier: Apache-2.0
"""Whose code runs: what the working directory can and cannot bring into a command."""

import importlib
import json
import os
import subprocess
import sys

import pytest

from switchx import own_code
from switchx.cli.main import main
from switchx.models.config import model_from_description
from tests.data.refusals import refused
from tests.processes import ROOT, child_environment

# What an attacker would name as a module that a command imports.
NAMES = ("jax", "numpy", "gin", "yaml", "torch", "orbax", "json", "sentencepiece", "my_code")
TRAP = "open('ran', 'a').write(__name__)\n"
CONSOLE = "import sys; from switchx.cli.main import main; sys.exit(main())"


@pytest.fixture
def trapped(in_a_folder, monkeypatch):
    """A working directory whose modules leave a trace; the module path as a console has it."""
    for name in NAMES:
        (in_a_folder / f"{name}.py").write_text(TRAP)
    here = ("", str(in_a_folder))
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in here])
    monkeypatch.setattr(own_code, "_for_gin_files", set())
    monkeypatch.setitem(sys.modules, "my_code", None)
    del sys.modules["my_code"]
    return in_a_folder


@pytest.mark.parametrize("words", [["-m", "switchx"], ["-P", "-c", CONSOLE]])
def test_no_module_of_the_working_directory_runs(trapped, tmp_path, words):
    """Neither by `python -m` nor by the console script."""
    (trapped / "elsewhere").mkdir()
    done = subprocess.run(
        [sys.executable, *words, "checkpoint", "inspect", "elsewhere"],
        env=child_environment(tmp_path / "cache", 1), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2 and "elsewhere" in done.stderr, done.stderr
    assert not (trapped / "ran").exists()


def described(name: str) -> dict:
    return {"type": f"{name}.WindowConfig", "vocab_size": 8}


def test_a_class_that_a_folder_names_needs_trust(trapped):
    with refused("run/config.json names my_code.WindowConfig<any>--trust_code"):
        model_from_description(described("my_code"), "run/config.json")
    # A gin file that is named has the directory; what a folder names still has not.
    own_code.import_from_working_directory()
    assert sys.path[-1] == os.getcwd() and "" not in sys.path
    with refused("run/config.json names my_code.WindowConfig<any>--trust_code"):
        model_from_description(described("my_code"), "run/config.json")
    assert not (trapped / "ran").exists()
    own_code.import_from_working_directory(folders_too=True)
    with refused("run/config.json names my_code.WindowConfig<any>no attribute"):
        model_from_description(described("my_code"), "run/config.json")
    assert (trapped / "ran").read_text() == "my_code"
    importlib.invalidate_caches()


def test_modules_that_only_gin_files_find_are_known(trapped):
    own_code.import_from_working_directory()
    assert not own_code.is_of_working_directory()
    (trapped / "my_code.py").unlink()
    (trapped / "my_code").mkdir()  # without __init__.py
    (trapped / "my_code" / "tasks.py").write_text("")
    importlib.import_module("my_code.tasks")
    assert own_code.is_of_working_directory()
    del sys.modules["my_code.tasks"], sys.modules["my_code"]
    assert not own_code.is_of_working_directory()
    (trapped / "my_code" / "__init__.py").write_text("")
    importlib.import_module("my_code")
    assert own_code.is_of_working_directory()
    own_code.import_from_working_directory(folders_too=True)
    assert not own_code.is_of_working_directory()


def test_commands_that_read_folders_have_the_flag(trapped, capsys):
    """And ask for it by name."""
    (trapped / "run").mkdir()
    (trapped / "run/config.json").write_text(json.dumps({"model": described("my_code")}))
    (trapped / "a.txt").write_text("a\n")
    words = ["generate", "--model_dir=run", "--input=a.txt"]
    assert main(words) != 0
    assert "--trust_code" in (said := capsys.readouterr().err), said
    assert not (trapped / "ran").exists()
    assert main([*words, "--trust_code"]) != 0
    assert (trapped / "ran").read_text() == "my_code"


def test_processes_of_commands_do_not_import_from_it_either(trapped, monkeypatch):
    assert own_code.python_words() == [sys.executable, "-P"]
    monkeypatch.chdir(ROOT)  # a checkout that is not installed is found there
    assert own_code.python_words() == [sys.executable]
