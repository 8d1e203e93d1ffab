# SPDX-License-Identifier: Apache-2.0
"""Pages and pictures of all experiments, made anew of their results.json.

make experiments
"""

import json
import pathlib
from collections.abc import Iterable
from typing import Any

from matplotlib.figure import Figure

from experiments.study import ROOT
from switchx.analysis.plots import curves_figure, intervals_figure, write_svg

HERE = ROOT / "experiments"
BEGIN, END = "<!-- made of results.json -->", "<!-- end -->"
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


def publish_page(folder: pathlib.Path) -> None:
    """Figure and page of a folder, of its results.json alone."""
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    figure = figure_of(results)
    if figure is not None:
        write_svg(figure, folder / "figure.svg")
    write_page(folder, page(results))


def figure_of(results: dict[str, Any]) -> Figure | None:
    """Curves by step, or differences with their intervals; none where there are neither."""
    if "curves" in results:
        curves = {
            name: [{int(step): value for step, value in curve.items()} for curve in seeds]
            for name, seeds in results["curves"].items()
        }
        return curves_figure(curves, "step", "validation negative log perplexity")
    if "intervals" in results:
        return intervals_figure(results["intervals"], results["effect_of"])
    return None


def page(results: dict[str, Any]) -> str:
    """What was found, tables, figure, and where it comes from."""
    parts = [f"**Found: {results['verdict']}.** {results['because']}"]
    for each in results["tables"]:
        parts.append("\n\n".join([each["title"]] * bool(each["title"]) + [table(each["rows"])]))
    if figure_of(results) is not None:
        parts.append("![what was found](figure.svg)")
    parts.append(f"{len(results['seeds'])} seeds. {provenance(results)}")
    return "\n\n".join(parts)


def write_page(folder: pathlib.Path, page: str) -> None:
    """Puts a page between the marks of the folder's README.md."""
    readme = folder / "README.md"
    before, rest = readme.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    readme.write_text(f"{before}{BEGIN}\n\n{page.strip()}\n\n{END}{after}", encoding="utf-8")


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Rows of the same columns as a table of Markdown; floats by four digits."""
    rows = list(rows)
    lines = [list(rows[0]), ["---"] * len(rows[0])]
    lines += [[shown(value) for value in row.values()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def shown(value: Any) -> str:
    """A value of results.json on a page."""
    if isinstance(value, dict):  # an Interval
        return f"{value['mean']:+.3f} ({value['low']:+.3f} to {value['high']:+.3f})"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return "" if value is None else str(value)


def provenance(results: dict[str, Any]) -> str:
    """A line that says where and when results come from."""
    where, hours = results["environment"], results["wall_seconds"] / 3600
    return (
        f"Run on {results['date']}, {where['device']}, {where['cores']} cores, JAX "
        f"{where['jax']}, commit {where['commit'][:12]}; {hours:.1f} hours in all."
    )


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
