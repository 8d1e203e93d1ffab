# SPDX-License-Identifier: Apache-2.0
"""How the command answers: quickly where it can, with what exit status, with what on errors."""

import os
import subprocess
import sys

import pytest

from switchx.cli import main as main_module
from switchx.cli import train
from switchx.cli.main import main
from tests.processes import ROOT

COMMANDS = (
    "train", "eval", "report", "generate", "score", "quantize", "vocab", "bench", "tune",
    "check",
)  # fmt: skip
SLOW_IMPORTS = ("jax", "numpy", "flax", "gin", "rich", "tensorflow_datasets")


def python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )


@pytest.mark.parametrize("words", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_waits_for_no_library(words):
    code = (
        "import sys\nfrom switchx.cli.main import main\n"
        f"try: main({words!r})\nexcept SystemExit as leaving: print(leaving.code)\n"
        f"print([name for name in {SLOW_IMPORTS!r} if name in sys.modules])"
    )
    assert python(code).stdout.splitlines()[-2:] == ["0", "[]"]


def test_no_command_shows_the_help(capsys):
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["trian"],
            "switchx: error: there is no 'trian' (did you mean train?); use train, eval, "
            "report, generate, score, serve, quantize, export, convert, vocab, "
            "checkpoint, show, plan, compile, bench, tune, check (`switchx --help` explains)\n",
        ),
        (
            ["--verbose"],
            "switchx: error: --verbose stands before the command; write it after (`switchx "
            "--help` explains)\n",
        ),
        (
            ["train", "--gin_file=a.gin"],
            "switchx train: error: give: --model_dir (`switchx train --help` explains)\n",
        ),
        (
            ["eval", "--model_dir=d", "--steps=3"],
            "switchx eval: error: unknown option --steps (did you mean --step?) (`switchx eval "
            "--help` explains)\n",
        ),
        (
            ["bench", "train", "--gin.A=1"],
            "switchx bench: error: unknown option --gin.A (`switchx bench --help` explains)\n",
        ),
    ],
)
def test_wrong_use_is_one_paragraph_and_status_2(words, said, capsys):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", said)


@pytest.fixture
def run_of(monkeypatch):
    """`run_of(f)`: `switchx train` calls f instead of training."""

    def replace(function):
        monkeypatch.setattr(train, "run", function)
        return ["train", "--gin_file=x", "--model_dir=y"]

    return replace


def in_switchx(text: str):
    """A function as if it stood in switchx."""
    scope = {"__name__": "switchx.somewhere"}
    exec(f"def run(arguments):\n    {text}", scope)
    return scope["run"]


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("raise ValueError('use 3')", 2),
        ("raise RuntimeError('use 3')", 1),
        ("raise OSError('use 3')", 1),
    ],
)
def test_our_errors_are_one_line(run_of, capsys, text, status):
    assert main(run_of(in_switchx(text))) == status
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "switchx train: error: use 3\n")


def test_traceback_can_be_asked_for(run_of):
    words = run_of(in_switchx("raise ValueError('use 3')"))
    with pytest.raises(ValueError, match="use 3"):
        main([*words, "--traceback"])


def test_system_errors_are_one_line_wherever_they_come_from(run_of, capsys, tmp_path):
    def run(arguments):
        (tmp_path / "none").read_text()

    assert main(run_of(run)) == 1
    assert capsys.readouterr().err == (
        f"switchx train: error: [Errno 2] No such file or directory: '{tmp_path}/none'\n"
    )


def test_bugs_keep_their_traceback(run_of):
    import numpy as np

    with pytest.raises(KeyError):
        main(run_of(in_switchx("return {}['x']")))
    with pytest.raises(TypeError):
        main(run_of(in_switchx("return 1 + 'x'")))
    with pytest.raises(ValueError, match="cannot reshape"):  # raised by a library
        main(run_of(lambda arguments: np.zeros(3).reshape(2)))


def test_interruption_is_no_error(run_of, capsys):
    assert main(run_of(in_switchx("raise KeyboardInterrupt"))) == 130
    assert capsys.readouterr().err == "switchx: interrupted\n"


def test_logs_and_warnings_are_lines(run_of, capsys):
    text = (
        "import logging, warnings\n"
        "    logging.getLogger('switchx.x').info('preparing')\n"
        "    warnings.warn('careful')"
    )
    assert main(run_of(in_switchx(text))) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "switchx: preparing"
    assert lines[1].startswith("switchx: warning: ") and lines[1].endswith("careful")


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is Linux'")
def test_process_starts_again_as_it_was_started(monkeypatch):
    started = []
    name, value = main_module.MALLOC_TUNING
    monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "switchx", "train", "--x"])
    monkeypatch.setattr(os, "execv", lambda path, argv: started.append((path, argv)))
    main_module._restart_with_malloc_tuning()
    main_module._restart_with_malloc_tuning()
    again = [sys.executable, "-m", "switchx", "train", "--x"]
    assert started == [(sys.executable, again)]
    assert os.environ[name] == value
