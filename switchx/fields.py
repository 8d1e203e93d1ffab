# SPDX-License-Identifier: Apache-2.0
"""Fields of frozen configurations: their checks, their JSON, and what may change in a run.

A configuration is a frozen dataclass. Its types say which values a field takes (`Literal`), its
fields say whether a run may have another value when it is resumed or evaluated (`at_resume`,
`at_evaluation`), and a run folder's `config.json` holds it in the form that `describe` returns.
"""

import dataclasses
import functools
import json
import math
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, Literal

from switchx.own_code import import_for_folder


def require(condition: bool, message: str) -> None:
    """Raises ValueError with `message` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def require_choice(name: str, value, choices) -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    require(
        value in choices,
        f"{name}={value!r:.80} is unknown; use one of {', '.join(map(str, choices))}",
    )


def check_choices(config) -> None:
    """Raises ValueError where a field typed `Literal[...]` has a value that is not listed."""
    for name, hint in _hints(type(config)).items():
        if typing.get_origin(hint) is Literal:
            choices = typing.get_args(hint)
            require_choice(f"{type(config).__name__}.{name}", getattr(config, name), choices)


def require_at_least(config, least: float, *names: str) -> None:
    """Raises ValueError where a field is below `least`, infinite or not int64; None passes."""

    def holds(value) -> bool:
        return least <= value < (2**63 if isinstance(value, int) else math.inf)

    _require_each(config, names, holds, f"at least {least}")


def require_above_zero(config, *names: str) -> None:
    """Raises ValueError where a field is not above 0, or is infinite; None passes."""
    _require_each(config, names, lambda value: 0 < value < math.inf, "a number above 0")


def require_below_one(config, *names: str) -> None:
    """Raises ValueError where a field is not in [0, 1); None is no number and passes."""
    _require_each(config, names, lambda value: 0 <= value < 1, "0 <= {name} < 1")


def _require_each(config, names, holds: Callable[[Any], bool], allowed: str) -> None:
    for name in names:
        if (value := getattr(config, name)) is not None and not holds(value):
            way_out = f"use {allowed.format(name=name)}"
            raise ValueError(f"{type(config).__name__}.{name}={value!s:.40}; {way_out}")


def require_patterns(name: str, patterns) -> None:
    """Raises ValueError unless all are regular expressions."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ValueError(
                f"{name}: {pattern!r} is no regular expression ({error}); correct it"
            ) from error


def require_pairs(name: str, pairs, types: tuple[type, ...]) -> None:
    """Raises ValueError unless all are pairs of a regular expression and one of `types`."""
    for pair in pairs:
        is_pair = isinstance(pair, list | tuple) and len(pair) == 2
        require(
            is_pair and isinstance(pair[1], types) and not isinstance(pair[1], bool),
            f"{name}: {pair!r} is no pair of a regular expression and "
            f"{' or '.join('None' if t is type(None) else t.__name__ for t in types)}; use a "
            "list of such pairs",
        )
        require_patterns(name, pair[:1])


def at_resume(default=dataclasses.MISSING):
    """A field that may have another value when a run is resumed, and when it is evaluated.

    It does not change the mathematics, or decides only how long, how often and where.
    """
    return dataclasses.field(default=default, metadata={"may change on": "resume"})


def at_evaluation(default=dataclasses.MISSING):
    """A field that may have another value when a run is evaluated.

    Trained parameters keep their meaning, but training would continue differently.
    """
    return dataclasses.field(default=default, metadata={"may change on": "evaluation"})


class FieldError(ValueError):
    """A field of a configuration cannot have its value.

    Attributes:
        field: name of the field.
    """

    def __init__(self, config, field: str, way_out: str):
        value = f"{getattr(config, field)!r:.40}"
        super().__init__(f"{type(config).__name__}.{field}={value}; {way_out}")
        self.field = field


@dataclasses.dataclass(frozen=True)
class Option:
    """A field that users set: a flag of a command line, or a field of a request.

    Attributes:
        type: type of its values: with `choices`, the type of the first one; for a list, the
            type of its items.
        choices: values of a `Literal`; None for other types.
        help: help text of one line.
        least, most: bounds of its numbers, both inclusive; None sets no bound.
        is_list: whether its values are tuples of any length.
    """

    name: str
    type: type
    choices: tuple | None
    default: Any
    help: str
    least: float | None
    most: float | None
    is_list: bool = False

    @property
    def range(self) -> str:
        """The bounds in words: `1 to 4`, `at least 1`."""
        if self.least is None or self.most is None:
            return f"at least {self.least}" if self.most is None else f"at most {self.most}"
        return f"{self.least} to {self.most}"

    def allows(self, value: float) -> bool:
        """Whether a number is within the bounds; infinities and NaN never are."""
        is_above = self.least is None or value >= self.least
        is_below = self.most is None or value <= self.most
        return is_above and is_below and abs(value) < float("inf")


def option(default, help: str, least: float | None = None, most: float | None = None):
    """A field described by an `Option`, whose type and choices are the annotation's."""
    return dataclasses.field(default=default, metadata={"option": (help, least, most)})


def options(cls: type) -> dict[str, Option]:
    """The options of a configuration class, by name."""
    found = {}
    for field in dataclasses.fields(cls):
        if text := field.metadata.get("option"):
            hint, *_ = _alternatives(_hints(cls)[field.name])
            is_list = typing.get_origin(hint) is tuple
            listed = typing.get_args(hint)
            choices = None if is_list else listed or None
            kind = listed[0] if is_list else type(choices[0]) if choices else hint
            found[field.name] = Option(field.name, kind, choices, field.default, *text, is_list)
    return found


def check_options(config) -> None:
    """Raises FieldError where a number is outside its option's bounds; None passes."""
    for name, each in options(type(config)).items():
        value = getattr(config, name)
        is_number = each.choices is None and each.type is not str
        values = value if each.is_list else [] if value is None else [value]
        if is_number and not all(map(each.allows, values)):
            raise FieldError(config, name, f"use {each.range}")


def _type_name(kind: type) -> str:
    """The name of a class in descriptions, with its module unless that is switchx's."""
    is_ours = kind.__module__.split(".")[0] == "switchx"
    return kind.__name__ if is_ours else f"{kind.__module__}.{kind.__qualname__}"


def describe(value, where: str = "the configuration") -> Any:
    """Nested dataclasses as JSON values; the name of each one's type is kept under `type`.

    Functions are written by name, so that a reader can import them again.

    Args:
        where: name of the value, for messages.

    Raises:
        ValueError: a value has neither a JSON form nor a name to import it by.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        described = {
            field.name: describe(getattr(value, field.name), f"{where}.{field.name}")
            for field in dataclasses.fields(value)
            if field.init
        }
        name = _type_name(type(value))
        return {"type": _importable(type(value), where) if "." in name else name} | described
    if isinstance(value, dict):
        return {str(name): describe(item, f"{where}.{name}") for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [describe(item, f"{where}.{i}") for i, item in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return _importable(without_gin(value), where)


def json_text(value, **options) -> str:
    """A value as `json.dumps` writes it, but null for NaN and infinity, which JSON lacks."""
    return json.dumps(_finite(value), allow_nan=False, **options)


def _finite(value):
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def without_gin(value):
    """Unwraps a function that a gin file names from the wrapper that gin puts around it."""
    while getattr(value, "__globals__", {}).get("__name__") == "gin.config":
        value = value.__wrapped__
    return value


def _importable(value, where: str) -> str:
    """The dotted name by which a class or function can be found again; checks that it can."""
    module = getattr(value, "__module__", None)
    last = getattr(value, "__qualname__", "")
    found = getattr(sys.modules.get(module), last, None)
    if found is not value or module == "__main__":
        raise ValueError(
            f"{where}={value!r} cannot be written into a run folder and read again; use a "
            "frozen dataclass or a function that a module defines by name"
        )
    return f"{module}.{last}"


def from_description(cls: type, description: dict[str, Any], where: str):
    """The configuration from which `describe` made this description.

    Args:
        cls: expected class. A description that names a class of another module describes
            that class, which has to be a subclass.
        where: file that it was read from, for messages.

    Raises:
        ValueError: fields are missing or unknown, their values are refused, or the class
            cannot be imported.
    """
    if not isinstance(name := description.get("type", cls.__name__), str):
        raise ValueError(
            f"{where}: a {cls.__name__} has the type {name!r:.80}; correct the file"
        )
    if "." in name:
        cls = _import_named(name, cls, where)
    values = {name: value for name, value in description.items() if name != "type"}
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for name, hint in _hints(cls).items():
        classes = tuple(each for each in _alternatives(hint) if isinstance(each, type))
        inner = [each for each in classes if dataclasses.is_dataclass(each)]
        if inner and isinstance(values.get(name), dict):
            values[name] = from_description(inner[0], values[name], where)
        elif isinstance(values.get(name), list) and _takes_tuples(hint):
            values[name] = _tuples(values[name])
        elif inner and name in values and not isinstance(values[name], classes):
            raise ValueError(
                f"{where}: {cls.__name__}.{name}={values[name]!r:.80} is no "
                f"{inner[0].__name__}; correct the file"
            )
    required = {
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING is field.default_factory
    }
    for fault, names in (
        ("has no", values.keys() - fields.keys()),
        ("needs", required - values.keys()),
    ):
        if names:
            raise ValueError(
                f"{where}: {cls.__name__} {fault} {', '.join(sorted(names))}; it was written "
                "by another version of switchx: read it with that one, or correct the file"
            )
    for name, hint in _hints(cls).items():
        # Values of other types are written by name or as lists: the class checks them.
        is_plain = {*_alternatives(hint)} <= {int, float, str, bool, type(None)}
        if is_plain and name in values and not fits(values[name], hint):
            raise ValueError(
                f"{where}: {cls.__name__}.{name}={values[name]!r:.80} is of type "
                f"{type(values[name]).__name__}, not what is written there; correct the file"
            )
    return cls(**values)


def _takes_tuples(hint) -> bool:
    return tuple in {typing.get_origin(each) or each for each in _alternatives(hint)}


def _tuples(value):
    """A value as it was before it became JSON, which has only lists."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def fits(value, hint) -> bool:
    """Whether a value fits a type annotation.

    An int fits float, but a bool is no number; lists and tuples are interchangeable, and their
    items are checked if all have one type; a protocol accepts anything.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or getattr(hint, "_is_protocol", False):
        return True
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, argument) for argument in arguments)
    if origin is Literal:
        return value in arguments
    if hint in (int, float):
        numbers = (int, float) if hint is float else int
        return isinstance(value, numbers) and not isinstance(value, bool)
    if origin in (tuple, list) or getattr(origin, "__module__", "") == "collections.abc":
        if isinstance(value, list | tuple) and len({*arguments} - {...}) == 1:
            return all(fits(item, arguments[0]) for item in value)
        return isinstance(value, list | tuple | dict) or callable(value)
    return not isinstance(origin or hint, type) or isinstance(value, origin or hint)


def _import_named(name: str, expected: type, where: str) -> type:
    """The class with a dotted name, such as `my_package.tasks.MyObjective`."""
    module, _, last = name.rpartition(".")
    try:
        found = getattr(import_for_folder(module), last)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{where} names {name}, which cannot be imported ({error}); if you trust that "
            "code, run the command with --trust_code in the folder that has it, or put that "
            "folder on PYTHONPATH"
        ) from error
    if not (isinstance(found, type) and issubclass(found, expected)):
        raise ValueError(f"{where} names {name}, which is no {expected.__name__}")
    return found


def differences(
    saved, current, on: Literal["resume", "evaluation"], name: str = ""
) -> Iterator[str]:
    """Fields in which a saved description and a configuration differ, each with both values.

    A field that the saved description does not yet have is taken to have had its default.

    Args:
        saved: description that `describe` returned, read from JSON.
        current: a configuration, or a value in it.
        on: occasion; fields that may change on that occasion are left out.
        name: dotted name of the value.
    """
    if dataclasses.is_dataclass(current) and isinstance(saved, dict):
        yield from _differences_of_fields(saved, current, on, name)
    elif isinstance(current, list | tuple) and isinstance(saved, list):
        if len(saved) != len(current):
            yield f"{name}: {len(saved)} there, {len(current)} here"
            return
        for i, (old, new) in enumerate(zip(saved, current, strict=True)):
            yield from differences(old, new, on, f"{name}.{i}")
    elif saved != (new := describe(current, name)):
        yield f"{name}: {saved!r} there, {new!r} here"


def _differences_of_fields(saved: dict, current, on, name: str) -> Iterator[str]:
    kind = _type_name(type(current))
    if saved.get("type", kind) != kind:
        yield f"{name or 'the kind of folder'}: {saved['type']} there, {kind} here"
        return
    fields = {field.name: field for field in dataclasses.fields(current)}
    for field in fields.values():
        path = f"{name}.{field.name}".lstrip(".")
        here = getattr(current, field.name)
        if field.metadata.get("may change on") in ("resume", on):
            continue
        default = None if field.default is dataclasses.MISSING else field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if field.name in saved:
            yield from differences(saved[field.name], here, on, path)
        elif here != default:
            yield f"{path}: {default!r} there, {here!r} here"
    for unknown in sorted(saved.keys() - fields.keys() - {"type"}):
        yield f"{name}.{unknown}: {saved[unknown]!r} there, unknown here".lstrip(".")


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _alternatives(hint) -> tuple:
    """`(A, B)` for `A | B`."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)
