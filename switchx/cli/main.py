# SPDX-License-Identifier: Apache-2.0
"""The `switchx` command: its subcommands, and how errors reach a person."""

import logging
import os
import sys

# These are quick to import; each imports JAX and what else it needs when it is run.
from switchx.cli import (
    bench,
    check,
    checkpoint,
    compile,
    convert,
    evaluate,
    export,
    generate,
    plan,
    progress,
    quantize,
    report,
    score,
    serve,
    show,
    train,
    tune,
    vocab,
)
from switchx.cli.arguments import CommandParser, UsageError, accept_gin_bindings

DESCRIPTION = """\
switchx pretrains, fine-tunes and studies sparse Mixture-of-Experts Transformers.

A run is described by gin files and written into one folder:

  switchx train --gin_file=configs/runs/pretrain_tiny.gin --model_dir=runs/tiny
  switchx eval  --model_dir=runs/tiny

The same `switchx train` goes on where an interrupted run left off. --gin.NAME=VALUE changes
any setting of the gin files, several --gin_file are read in order:

  switchx train --gin_file=configs/runs/pretrain_tiny.gin --gin.TRAIN_STEPS=100 --model_dir=DIR

`configs/` is found from any folder; runs to start from are in configs/runs.
"""
EPILOG = """\
`switchx COMMAND --help` explains one. Exit status: 0 done, 1 failed on the way, 2 wrong
input (nothing was done), 75 saved after a signal to one of several processes, 130 interrupted.
"""

# glibc backs its heap with huge pages; a training step on CPU gets 20 to 25% faster. It is
# read before main() starts, so the process starts itself again with it set.
MALLOC_TUNING = (
    "GLIBC_TUNABLES",
    "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=100000000000:"
    "glibc.malloc.trim_threshold=100000000000:glibc.malloc.arena_max=1",
)


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit status.

    0 done, 1 failed on the way, 2 wrong input, 75 to be gone on with, 130 interrupted. What is
    not meant for a person, any error that switchx itself did not raise, is a traceback.

    Args:
        argv: without the program's name; None takes the command line.
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
    if argv is None:
        _restart_with_malloc_tuning()
    logging.captureWarnings(True)
    try:
        with progress.shown_by(lambda line: print(f"switchx: {line}", file=sys.stderr)):
            return arguments.run(arguments) or 0
    except (KeyboardInterrupt, ValueError, OSError, RuntimeError) as error:
        return progress.explain(error, arguments)
    finally:
        logging.captureWarnings(False)


def _parser() -> CommandParser:
    parser = CommandParser("switchx", description=DESCRIPTION, epilog=EPILOG)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for module in (
        train, evaluate, report, generate, score, serve, quantize, export, convert, vocab,
        checkpoint, show, plan, compile, bench, tune, check,
    ):  # fmt: skip
        module.add_command(commands)
    return parser


def _parse(parser: CommandParser, argv: list[str]):
    """The arguments, or None where no command is given.

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


def _restart_with_malloc_tuning() -> None:
    name, value = MALLOC_TUNING
    if sys.platform != "linux" or name in os.environ:
        return
    os.environ[name] = value
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
