# SPDX-License-Identifier: Apache-2.0
"""Gin, at the edge: how a configuration becomes objects.

Core code has no decorators; gin files import what they bind
(`from __gin__ import dynamic_registration`) and end in a macro that names the object to
build, `JOB = @job.TrainingJob()`.
"""

import ast
import contextlib
import copy
import dataclasses
import io
import itertools
import logging
import os
import pathlib
import re
import types
import typing
from collections.abc import Iterable, Iterator, Sequence

import gin

from switchx.fields import fits, without_gin
from switchx.gin_config import gin_internals
from switchx.gin_config.errors import explain, module_that_failed, place_of
from switchx.gin_config.files import as_of_today, config_roots, did_you_mean, missing_file
from switchx.gin_config.taken_settings import (
    FIRST,
    name_of,
    require_model_of_source,
    sets_rows,
    take_sources,
)
from switchx.gin_config.writing import without_scopes
from switchx.training.job import TrainingJob

_NAME = re.compile(r"(?:\w+/)*[A-Za-z_]\w*(?:\.\w+)*")
# A macro that nothing reads counts as misspelt above this similarity: TRAIN_STEP.
_MISSPELT = 0.85

_log = logging.getLogger(__name__)


class ConfigurationError(ValueError):
    """A configuration that cannot be parsed or built; the message says what to change."""


def job_from_gin(
    gin_files: str | os.PathLike | Sequence[str | os.PathLike],
    gin_bindings: Sequence[str] = (),
    gin_search_paths: Sequence[str] = (),
) -> TrainingJob:
    """The job that gin files describe, as `switchx train` reads them.

    Gin's own state is restored afterwards: what a caller has configured or registered stays,
    and what these files import is imported anew by the next call.

    Args:
        gin_files: paths, or names below configs/ such as `runs/pretrain_tiny.gin`; several are
            read in order, and later ones win.
        gin_bindings: texts such as "TRAIN_STEPS=100" or "SwitchConfig.capacity_factor=1.0",
            they override all files. On a command line each is an option, --gin.TRAIN_STEPS=100.
        gin_search_paths: further folders to search for gin files.

    Raises:
        ConfigurationError: the files describe no job; the message (it is a `ValueError`) says
            what to change, and names bindings as on a command line.
    """
    files = [gin_files] if isinstance(gin_files, str | os.PathLike) else list(gin_files)
    for name, texts in (("gin_bindings", gin_bindings), ("gin_search_paths", gin_search_paths)):
        if isinstance(texts, str):
            raise ConfigurationError(f"{name} is one text, {texts!r}; give a list, [{texts!r}]")
    if not files:
        raise ConfigurationError("gin_files is empty; give one from configs/runs")
    with gin_internals.restored():
        job = parse_job(list(map(os.fspath, files)), gin_bindings, gin_search_paths)
        return _plain_functions(job)


def parse_job(
    files: Sequence[str], bindings: Sequence[str], search_paths: Sequence[str] = ()
) -> TrainingJob:
    """The job, as from `job_from_gin`; gin keeps what it parsed, for `operative_config`."""
    parse_files(files, bindings, search_paths)
    job = build("JOB", TrainingJob)
    require_effect("JOB", bindings)
    try:
        require_model_of_source(job.model, bindings)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    return job


def _plain_functions(value):
    """The value just built, its functions out of gin's wrappers, which look them up in gin."""
    if isinstance(value, list | tuple):
        make = getattr(value, "_make", type(value))  # of a NamedTuple
        return make(map(_plain_functions, value))
    if isinstance(value, dict):
        return {name: _plain_functions(item) for name, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            # The instance is frozen, and not shared yet; `__post_init__` has checked it.
            item = _plain_functions(getattr(value, field.name))
            object.__setattr__(value, field.name, item)
        return value
    return without_gin(value)


def parse_files(
    files: Sequence[str], bindings: Sequence[str], search_paths: Sequence[str] = ()
) -> None:
    """Parses gin files in order, then bindings such as `TRAIN_STEPS=100`.

    In between, the model and the vocabulary of INIT_FROM are bound (`taken_settings.py`).

    Args:
        files: paths, or names below `search_paths` or our configs.

    Raises:
        ConfigurationError: a file or a binding is wrong; says where.
    """
    gin.clear_config()
    _note_replaced(bindings)
    roots = config_roots(search_paths)
    reading: list[str] = []
    read: dict[str, str] = {}
    places = list(map(str, roots))
    gin_internals.read_files(places, lambda path: _open(path, reading, read), os.path.isfile)
    for file in files:
        if not any((root / file).is_file() for root in roots):
            raise ConfigurationError(missing_file(file, roots))
    try:
        gin.parse_config_files_and_bindings(files, [], finalize_config=False)
    except Exception as error:  # gin raises many kinds; each is about what was written
        last = reading[-1] if reading else None
        place = place_of(error, last) + module_that_failed(error)
        raise ConfigurationError(f"{place}{explain(error, last)}") from error
    is_first = [name_of(binding) in FIRST for binding in bindings]
    _parse_bindings(itertools.compress(bindings, is_first))
    try:
        take_sources(bindings, has_own_rows=sets_rows(read))
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    _parse_bindings(b for b, is_read in zip(bindings, is_first, strict=True) if not is_read)
    try:
        gin.finalize()
    except Exception as error:
        raise ConfigurationError(explain(error)) from error


def _note_replaced(bindings: Sequence[str]) -> None:
    """Reports which bindings are replaced by a later one of the same name."""
    last = {name_of(binding): binding for binding in bindings}
    for binding in bindings:
        if (later := last[name_of(binding)]) != binding:
            _log.warning("--gin.%s: the later --gin.%s counts", binding, later)


def _parse_bindings(bindings: Iterable[str]) -> None:
    for binding in bindings:
        _check_binding(binding)
        try:
            gin.parse_config(_quoted(binding))
        except Exception as error:
            raise ConfigurationError(f"--gin.{binding}: {explain(error)}") from error


def macro_names() -> list[str]:
    """Names of all macros that the parsed files define."""
    return sorted(gin_internals.macros())


def build(macro: str, expected: type):
    """The object that `macro` names, its fields' types checked against their annotations.

    Raises:
        ConfigurationError: there is no such macro, or it or a value in it is wrong.
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
        raise ConfigurationError(_wrong_type(error) or explain(error)) from error
    if not isinstance(value, expected):
        raise ConfigurationError(
            f"{macro} is a {type(value).__name__}; expected a {expected.__name__}"
        )
    check_types(value)
    _refuse_bound_functions(value)
    return value


def _refuse_bound_functions(value) -> None:
    """Refuses bindings of a function that is a field's value: it is saved only by its name."""
    functions, registered = set(_functions_in(value)), gin_internals.registered()
    for (_, selector), bound in gin_internals.bindings().items():
        if registered.get(selector) in functions:
            names = ", ".join(bound)
            raise ConfigurationError(
                f"{selector} is bound ({names}), but a run folder has the name of a function "
                "alone, and the run could not be told from one with other values; bind the "
                "fields of a frozen dataclass, or the arguments of `Optax`"
            )


def _functions_in(value) -> Iterator[types.FunctionType]:
    value = without_gin(value)
    if isinstance(value, types.FunctionType):
        yield value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _functions_in(getattr(value, field.name))
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _functions_in(each)


def require_effect(macro: str, bindings: Sequence[str]) -> None:
    """Checks, once `macro` is built, that every binding was read.

    Raises:
        ConfigurationError: nothing read the name of a binding, or nothing read a macro of
            the files while a very similar name was read.
    """
    macros = gin_internals.read_macros()
    for binding in bindings:
        name = name_of(binding)
        if "." not in name:
            if name not in macros | {macro}:
                raise ConfigurationError(
                    f"--gin.{name} has no effect: nothing in this configuration reads {name}"
                    f"{did_you_mean(name, macros)}; leave it out, or add the gin file that "
                    "reads it"
                )
            continue
        key = gin_internals.key_of(name)
        scopes = gin_internals.reading_scopes(key.complete_selector, key.arg_name)
        outer = f"{key.scope}/" if key.scope else ""
        if any(f"{scope}/".startswith(outer) for scope in scopes):
            continue
        what, way_out = key.given_selector, "leave it out, or add the gin file that does"
        if scopes:
            what = f"{what} in the scope {key.scope!r}{did_you_mean(key.scope, scopes)}"
            way_out = f"write --gin.{name.removeprefix(outer)}, which is for all scopes"
        raise ConfigurationError(
            f"--gin.{name} has no effect: this configuration builds no {what}; {way_out}"
        )
    for name in set(macro_names()) - macros - {macro}:
        if meant := did_you_mean(name, macros, cutoff=_MISSPELT):
            raise ConfigurationError(
                f"a gin file sets {name}, which nothing reads{meant}; rename it, or take it out"
            )


def operative_config(macro: str) -> str:
    """Everything that was read to build `macro`, as a gin file that builds it again."""
    reference = gin.query_parameter(f"{macro}/gin.macro.value")
    bindings = without_scopes(gin.operative_config_str())
    return f"{bindings}\n{macro} = @{reference.selector}()\n"


def check_types(value, path: str = "") -> None:
    """Checks every field of nested dataclasses against its annotation.

    Raises:
        ConfigurationError: `model.d_model='64' is a str; expected int`.
    """
    path = path or type(value).__name__
    hints = typing.get_type_hints(type(value))
    for field in dataclasses.fields(value):
        name, item = f"{path}.{field.name}", getattr(value, field.name)
        if not fits(item, hints[field.name]):
            raise ConfigurationError(_type_message(name, item, hints[field.name]))
        parts = {name: item}
        if isinstance(item, list | tuple):
            parts = {f"{name}[{i}]": part for i, part in enumerate(item)}
        for name, part in parts.items():
            if dataclasses.is_dataclass(part) and not isinstance(part, type):
                check_types(part, name)


def _wrong_type(error: Exception) -> str | None:
    """Which binding made a constructor fail with a TypeError, if one has the wrong type."""
    name = re.search(r"In call to configurable '(\w+)'", str(error))
    if not isinstance(error, TypeError | AttributeError) or not name:
        return None
    for field, hint in typing.get_type_hints(gin.get_configurable(name[1])).items():
        try:
            value = copy.deepcopy(gin.query_parameter(f"{name[1]}.{field}"))
        except ValueError:
            continue  # not bound: it has its default
        if not fits(value, hint):
            return _type_message(f"{name[1]}.{field}", value, hint)
    return None


def _type_message(name: str, value, hint) -> str:
    expected = str(hint) if typing.get_args(hint) else getattr(hint, "__name__", str(hint))
    expected = re.sub(r"[a-z_]\w*\.", "", expected)  # modules
    if isinstance(value, type):
        return (
            f"{name} is the class {value.__name__} itself; expected {expected}: write "
            f"@{value.__name__}() with parentheses to build one"
        )
    error = f"{name}={value!r} is of type {type(value).__name__}; expected {expected}"
    if fits("", hint) and isinstance(value, int | float):
        macros = sorted(gin_internals.macros().items())
        alike = (n for n, held in macros if type(held) is type(value) and held == value)
        text = "TEXT" if isinstance(value, float) else value  # 1e5 is 100000.0
        flag = f"--gin.{next(alike, name)}='\"{text}\"'"
        error += f": a text that reads as a number needs quotes, {flag}"
    return error


@contextlib.contextmanager
def _open(path: str, reading: list[str], read: dict[str, str]) -> Iterator[typing.TextIO]:
    """Opens a file; while it is read, and if that fails, it is the last of `reading`.

    Its text is added to `read`.
    """
    same = [each for each in reading if os.path.samefile(each, path)]
    if same:
        chain = [*reading[reading.index(same[0]) :], path]
        raise ConfigurationError(f"{' includes '.join(chain)}; take one of these lines out")
    reading.append(path)
    # A byte order mark, as written by Windows editors, is not part of the text.
    read[path] = as_of_today(pathlib.Path(path).read_text(encoding="utf-8-sig"))
    file = io.StringIO(read[path])
    file.name = path  # gin's errors say it
    yield file
    reading.pop()


def _quoted(binding: str) -> str:
    """The binding with quotes around a value that is not a gin literal, such as a path."""
    name, equals, value = binding.partition("=")
    if not equals or value.startswith(("@", "%")):
        return binding
    try:
        ast.literal_eval(value)
    except (ValueError, SyntaxError):
        is_literal = _holds_references(value)
    else:
        is_literal = True
    return binding if is_literal else f"{name}={value!r}"


def _holds_references(value: str) -> bool:
    """Whether a value is a list or dictionary of references to configurables and macros."""
    try:
        found = ast.literal_eval(re.sub(r"@[\w./]+(\(\))?|%[A-Z][\w./]*", "None", value))
    except (ValueError, SyntaxError):
        return False
    return isinstance(found, list | tuple | dict)


def _check_binding(binding: str) -> None:
    """Refuses what gin would take for something else, or for nothing."""
    name, equals, value = binding.partition("=")
    name = name.strip()
    if not equals or not value.strip():
        raise ConfigurationError(
            f"--gin.{binding} has no value; write --gin.{name}=VALUE (is a shell variable not "
            "set?)"
        )
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"--gin.{binding}: {name!r} is no name of a macro or a parameter"
            f"{did_you_mean(name, macro_names())}; write --gin.MACRO=VALUE or "
            "--gin.CLASS.PARAMETER=VALUE"
        )
    if "." not in name:
        if name not in macro_names():
            raise ConfigurationError(
                f"--gin.{name}: no gin file defines a macro {name}"
                f"{did_you_mean(name, macro_names())}; there are {', '.join(macro_names())}"
            )
        return
    scopes = _scopes_of(name)
    if "/" not in name and scopes:
        raise ConfigurationError(
            f"--gin.{name} would not change what the gin files set in scopes; write "
            f"{' or '.join(f'--gin.{scope}/{name}' for scope in scopes)}"
        )


def _scopes_of(name: str) -> list[str]:
    """Scopes in which the files bind a parameter; none if its class is unknown."""
    try:
        key = gin_internals.key_of(name)
    except Exception:  # parsing the binding will say what is wrong with it
        return []
    return sorted(
        scope
        for (scope, selector), bound in gin_internals.bindings().items()
        if scope and selector == key.complete_selector and key.arg_name in bound
    )
