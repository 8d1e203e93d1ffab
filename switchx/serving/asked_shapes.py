# SPDX-License-Identifier: Apache-2.0
"""Shapes a server was asked for, which the next server of the model compiles first."""

import dataclasses
import json
import logging
import pathlib
from collections import Counter
from collections.abc import Iterable
from typing import Any

from switchx.data.data_dir import cache_dir
from switchx.files import write_atomically
from switchx.inference.config import DecodingConfig
from switchx.serving.limits import Limits
from switchx.serving.request_queue import ProgramShape

LOG = logging.getLogger(__name__)
MOST_SHAPES = 4  # 64 programs are kept, and a shape has a dozen
_FLAGS = ("is_sampling", "has_processors", "is_recorded")


def history_of(fingerprint: str) -> pathlib.Path:
    """The file for a model, in the user's own cache."""
    return cache_dir() / "served" / f"{fingerprint[:32]}.json"


def read_shapes(path: pathlib.Path, limits: Limits) -> list[ProgramShape]:
    """Shapes that a server was asked for and that these limits allow, the most wanted first.

    There are none if the file is missing or not ours: it only saves time.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        shapes = [ProgramShape(**_checked(dict(each))) for each in found]
        return [shape for shape in shapes if _is_allowed(shape, limits)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, IndexError, RecursionError) as error:
        LOG.warning("%s is not read, and says what is compiled first: %s", path, error)
        return []


def write_shapes(path: pathlib.Path, asked: Counter[ProgramShape]) -> None:
    """Writes the shapes that were asked for most, if any was."""
    shapes = [dataclasses.asdict(shape) for shape, _ in asked.most_common(MOST_SHAPES)]
    if not shapes:
        return
    try:
        write_atomically(path, json.dumps(shapes).encode())
    except OSError as error:
        LOG.warning("what was asked for is not kept for the next start: %s", error)


def keep_asked(asked: Iterable[tuple[str, Counter[ProgramShape]]]) -> None:
    """Writes what each model was asked for, by fingerprint; one may have several names."""
    by_model: dict[str, Counter[ProgramShape]] = {}
    for fingerprint, shapes in asked:
        by_model.setdefault(fingerprint, Counter()).update(shapes)
    for fingerprint, shapes in by_model.items():
        write_shapes(history_of(fingerprint), shapes)


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    """Fields of a shape; a value of a wrong type would end the worker that compiles it.

    Raises:
        TypeError: a value is of another type.
    """
    kinds = {"num_kept": (int, type(None)), **dict.fromkeys(_FLAGS, (bool,))}
    for name, value in values.items():
        if type(value) not in kinds.get(name, (int,)):
            raise TypeError(f"{name} is {value!r:.60}")
    return values


def _is_allowed(shape: ProgramShape, limits: Limits) -> bool:
    settings = DecodingConfig(**shape.settings)
    longest = limits.prompt_length(limits.max_input_tokens)
    return (
        shape.prompt_length == limits.prompt_length(shape.prompt_length) <= longest
        and shape.answer_length == limits.answer_length(shape.answer_length)
        and shape.beam_size <= limits.max_beam_size
        and limits.refusal(settings) is None
    )
