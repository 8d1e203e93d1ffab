# SPDX-License-Identifier: Apache-2.0
"""How the command answers: help at once, exit statuses, errors as one paragraph."""

import logging
import os
import resource
import signal
import subprocess
import sys
import time
import warnings

import pytest

from switchx.cli import train
from switchx.cli.main import _parser, main
from switchx.progress import shown_by
from tests.processes import ROOT

LIBRARIES = ("jax", "numpy", "flax", "gin", "rich", "tensorflow_datasets")


def python(*words: str, **settings) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *words],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        **settings,
    )


def commands() -> list[str]:
    """The names of all commands."""
    (action,) = (each for each in _parser()._actions if each.dest not in ("help", "version"))
    return list(action.choices)


def test_help_of_every_command_imports_neither_jax_nor_other_libraries():
    code = (
        "import sys\nfrom switchx.cli.main import main\n"
        f"for words in [['--help'], *([name, '--help'] for name in {commands()!r})]:\n"
        "    try: main(words)\n"
        "    except SystemExit as leaving: assert leaving.code == 0\n"
        f"print([name for name in {LIBRARIES!r} if name in sys.modules])"
    )
    assert python("-c", code, check=True).stdout.splitlines()[-1] == "[]"


def test_the_module_is_the_command():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    shown = python("-m", "switchx", "--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert shown.returncode == 0
    assert all(f"\n    {name} " in shown.stdout for name in ("train", "eval", "bench"))
    # 0.1 s of the processor; far below what JAX takes, on a machine that is busy too.
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds < 1.0
    wrong = python("-m", "switchx", "trian")
    assert wrong.returncode == 2 and "train" in wrong.stderr


def test_no_command_shows_the_help(cli):
    assert "commands:" in cli(status=2).out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["trian"],
            "switchx: error: there is no 'trian' (did you mean train?); use "
            f"{', '.join(commands())} (`switchx --help` explains)\n",
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
def test_wrong_use_is_one_paragraph_and_status_2(words, said, cli):
    captured = cli(*words, status=2)
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


def test_system_errors_and_interruptions_are_one_line(run_of, capsys, cli, tmp_path):
    def run(arguments):
        (tmp_path / "none").read_text()

    assert cli(*run_of(run), status=1).err == (
        f"switchx train: error: [Errno 2] No such file or directory: '{tmp_path}/none'\n"
    )
    assert main(run_of(in_switchx("raise KeyboardInterrupt"))) == 130
    assert capsys.readouterr().err == "switchx: interrupted\n"
    assert main(run_of(in_switchx("raise BrokenPipeError(32, 'a peer has gone')"))) == 1
    assert "a peer has gone" in capsys.readouterr().err  # and not the reader of the output
    before, left = signal.getsignal(signal.SIGTERM), []

    def ended(arguments):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        finally:
            left.append("taken back")

    assert main(run_of(ended)) == 130 and left == ["taken back"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_bugs_keep_their_traceback_and_others_can_have_one(run_of):
    import numpy as np

    with pytest.raises(KeyError):
        main(run_of(in_switchx("return {}['x']")))
    with pytest.raises(TypeError):
        main(run_of(in_switchx("return 1 + 'x'")))
    with pytest.raises(ValueError, match="cannot reshape"):  # raised by a library
        main(run_of(lambda arguments: np.zeros(3).reshape(2)))
    words = run_of(in_switchx("raise ValueError('use 3')"))
    with pytest.raises(ValueError, match="use 3"):
        main([*words, "--traceback"])


def test_logs_and_warnings_are_lines(run_of, cli):
    text = (
        "import logging, warnings\n"
        "    logging.getLogger('switchx.x').info('preparing')\n"
        "    warnings.warn('careful')"
    )
    lines = cli(*run_of(in_switchx(text))).err.splitlines()
    assert lines[0] == "switchx: preparing"
    assert lines[1].startswith("switchx: warning: ") and lines[1].endswith("careful")


def test_log_records_and_warnings_are_lines_of_one_kind():
    lines = []
    with shown_by(lines.append):
        logging.getLogger("switchx.data.corpora").info("preparing %s", "text")
        logging.getLogger("switchx.data").debug("not shown")
        logging.getLogger("switchx.training").warning("checkpoint 3 is skipped")
        logging.getLogger("absl").info("not shown")
        logging.getLogger("absl").error("disk on fire")
        logging.getLogger("switchxylophone").info("not shown")
    assert lines == [
        "preparing text",
        "warning: checkpoint 3 is skipped",
        "error: disk on fire",
    ]
    lines = []
    logging.captureWarnings(True)
    try:
        with shown_by(lines.append), warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning("overflow", RuntimeWarning, "cast.py", 7, line="x = y")
    finally:
        logging.captureWarnings(False)
    assert lines == ["warning: cast.py:7: RuntimeWarning: overflow"]


def test_what_was_before_is_back_afterwards():
    root, ours = logging.getLogger(), logging.getLogger("switchx")
    before = root.handlers[:], ours.level
    outer, inner = [], []
    with shown_by(outer.append):
        with shown_by(inner.append):
            ours.warning("one")
        ours.warning("two")
    assert (root.handlers, ours.level) == before
    assert (outer, inner) == (["warning: two"], ["warning: one"])


def test_a_reader_that_has_enough_is_no_error():
    """As `switchx configs | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "switchx", "configs"]
    with open(writer, "w") as gone:
        done = subprocess.run(command, stdout=gone, stderr=subprocess.PIPE, cwd=ROOT)
    assert (done.returncode, done.stderr) == (141, b"")
