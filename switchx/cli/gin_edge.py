# SPDX-License-Identifier: Apache-2.0
"""Gin, at the edge: the only file that knows how a configuration becomes objects.

Core code has no decorators; gin files import what they bind
(`from __gin__ import dynamic_registration`) and end in a macro that names the object to
build, `JOB = @job.TrainingJob()`.
"""

import ast
import contextlib
import copy
import dataclasses
import difflib
import logging
import pathlib
import re
import types
import typing

import gin

from switchx.cli.config_files import configs_dir

_MACRO = re.compile(r"^([A-Za-z_]\w*)\s*=(.*)$", re.DOTALL)


class ConfigurationError(ValueError):
    """A configuration that cannot be parsed or built; the message says what to change."""


def find_file(name: str, search_paths: list[str]) -> str:
    """The gin file called `name`: as given, under a search path, or among our configs.

    Raises:
        ConfigurationError: it is nowhere; the message lists where it was looked for.
    """
    roots = [pathlib.Path("."), *map(pathlib.Path, search_paths)]
    roots += [configs_dir(), configs_dir().parent]
    for root in roots:
        if (root / name).is_file():
            return str(root / name)
    stem = pathlib.Path(name).stem
    known = {path.stem: path for path in sorted(configs_dir().rglob("*.gin"))}
    close = difflib.get_close_matches(stem, known, n=1)
    hint = f"; did you mean {known[close[0]]}?" if close else ""
    raise ConfigurationError(
        f"no gin file {name!r} in {', '.join(str(root) for root in roots)}{hint} "
        "(--gin_search_paths adds folders)"
    )


def parse_files(files: list[str], bindings: list[str], search_paths: list[str] = ()) -> None:
    """Parses gin files in order, then bindings such as `TRAIN_STEPS=100`.

    Raises:
        ConfigurationError: a file or binding is wrong, a macro is misspelt (nothing would
            read it), or a required value is missing.
    """
    gin.clear_config()
    prefixes = ["", *search_paths, str(configs_dir())]
    gin.config._LOCATION_PREFIXES[:] = prefixes  # gin can only append to them
    paths = [find_file(name, list(search_paths)) for name in files]
    try:
        with _quiet():
            gin.parse_config_files_and_bindings(paths, [], finalize_config=False)
        for binding in bindings:
            _check_macro(binding)
        gin.parse_config([_quoted(binding) for binding in bindings])
        gin.finalize()
    except ConfigurationError:
        raise
    except Exception as error:  # gin raises many kinds; each is about what was written
        raise ConfigurationError(_explain(error)) from error


def macro_names() -> list[str]:
    """Names of all macros the parsed files define."""
    section = gin.config_str().partition("# Macros:")[2].partition("# Parameters")[0]
    return [match[1] for line in section.splitlines() if (match := _MACRO.match(line))]


def build(macro: str, expected: type):
    """The object that `macro` names, its fields' types checked against their annotations.

    Raises:
        ConfigurationError: the files define no such macro, it is of another type, or a
            value in it is wrong.
    """
    try:
        # Gin calls a reference such as @job.TrainingJob() when it is copied.
        value = copy.deepcopy(gin.query_parameter(f"{macro}/gin.macro.value"))
    except Exception as error:
        if macro not in macro_names():
            raise ConfigurationError(
                f"the gin files define no macro {macro}; a run file ends in "
                f"`{macro} = @job.{expected.__name__}()`; give one from configs/runs"
            ) from error
        raise ConfigurationError(_wrong_type(error) or _explain(error)) from error
    if not isinstance(value, expected):
        raise ConfigurationError(
            f"{macro} is a {type(value).__name__}; expected a {expected.__name__}"
        )
    check_types(value)
    return value


def operative_config(macro: str) -> str:
    """Everything that was read to build `macro`, as a gin file that builds it again."""
    reference = gin.query_parameter(f"{macro}/gin.macro.value")
    return f"{gin.operative_config_str()}\n{macro} = @{reference.selector}()\n"


def check_types(value, path: str = "") -> None:
    """Checks every field of nested dataclasses against its annotation.

    Raises:
        ConfigurationError: `model.d_model='64' is a str; expected int`.
    """
    name = path or type(value).__name__
    hints = typing.get_type_hints(type(value))
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if not _fits(item, hints[field.name]):
            raise ConfigurationError(
                _type_message(f"{name}.{field.name}", item, hints[field.name])
            )
        for i, part in enumerate(item if isinstance(item, list | tuple) else [item]):
            if dataclasses.is_dataclass(part) and not isinstance(part, type):
                index = f"[{i}]" if isinstance(item, list | tuple) else ""
                check_types(part, f"{name}.{field.name}{index}")


def _wrong_type(error: Exception) -> str | None:
    """Which binding made a constructor fail with a TypeError, if one has the wrong type."""
    name = re.search(r"In call to configurable '(\w+)'", str(error))
    if not isinstance(error, TypeError) or not name:
        return None
    for field, hint in typing.get_type_hints(gin.get_configurable(name[1])).items():
        try:
            value = copy.deepcopy(gin.query_parameter(f"{name[1]}.{field}"))
        except ValueError:
            continue  # not bound: it has its default
        if not _fits(value, hint):
            return _type_message(f"{name[1]}.{field}", value, hint)
    return None


def _type_message(name: str, value, hint) -> str:
    expected = str(hint) if typing.get_args(hint) else getattr(hint, "__name__", str(hint))
    return (
        f"{name}={value!r} is a {type(value).__name__}; expected "
        f"{expected.replace('typing.', '')}"
    )


def _fits(value, hint) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is typing.Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if origin is typing.Literal:
        return value in arguments
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if getattr(hint, "_is_protocol", False) or not isinstance(origin or hint, type):
        return True
    if origin in (tuple, list) or getattr(origin, "__module__", "") == "collections.abc":
        return isinstance(value, list | tuple | dict) or callable(value)
    return isinstance(value, origin or hint)


@contextlib.contextmanager
def _quiet():
    """Gin logs an error for every place where an included file is not."""
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _quoted(binding: str) -> str:
    """The binding with quotes around a value that is no gin literal, as a path is not."""
    name, equals, value = binding.partition("=")
    if not equals or value.startswith(("@", "%")):
        return binding
    try:
        ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return f"{name}={value!r}"
    return binding


def _check_macro(binding: str) -> None:
    match = _MACRO.match(binding)
    if match is None:
        if "=" not in binding:
            raise ConfigurationError(f"--gin.{binding} has no value; write --gin.NAME=VALUE")
        return
    name, known = match[1], macro_names()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigurationError(
            f"--gin.{name}: no gin file defines or reads a macro {name}{hint} "
            f"(known: {', '.join(known)})"
        )


def _explain(error: Exception) -> str:
    """Gin's message without the dump of the whole configuration and the wrapped traceback."""
    text = str(error)
    required = re.search(r"([\w./]+) set to `%gin.REQUIRED`", text)
    if required:
        name = required[1].partition("/")[0]
        return f"{name} is required and has no value; give --gin.{name}=VALUE"
    text = text.partition("in config string:")[0]
    text = re.sub(r"\n?\s*In call to configurable '(\w+)'.*", r" (while building \1)", text)
    return text.strip()
