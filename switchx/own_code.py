# SPDX-License-Identifier: Apache-2.0
"""The user's own code: when modules in the working directory can be imported.

A gin file that a user names is their program, so what it imports may be in the working
directory. A model's folder is data: the classes that its `config.json` names are looked up
among installed or imported modules, and in the working directory only with `--trust_code`.
That directory is searched last: no file in it shadows an installed module.
"""

import contextlib
import importlib
import os
import pathlib
import sys
import types
from collections.abc import Iterator

_ROOT = pathlib.Path(__file__).parents[1]  # the folder that contains the package
# Entries of the module path that serve gin files but not what model folders name.
_for_gin_files: set[str] = set()


def import_from_working_directory(*, folders_too: bool = False) -> None:
    """Puts the working directory at the end of the module path.

    Args:
        folders_too: also for the classes that a model's folder names (`--trust_code`).
    """
    here = os.getcwd()
    if folders_too:
        _for_gin_files.discard(here)
    elif here not in sys.path:
        _for_gin_files.add(here)
    if here not in sys.path:
        sys.path.append(here)


def import_for_folder(module: str) -> types.ModuleType:
    """Imports the module that a file in a model's folder names.

    Raises:
        ImportError: the module is neither installed, nor already imported, nor trusted.
    """
    with _without(_for_gin_files):
        return importlib.import_module(module)


@contextlib.contextmanager
def _without(entries: set[str]) -> Iterator[None]:
    path = sys.path[:]
    sys.path[:] = [each for each in path if each not in entries]
    try:
        yield
    finally:
        sys.path[:] = path


def is_of_working_directory() -> bool:
    """Whether a module was imported that a model's folder finds only with `--trust_code`."""
    tops = [each for name, each in [*sys.modules.items()] if "." not in name]
    files = [each.__file__ for each in tops if getattr(each, "__file__", None)]
    packages = [path for each in tops for path in getattr(each, "__path__", ())]
    folders = {os.path.dirname(path) for path in (*files, *packages)}
    return bool(folders & (_for_gin_files - {str(_ROOT)}))


def python_words() -> list[str]:
    """The command that starts a Python that does not import from the working directory.

    If that directory is the one that contains this package, it does import from it.
    """
    return [sys.executable, *([] if pathlib.Path.cwd() == _ROOT else ["-P"])]


def leave_out_working_directory() -> None:
    """Removes the path entry that `python -m switchx` adds, unless this package is there."""
    if not sys.flags.safe_path and pathlib.Path(sys.path[0]).resolve() != _ROOT.resolve():
        del sys.path[0]
