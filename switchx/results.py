# SPDX-License-Identifier: Apache-2.0
"""What every bench and check prints: a table for people, one JSON object for programs."""

import dataclasses
import itertools
import operator
import os
import pathlib
import re
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from switchx import malloc
from switchx.fields import json_text
from switchx.whole_folders import git_commit

_COMPARISONS = {">=": operator.ge, "<=": operator.le, "==": operator.eq}


@dataclasses.dataclass(frozen=True)
class Check:
    """A number and the bound that it has to meet.

    Attributes:
        bound: a comparison and a number, such as `>=0.90`.
        is_judged: False where the value is meaningless, as in a rehearsal.
    """

    name: str
    value: float
    bound: str
    is_judged: bool = True

    def __post_init__(self):
        if self.bound[:2] not in _COMPARISONS:
            raise ValueError(f"bound={self.bound!r}; use >=, <= or == and a number")

    @property
    def holds(self) -> bool | None:
        """Whether the value meets the bound; None where it is not judged."""
        if not self.is_judged:
            return None
        return _COMPARISONS[self.bound[:2]](self.value, float(self.bound[2:]))

    @property
    def verdict(self) -> str:
        return {True: "holds", False: "does not hold", None: "not judged"}[self.holds]

    def as_dict(self) -> dict[str, Any]:
        """The fields that the JSON output contains."""
        return {n: getattr(self, n) for n in ("name", "value", "bound", "holds")}


@dataclasses.dataclass(frozen=True)
class Report:
    """Measured rows and checks of one command.

    Attributes:
        results: rows; units are part of the keys.
    """

    command: str
    results: list[dict[str, Any]]
    checks: list[Check]

    def as_json(self) -> str:
        checks = [check.as_dict() for check in self.checks]
        head = {"command": self.command, "environment": environment()}
        return json_text(head | {"results": self.results, "checks": checks})

    def print(self, as_json: bool) -> int:
        """Prints a table for each first column, or the JSON object as the last line.

        Returns:
            The command's exit status: 1 where a check does not hold.
        """
        status = int(any(check.holds is False for check in self.checks))
        if as_json:
            print(self.as_json())
            return status
        console = Console(markup=False, highlight=False)
        title = f"switchx {self.command}"
        for _, rows in itertools.groupby(self.results, key=lambda row: next(iter(row))):
            rows = list(rows)
            columns = list(dict.fromkeys(name for row in rows for name in row))
            table = Table(title=title, title_justify="left", box=None)
            for column in columns:
                table.add_column(column, justify="left" if column == columns[0] else "right")
            for row in rows:
                table.add_row(*(_shown(row.get(column)) for column in columns))
            console.print(table)
            title = None
        for check in self.checks:
            console.print(f"{check.name} {check.value:.3f} {check.bound}: {check.verdict}")
        return status


def environment() -> dict[str, Any]:
    """Device, processor, cores, JAX version and commit of a measurement, and the variables that
    set malloc, which affects the measurement."""
    return {
        "device": jax.devices()[0].device_kind,
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "jax": jax.__version__,
        "commit": git_commit(),
        **{name.lower(): os.environ.get(name) for name in ("GLIBC_TUNABLES", malloc.VARIABLE)},
    }


def _processor() -> str | None:
    """The name that Linux gives the host's processor; None where it gives none."""
    file = pathlib.Path("/proc/cpuinfo")
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    names = re.findall(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return names[0] if names else None


def _shown(value) -> str:
    if not isinstance(value, int | float):
        return "" if value is None else str(value)
    is_small = isinstance(value, float) and abs(value) < 100
    return f"{value:,.3g}" if is_small else f"{value:,.0f}"
