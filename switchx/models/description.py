# SPDX-License-Identifier: Apache-2.0
"""A model's configuration as files hold it: nested dictionaries of JSON, and back."""

import dataclasses
from typing import Any

from switchx.models.config import ModelConfig, Precision, RouterConfig, SwitchConfig

# Fields of a model's configuration that are descriptions of their own.
_NESTED = {"switch": SwitchConfig, "precision": Precision, "router": RouterConfig}


def model_from_description(description: dict[str, Any], where: str) -> ModelConfig:
    """The configuration that `dataclasses.asdict` gave this description.

    Args:
        description: `type`, a class's name, may stand in it and in what it holds.
        where: the file that it was read from, for messages.

    Raises:
        ValueError: fields are missing or unknown, or their values are refused.
    """
    return _from_description(ModelConfig, description, where)


def _from_description(cls: type, description: dict[str, Any], where: str):
    values = {name: value for name, value in description.items() if name != "type"}
    for name, value in values.items():
        if name in _NESTED and isinstance(value, dict):
            values[name] = _from_description(_NESTED[name], value, where)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    required = {name for name, f in fields.items() if f.default is dataclasses.MISSING}
    for fault, names in (
        ("has no", values.keys() - fields.keys()),
        ("needs", required - values.keys()),
    ):
        if names:
            raise ValueError(
                f"{where}: {cls.__name__} {fault} {', '.join(sorted(names))}; it was written "
                "by another version of switchx: read it with that one, or correct the file"
            )
    return cls(**values)
