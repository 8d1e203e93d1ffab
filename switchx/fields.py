# SPDX-License-Identifier: Apache-2.0
"""Refusing a description that cannot be, in a sentence."""


def require(condition: bool, message: str) -> None:
    """Raises ValueError with `message` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def require_choice(name: str, value, choices) -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    require(
        value in choices,
        f"{name}={value!r} is unknown; use one of {', '.join(map(str, choices))}",
    )
