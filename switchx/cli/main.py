# SPDX-License-Identifier: Apache-2.0
"""The `switchx` command: its subcommands, and how errors reach a person."""

import argparse
import logging
import os
import sys

DESCRIPTION = """\
switchx pretrains, fine-tunes and studies sparse Mixture-of-Experts Transformers.

A run is described by gin files and written into one folder:

  switchx train --gin_file=configs/runs/pretrain_tiny.gin --model_dir=runs/tiny
  switchx train --gin_file=configs/runs/pretrain_tiny.gin --gin.TRAIN_STEPS=100 --model_dir=DIR
  switchx eval  --gin_file=configs/runs/pretrain_tiny.gin --model_dir=runs/tiny

The same command goes on where an interrupted run left off.
"""

# glibc backs its heap with huge pages; a training step on CPU gets 20 to 25% faster. It is
# read before main() starts, so the process starts itself again with it set.
MALLOC_TUNING = ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit status (0, 1 for a failure, 2 for wrong input)."""
    if argv is None:
        _restart_with_malloc_tuning()
        argv = sys.argv[1:]
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if not hasattr(arguments, "run"):
        parser.print_help()
        return 2
    arguments.gin_bindings = _gin_bindings(rest, parser, arguments)
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    logging.captureWarnings(True)
    try:
        return arguments.run(arguments) or 0
    except KeyboardInterrupt:
        print("switchx: interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError, RuntimeError) as error:
        if arguments.traceback:
            raise
        print(f"switchx: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1


def _parser() -> argparse.ArgumentParser:
    # Imported here so that `switchx --help` does not wait for JAX.
    from switchx.cli import bench, evaluate, train, vocab

    parser = argparse.ArgumentParser(
        "switchx", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for module in (train, evaluate, vocab, bench):
        module.add_command(commands)
    return parser


def _gin_bindings(rest: list[str], parser, arguments) -> list[str]:
    bindings = []
    for argument in rest:
        if not argument.startswith("--gin.") or not hasattr(arguments, "gin_file"):
            parser.error(
                f"unrecognized argument {argument}; `switchx {arguments.command} --help` "
                "lists what there is"
            )
        bindings.append(argument.removeprefix("--gin."))
    return bindings


def _restart_with_malloc_tuning() -> None:
    name, value = MALLOC_TUNING
    if sys.platform != "linux" or name in os.environ:
        return
    os.environ[name] = value
    os.execv(sys.executable, [sys.executable, "-m", "switchx", *sys.argv[1:]])
