# SPDX-License-Identifier: Apache-2.0
"""What is measured, kept cell by cell as it comes, and the results of all scripts."""

import json
import pathlib
from typing import Any

from switchx.bench.report import environment

HERE = pathlib.Path(__file__).parent
RESULTS = HERE / "results.json"


class FinishedCells:
    """JSON lines of `{"cell": settings, "value": found}`: what an interrupted script has done.

    Settings say all that a value depends on, the model's fingerprint too, so that other
    settings are other cells.
    """

    def __init__(self, file: pathlib.Path):
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._values = file, {}
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # the script ended in the middle of a line
            file.write_text(whole, encoding="utf-8")
        for line in map(json.loads, whole.splitlines()):
            self._values[_key(line["cell"])] = line["value"]

    def get(self, cell: dict[str, Any]):
        """What was found, or None."""
        return self._values.get(_key(cell))

    def add(self, cell: dict[str, Any], value) -> None:
        self._values[_key(cell)] = value
        with self._file.open("a", encoding="utf-8") as lines:
            line = json.dumps({"cell": cell, "value": value}, ensure_ascii=False)
            lines.write(f"{line}\n")


def read_results(file: pathlib.Path) -> dict[str, Any]:
    """Sections by name, none where there is no file yet."""
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def write_section(file: pathlib.Path, name: str, section: dict[str, Any]) -> None:
    """Puts a script's results in the place of its earlier ones, with where it was run."""
    results = read_results(file) | {name: {"environment": environment()} | section}
    file.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")


def _key(cell: dict[str, Any]) -> str:
    return json.dumps(cell, sort_keys=True)
