# SPDX-License-Identifier: Apache-2.0
"""results.json, a section a script: `quality`, `throughput`, `cost`."""

import json
import pathlib
from typing import Any

from switchx.results import environment

RESULTS = pathlib.Path(__file__).parent / "results.json"


def read_results(file: pathlib.Path) -> dict[str, Any]:
    """Sections by name, none where there is no file yet."""
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def write_section(file: pathlib.Path, name: str, section: dict[str, Any]) -> None:
    """Puts a script's results in the place of its earlier ones, with where it was run."""
    results = read_results(file) | {name: {"environment": environment()} | section}
    file.write_text(json.dumps(results, indent=1) + "\n")
