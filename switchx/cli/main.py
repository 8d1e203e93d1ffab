# SPDX-License-Identifier: Apache-2.0
"""The `switchx` command: its subcommands, and how errors are shown to a person."""

import contextlib
import importlib
import importlib.metadata
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator

from switchx.cli.arguments import (
    CommandParser,
    UsageError,
    accept_gin_bindings,
    explain,
    give_threads_to_simulated_devices,
)
from switchx.own_code import import_from_working_directory

# Modules, in the order of the help. They are quick to import; each imports JAX and whatever
# else it needs when it is run.
COMMANDS = (
    "train sweep evaluate generate serve quantize export reshape teach deploy convert vocab "
    "tasks configs checkpoint show drops drift atlas plan simulate compile bench"
).split()

DESCRIPTION = """\
switchx pretrains, fine-tunes and studies sparse Mixture-of-Experts Transformers.

A run is described by gin files and written into one folder:

  switchx train --gin_file=configs/runs/pretrain_tiny.gin --model_dir=runs/tiny
  switchx eval  --model_dir=runs/tiny

The same `switchx train` goes on where an interrupted run left off. --gin.NAME=VALUE changes
any setting of the gin files; several --gin_file options are read in order:

  switchx train --gin_file=configs/runs/pretrain_tiny.gin --gin.TRAIN_STEPS=100 --model_dir=DIR

`configs/` is found from any folder; runs to start from are in configs/runs.
"""
EPILOG = """\
`switchx COMMAND --help` explains a command. Exit status: 0 done, 1 failed on the way or a
check does not hold, 2 wrong input (nothing was done), 3 training stopped itself, 75 saved after
a signal (under a launcher or with several processes), 130 interrupted.
"""


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit status, see EPILOG.

    Args:
        argv: the arguments, without the program's name; None takes the command line.
    """
    parser = _parser()
    try:
        arguments = _parse(parser, sys.argv[1:] if argv is None else argv)
    except UsageError as error:
        print(f"{error.prog}: error: {error}", file=sys.stderr)
        return 2
    if arguments is None:
        parser.print_help()
        return 2
    give_threads_to_simulated_devices()
    if getattr(arguments, "trust_code", False):
        import_from_working_directory(folders_too=True)
    logging.captureWarnings(True)
    try:
        from switchx.progress import shown_by  # not for help

        has_traceback = getattr(arguments, "traceback", False)
        show = lambda line: print(f"switchx: {line}", file=sys.stderr)  # noqa: E731
        with shown_by(show, has_traceback=has_traceback), _interrupted_by_sigterm():
            status = arguments.run(arguments) or 0
            if sys.stdout is not None:
                sys.stdout.flush()  # here, where a closed pipe is handled
            return status
    except BrokenPipeError as error:
        if not _is_output_closed():
            return explain(error, arguments)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (KeyboardInterrupt, ValueError, OSError, RuntimeError) as error:
        return explain(error, arguments)
    finally:
        logging.captureWarnings(False)


def _is_output_closed() -> bool:
    """Whether the reader of the output, such as `head`, has gone."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except (AttributeError, OSError):  # there is none, or one without a file, as in notebooks
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


@contextlib.contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Treats SIGTERM like Ctrl-C: partial output is removed, and started processes end.

    Training, and a server that listens, have their own ways to end.
    """
    is_main = threading.current_thread() is threading.main_thread()
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler) if is_main else None
    try:
        yield
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, previous or signal.SIG_DFL)


def _parser() -> CommandParser:
    parser = CommandParser("switchx", description=DESCRIPTION, epilog=EPILOG)
    version = f"switchx {importlib.metadata.version('switchx')}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name in COMMANDS:
        importlib.import_module(f"switchx.cli.{name}").add_command(commands)
    return parser


def _parse(parser: CommandParser, argv: list[str]):
    """The arguments, or None if no command is given.

    Raises:
        UsageError: an option is unknown, missing or has no value.
    """
    arguments, rest = parser.parse_known_args(argv)
    if not hasattr(arguments, "run"):
        if rest:
            parser.error(f"{rest[0]} stands before the command; write it after")
        return None
    accept_gin_bindings(arguments, rest)
    return arguments
