# SPDX-License-Identifier: Apache-2.0
"""Pages and pictures of all experiments, made anew of their results.json.

make experiments
"""

import json
import pathlib
from typing import Any

from experiments.comparison import publish_page
from experiments.study import ROOT, shown, table, write_page

HERE = ROOT / "experiments"
NOT_RUN = "Not run."
# Folders with a form of their own: notebooks, the papers' tables, translation.
OWN_PAGES = ("elephants", "first_steps", "planner_vs_papers", "routing_statistics")


def folders() -> list[pathlib.Path]:
    """Of all experiments, by name."""
    return sorted(path.parent for path in HERE.glob("*/README.md"))


def read_results(folder: pathlib.Path) -> dict[str, Any] | None:
    """results.json, None of an experiment that has not been run in full."""
    file = folder / "results.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def overview() -> str:
    """One table of all: question, verdict, effect, hours."""
    rows = []
    for folder in folders():
        question = (
            (folder / "README.md").read_text(encoding="utf-8").splitlines()[0].strip("# ")
        )
        row = {"experiment": f"[{folder.name}]({folder.name}/README.md)", "question": question}
        results = None if folder.name in OWN_PAGES else read_results(folder)
        if results is None:
            verdict = (
                "its page says" if folder.name in OWN_PAGES else NOT_RUN.lower().strip(".")
            )
            rows.append(row | {"verdict": verdict, "effect, 95%": None, "hours": None})
            continue
        effect = f"{shown(results['effect'])}, {results['effect_of']}"
        hours = round(results["wall_seconds"] / 3600, 1)
        rows.append(
            row | {"verdict": results["verdict"], "effect, 95%": effect, "hours": hours}
        )
    total = sum(row["hours"] or 0.0 for row in rows)
    return f"{table(rows)}\n\nTime of those that were run: {total:.1f} hours on two cores."


def main() -> None:
    for folder in folders():
        if folder.name in OWN_PAGES:
            continue
        if read_results(folder) is None:
            write_page(folder, NOT_RUN)
        else:
            publish_page(folder)
    write_page(HERE, overview())


if __name__ == "__main__":
    main()
