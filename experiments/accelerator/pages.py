# SPDX-License-Identifier: Apache-2.0
"""Keeps what `switchx check accelerator` brought back from a card, and makes the page of it.

    python -m experiments.accelerator.pages --keep=DIR

writes the folder's rows to results/CARD_DATE.json, beside those of other days, and the page
anew; without --keep the page alone.
"""

import argparse
import json
import pathlib
import sys
from typing import Any

from experiments.pages import table, write_page
from switchx.bench.accelerator.cards import REHEARSAL
from switchx.bench.accelerator.checks import BOUNDS, values_of
from switchx.bench.accelerator.kernels import PACKAGES
from switchx.bench.accelerator.parts import PARTS
from switchx.bench.accelerator.records import read_lines
from switchx.results import Check
from switchx.whole_folders import git_commit

HERE = pathlib.Path(__file__).parent
TEST = "test"


def keep(folder: pathlib.Path) -> pathlib.Path:
    """Writes what a call measured; the file.

    Raises:
        ValueError: it is no folder of the command, a rehearsal, or a day that is kept already.
    """
    head, lines = read_lines(folder, "--keep")
    card, date = head["card"], head["date"]
    if card == REHEARSAL:
        raise ValueError(f"--keep={folder} is a rehearsal: no card measured anything in it")
    path = HERE / "results" / f"{card.lower().replace(' ', '_')}_{date}.json"
    if path.exists():
        raise ValueError(
            f"{path} is there; a day's calls go on from each other by --after. If the code "
            "changed between two of them, rename that file to _1.json"
        )
    rows = [line for line in lines if "case" in line]
    took = {line["part"]: line["status"] for line in lines if "status" in line}
    found = head | {"commit": git_commit(), "parts": took, "rows": rows}
    path.write_text(f"{json.dumps(found, indent=1)}\n", encoding="utf-8")
    return path


def results() -> list[dict[str, Any]]:
    """Of all cards and days, the newest first."""
    files = sorted((HERE / "results").glob("*.json"), reverse=True)
    found = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return sorted(found, key=lambda each: (each["date"], each["card"]), reverse=True)


def page() -> str:
    """A section for each card and day."""
    return "\n\n".join(map(section, results())) or "Not run."


def section(found: dict[str, Any]) -> str:
    """What was checked, then each part's rows, predictions beside."""
    rows = found["rows"]
    versions = {row["case"]: row["measured"] for row in rows if row["case"] in PACKAGES}
    where = ", ".join(
        f"{name} {version}" for name, version in versions.items() if version != "missing"
    )
    texts = [f"## {found['card']}, {found['date']}"]
    texts.append(f"Driver {found['driver']}; {where}; commit {found['commit'][:12]}.")
    texts += [found["about"]] if "about" in found else []
    if values := values_of(rows):
        checks = [Check(name, value, BOUNDS[name]) for name, value in values.items()]
        texts.append(
            table(
                {"check": c.name, "value": c.value, "bound": c.bound, "": c.verdict}
                for c in checks
            )
        )
    for part in PARTS:
        of_part = [row for row in rows if row["part"] == part.name]
        shown = [_shown(row) for row in of_part if row["case"] not in PACKAGES]
        shown = [row for row in shown if row is not None]
        if not of_part:
            continue
        status = found["parts"].get(part.name, "not run")
        texts.append(f"**{part.name}** decides: {part.decides} ({status}).{_tests(of_part)}")
        texts += [table(shown)] if shown else []
    return "\n\n".join(texts)


def _shown(row: dict[str, Any]) -> dict[str, Any] | None:
    """A row of the page; None for a test that passed."""
    measured, predicted = row["measured"], row["predicted"]
    if row["unit"] == TEST and measured == "passed":
        return None
    is_number = isinstance(measured, int | float)
    return {
        "case": row["case"],
        "predicted": predicted,
        "measured": row.get("why", "") if measured is None else measured,
        "over the prediction": measured / predicted if predicted and is_number else None,
        "unit": row["unit"],
    }


def _tests(rows: list[dict[str, Any]]) -> str:
    outcomes = [row["measured"] for row in rows if row["unit"] == TEST]
    counted = {each: outcomes.count(each) for each in dict.fromkeys(outcomes)}
    text = ", ".join(f"{number} {outcome}" for outcome, number in counted.items())
    return f" Tests: {text}." if text else ""


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keep", metavar="DIR", type=pathlib.Path)
    arguments = parser.parse_args(words)
    try:
        if arguments.keep is not None:
            print(f"written to {keep(arguments.keep)}")
        write_page(HERE / "README.md", page())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
