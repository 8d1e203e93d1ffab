# SPDX-License-Identifier: Apache-2.0
"""How an error that ends a command reaches a person, and with which exit status."""

import argparse
import sys
import traceback

OURS = ("switchx", "pallas_kernels")


def explain(error: BaseException, arguments: argparse.Namespace) -> int:
    """Prints the error in one paragraph; returns the exit status.

    130 interrupted, 2 wrong input, 1 failed on the way. What is not meant for a person, any
    error that switchx itself did not raise, is raised again: a traceback.
    """
    if isinstance(error, KeyboardInterrupt):
        print("switchx: interrupted", file=sys.stderr)
        return 130
    if arguments.traceback or not _is_for_a_person(error):
        raise error
    print(f"switchx {arguments.command}: error: {error}", file=sys.stderr)
    return 2 if isinstance(error, ValueError) else 1


def _is_for_a_person(error: BaseException) -> bool:
    """Whether its message suffices: our own code raised it, or the system refused something."""
    if isinstance(error, OSError):
        return True
    if not isinstance(error, ValueError | RuntimeError):
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    is_ours = frame.f_globals.get("__name__", "").split(".")[0] in OURS
    return is_ours and not type(error).__module__.startswith("jax")
