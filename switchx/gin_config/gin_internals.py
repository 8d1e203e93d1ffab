# SPDX-License-Identifier: Apache-2.0
"""All of gin's private names that switchx uses, so that only this file depends on its version.

Gin has no public way to restore its state, to replace the places and readers of its files, or
to list what is bound. The names are those of gin-config 0.5.0, the only version with
`dynamic_registration`, and of its repository since then; any other is refused at import.
"""

import contextlib
import copy
import importlib.metadata
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gin
from gin.selector_map import SelectorMap

_MACRO = "gin.macro"
# Tables that `restored` restores.
_TABLES = {
    "_CONFIG": dict,
    "_SINGLETONS": dict,
    "_IMPORTS": set,
    "_OPERATIVE_CONFIG": dict,
    "_INVERSE_REGISTRY": dict,
    "_LOCATION_PREFIXES": list,
    "_FILE_READERS": list,
}
NAMES = _TABLES | {"_REGISTRY": SelectorMap, "_set_config_is_locked": types.FunctionType}
if hasattr(gin.config, "_CONFIG_PROVENANCE"):  # of the repository, after 0.5.0
    NAMES["_CONFIG_PROVENANCE"] = _TABLES["_CONFIG_PROVENANCE"] = dict


def require_names() -> None:
    """Checks that gin has each of `NAMES` with the type that it has there.

    Raises:
        ImportError: gin lacks some; the message has the version, the names and the remedy.
    """
    found = {name: getattr(gin.config, name, None) for name in NAMES}
    wrong = [
        f"{name} is a {type(found[name]).__name__}, expected a {kind.__name__}"
        for name, kind in NAMES.items()
        if not isinstance(found[name], kind)
    ]
    if wrong:
        raise ImportError(
            f"gin-config {importlib.metadata.version('gin-config')} has other internals than "
            f"0.5.0: {'; '.join(wrong)}; run `pip install gin-config==0.5.0`"
        )


require_names()


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Restores gin's configuration, registry and readers of files at the end."""
    held = {name: getattr(gin.config, name) for name in _TABLES}
    copies = {name: copy.copy(table) for name, table in held.items()}
    known, is_locked = registered().keys(), gin.config_is_locked()
    try:
        yield
    finally:
        # In place: gin's functions hold these very containers.
        for name, table in held.items():
            table.clear()
            (table.extend if isinstance(table, list) else table.update)(copies[name])
        for selector in registered().keys() - known:
            gin.config._REGISTRY.pop(selector)
        gin.config._set_config_is_locked(is_locked)


def read_files(places: list[str], open_: Callable, is_file: Callable[[str], bool]) -> None:
    """Lets gin look up files only in these places, and read them only by `open_`.

    Gin can only append to both. Its reader of files inside Python packages is removed: it takes
    the `runs/` of `runs/x.gin` for a package, and any folder of that name for one.
    """
    gin.config._LOCATION_PREFIXES[:] = places
    gin.config._FILE_READERS[:] = [(open_, is_file)]


def bindings() -> Mapping[tuple[str, str], Mapping[str, Any]]:
    """(scope, selector) -> parameter -> value, of all that is bound, including macros."""
    return gin.config._CONFIG


def macros() -> dict[str, Any]:
    """The value of each macro, by name."""
    return {
        scope: bound.get("value")
        for (scope, selector), bound in bindings().items()
        if selector == _MACRO
    }


def read_macros() -> set[str]:
    """Names of the macros that something has read since the configuration was cleared."""
    return {scope for scope, selector in gin.config._OPERATIVE_CONFIG if selector == _MACRO}


def reading_scopes(selector: str, parameter: str) -> set[str]:
    """Scopes in which a parameter has been read since then; the outermost one is empty."""
    read = gin.config._OPERATIVE_CONFIG.items()
    return {scope for (scope, each), names in read if each == selector and parameter in names}


def key_of(name: str):
    """The scope, the selectors and the parameter of `scope/module.Class.parameter`.

    Raises:
        ValueError: nothing of this name is registered.
    """
    return gin.config.ParsedBindingKey.parse(name)


def registered() -> dict[str, Callable]:
    """The classes and functions that gin may configure, by selector."""
    return {selector: each.wrapped for selector, each in gin.config._REGISTRY.items()}
