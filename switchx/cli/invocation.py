# SPDX-License-Identifier: Apache-2.0
"""How this command was started, written so that it can be pasted into a shell again."""

import argparse
import os
import pathlib
import shlex
import shutil
import sys


def command_line(name: str, *options: str) -> str:
    """`switchx NAME OPTIONS`, quoted for a shell in the same folder and environment."""
    return " ".join([*_program(), *(shlex.quote(word) for word in (name, *options))])


def configuration_options(arguments: argparse.Namespace, without: str = "") -> list[str]:
    """The gin files, search paths and bindings that were given, in their order.

    Args:
        without: name of a macro whose binding is left out.
    """
    options = [f"--gin_file={file}" for file in arguments.gin_file or ()]
    if arguments.gin_search_paths:
        options.append(f"--gin_search_paths={arguments.gin_search_paths}")
    for binding in arguments.gin_bindings:
        if binding.partition("=")[0].strip() != without:
            options.append(f"--gin.{binding}")
    return options


def _program() -> list[str]:
    """`switchx` where a shell finds this installation so, otherwise how it was called."""
    called, python = pathlib.Path(sys.argv[0]), pathlib.Path(sys.executable)
    if called.name == "switchx":
        found = shutil.which("switchx")
        is_found = found is not None and os.path.samefile(found, called)
        return ["switchx" if is_found else shlex.quote(str(called))]
    # Not by what a link leads to: a virtual environment's python may be one to the system's.
    is_default = shutil.which("python") == str(python.with_name("python"))
    return ["python" if is_default else shlex.quote(str(python)), "-m", "switchx"]
