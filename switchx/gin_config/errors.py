# SPDX-License-Identifier: Apache-2.0
"""Gin's errors about a configuration, as one sentence for the person who wrote it."""

import inspect
import os
import pkgutil
import re
import sys
import traceback
from pathlib import Path

from switchx.gin_config import gin_internals
from switchx.gin_config.files import MOVED, close_file, config_roots, did_you_mean

_PLACE = re.compile(r'In file "([^"]+)", line (\d+)')
_TOKEN_ERROR = re.compile(r"\('([^']+)', \((\d+), \d+\)\)")


def place_of(error: Exception, reading: str | None) -> str:
    """`FILE:LINE: ` of what gin could not parse, in the file `reading` or one that it names."""
    place, token = _PLACE.search(str(error)), _TOKEN_ERROR.search(str(error))
    if isinstance(error, SyntaxError) and error.lineno and reading:
        is_of_python = str(error.filename).endswith(".py")
        return f"{reading}: " if is_of_python else f"{reading}:{error.lineno}: "
    if token and reading:
        return f"{reading}:{token[2]}: "
    if place:
        return f"{place[1]}:{place[2]}: "
    return f"{reading}: " if reading else ""


def module_that_failed(error: Exception) -> str:
    """`importing FILE:LINE failed with NameError: ` if a module that a gin file imports failed
    on import; nothing otherwise."""
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    names = [code.co_name for code, _ in frames]
    if "process_import" not in names:  # gin's
        return ""
    inside = frames[names.index("process_import") + 1 :]
    file, line = (inside[-1][0].co_filename, inside[-1][1]) if inside else ("", 0)
    if isinstance(error, SyntaxError):
        file, line = str(error.filename), error.lineno
    if not file.endswith(".py"):
        return ""
    return f"importing {file}:{line} failed with {type(error).__name__}: "


def explain(error: Exception, reading: str | None = None) -> str:
    """Gin's message without its dump of the configuration, with what may be meant.

    Args:
        reading: the gin file that caused the error.
    """
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    for pattern, say in _SAYINGS:
        if match := re.search(pattern, text):
            if say is _no_configurable and reading and _registers_nothing(reading):
                return _no_registration(*match.groups())
            return say(*match.groups())
    text = text.partition("in config string:")[0].partition("\n  In bindings string")[0]
    text = text.partition("\n  In file")[0]
    if token := _TOKEN_ERROR.search(text):
        text = token[1]
    text = re.sub(r"\n?\s*In call to configurable '(\w+)'.*", r" (while building \1)", text)
    return " ".join(text.split())


def _no_literal() -> str:
    return (
        "the value is not one Python literal; decimals take a point (0.1), lists brackets and "
        "texts quotes, and several values belong to `switchx sweep`"
    )


def _required(name: str) -> str:
    names = {name.partition("/")[0]: None}
    held = gin_internals.macros().items()
    names |= {macro: None for macro, value in held if str(value) == "%gin.REQUIRED"}
    flags = " ".join(f"--gin.{each}=VALUE" for each in names)
    verb = "is" if len(names) == 1 else "are"
    return f"{', '.join(names)} {verb} required and not set; give {flags}"


def _no_parameter(selector: str, parameter: str) -> str:
    registered = gin_internals.registered().items()
    found = (each for name, each in registered if f".{name}".endswith(f".{selector}"))
    known = [name for each in [*found][:1] for name in inspect.signature(each).parameters]
    return (
        f"{selector} has no parameter {parameter!r}{did_you_mean(parameter, known)}; it has "
        f"{', '.join(known) or 'none'}"
    )


def _no_configurable(selector: str) -> str:
    known = {name.rpartition(".")[2] for name in gin_internals.registered()}
    stem = selector.rpartition(".")[2]
    return (
        f"there is no {selector!r}{did_you_mean(stem, known)}; a gin file has to import its "
        "module and to name it, as `from switchx.models import config` and "
        "`MODEL = @config.ModelConfig()` do below `from __gin__ import dynamic_registration`"
    )


def _registers_nothing(path: str) -> bool:
    """Whether a gin file imports modules, but nothing says that these are to be registered."""
    imports = re.findall(
        r"^(?:from|import)\s.*", Path(path).read_text("utf-8-sig"), re.MULTILINE
    )
    return bool(imports) and not any("__gin__" in line for line in imports)


def _no_registration(selector: str) -> str:
    return (
        f"there is no {selector!r}, as this file's imports name nothing without the line "
        "`from __gin__ import dynamic_registration`; write it above them"
    )


def _no_attribute(module: str, name: str) -> str:
    known = [each for each in vars(sys.modules[module]) if not each.startswith("_")]
    return f"{module} has no {name!r}{did_you_mean(name, known)}"


def _no_module(name: str) -> str:
    parent, _, stem = name.rpartition(".")
    if name in MOVED:
        return f"there is no module {name!r}; it is {MOVED[name]} now"
    folders = getattr(sys.modules.get(parent), "__path__", []) if parent else ["."]
    known = [each.name for each in pkgutil.iter_modules(folders) if each.name != stem]
    where = ""
    if name.partition(".")[0] != "switchx":
        where = (
            "; modules are looked up on PYTHONPATH and in the working directory, "
            f"{os.getcwd()}, there only for a gin file that the command names, or with "
            "--trust_code: run the command in the folder that has it, or add that folder"
        )
    return f"there is no module {name!r}{did_you_mean(stem, known)}{where}"


def _no_macro(name: str) -> str:
    return f"nothing defines the macro %{name}{did_you_mean(name, gin_internals.macros())}"


def _no_file(name: str) -> str:
    return f"there is no gin file {name!r} to include; {close_file(name, config_roots())}"


_SAYINGS = (
    (r"^Expected newline", _no_literal),
    (r"([\w./]+) set to `%gin.REQUIRED`", _required),
    (r"Configurable '([\w.]+)' doesn't have a parameter named '(\w+)'", _no_parameter),
    (r"No configurable matching '([\w.]+)'", _no_configurable),
    (r"No configurable matching reference '@(?:\w+/)*([\w.]+)", _no_configurable),
    (r"'([\w.]+)' was not provided by an import statement", _no_configurable),
    (r"<module '([\w.]+)' .*> has no attribute (\w+)", _no_attribute),
    (r"No module named '([\w.]+)'", _no_module),
    (r"No bindings specified for '(\w+)/gin.macro'", _no_macro),
    (r"Unable to open file: (\S+)\. Searched", _no_file),
)
