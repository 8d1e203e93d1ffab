# SPDX-License-Identifier: Apache-2.0
"""Measurements of an experiment: cells, each saved as it is done, and their intervals."""

import dataclasses
import datetime
import functools
import importlib.metadata
import json
import math
import os
import pathlib
import shutil
import subprocess
import time
from collections.abc import Callable
from typing import Any

# Experiments import everything that they measure with from here.
from switchx.analysis.comparison import Interval, interval_of  # noqa: F401

CPU = "cpu"


@dataclasses.dataclass(frozen=True)
class Ratio(Interval):
    """An interval of quotients."""

    no_effect: float = 1.0


def finals_of(results: dict[str, Any]) -> dict[str, list[float]]:
    """Quality after the last step, never the best one, by contender, one value per seed; NaN
    for a run that diverged, where JSON has null."""
    found = {
        name: [seed[max(seed, key=int)] for seed in seeds]
        for name, seeds in results["curves"].items()
    }
    return {name: [math.nan if v is None else v for v in each] for name, each in found.items()}


def finite_of(results: dict[str, Any]) -> dict[str, list[float]]:
    """`finals_of` for the contenders none of whose runs diverged."""
    finals = finals_of(results).items()
    return {name: each for name, each in finals if all(map(math.isfinite, each))}


class Cells:
    """JSON lines of what has been done: `{"cell": settings, "value": found, "seconds": s,
    "began": time, "device": name, "jax": version}`.

    Settings state everything that a value depends on: other settings are other cells.
    """

    def __init__(self, file: pathlib.Path):
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # it was killed in the middle of a line
            file.write_text(whole, encoding="utf-8")
        self._lines = {
            key_of(line["cell"]): line for line in map(json.loads, whole.splitlines())
        }

    def get(self, cell: dict[str, Any], measure: Callable[[], Any]) -> Any:
        """The value of a cell, which is measured the first time that it is asked for."""
        if key_of(cell) not in self._lines:
            began = datetime.datetime.now(datetime.UTC).isoformat()
            begin = time.perf_counter()
            value = measure()
            line = {"cell": cell, "value": value, "seconds": time.perf_counter() - begin}
            line |= {
                "began": began,
                "device": device(),
                "jax": importlib.metadata.version("jax"),
            }
            # A run that was killed and resumed has lasted longer than this call.
            if isinstance(value, dict) and "seconds" in value:
                line["seconds"] = value["seconds"]
            with self._file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(line, ensure_ascii=False) + "\n")
            self._lines[key_of(cell)] = line
        return self._lines[key_of(cell)]["value"]

    @property
    def lines(self) -> list[dict[str, Any]]:
        """All cells that have been done, oldest first."""
        return list(self._lines.values())

    @property
    def began(self) -> str | None:
        """When the first cell began; None where no cell says it."""
        return min((line["began"] for line in self.lines if "began" in line), default=None)

    def require_one_machine(self) -> None:
        """
        Raises:
            ValueError: cells are from two cards, a card and a CPU, or two versions of JAX,
                whose numbers cannot be compared.
        """
        with_device = [line for line in self.lines if "device" in line]
        kinds = sorted({f"{e['device']} (JAX {e.get('jax', 'unknown')})" for e in with_device})
        if len(kinds) > 1:
            raise ValueError(
                f"{self._file} has cells of {' and '.join(kinds)}, which do not compare; "
                "take out the lines of one of them and run the same command on the other"
            )

    @property
    def seconds(self) -> float:
        """Seconds of all cells, whenever they were measured."""
        return sum(line["seconds"] for line in self.lines)


@functools.cache
def device() -> str:
    """The first card of this machine, as NVIDIA names it, else CPU; JAX is not asked, as it
    would take the card's memory."""
    if os.environ.get("JAX_PLATFORMS") == "cpu" or not shutil.which("nvidia-smi"):
        return CPU
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    names = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    return names[0] if names else CPU


def key_of(cell: dict[str, Any]) -> str:
    """The same text for the same settings, whatever their order."""
    return json.dumps(cell, sort_keys=True)
