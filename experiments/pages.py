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
PICTURE = "effects.svg"
# Of a full run on two quiet cores: cells, by steps, by the 0.45 s (dense) to 0.9 s (64 experts)
# of a step of 8,192 tokens; 70 s a run of fine-tuning.
EXPECTED_HOURS = {
    "capacity_factor": 1.6, "distillation": 1.4, "elastic_tasks": 0.1, "elephants": 2.0,
    "expert_dropout": 0.7, "expert_offload": 0.2, "exploration": 0.8, "fewer_experts": 0.5,
    "fine_tuning": 1.6, "initialization": 0.6, "magic_numbers": 0.2, "multilingual": 0.9,
    "no_token_left_behind": 0.8,
    "pipeline_convergence": 0.8, "planner_vs_papers": 0.1, "pretraining": 0.8,
    "quantization": 0.1, "routers": 1.4, "routing_statistics": 0.2, "selective_precision": 1.0,
    "switch_attention": 1.1, "switch_vs_dense": 1.5, "upcycling": 0.5,
}  # fmt: skip
# Folders with a form of their own: notebooks, the papers' tables, translation.
OWN_PAGES = ("elephants", "first_steps", "planner_vs_papers")


def folders() -> list[pathlib.Path]:
    """Of all experiments, by name."""
    return sorted(path.parent for path in HERE.glob("*/README.md"))


def read_results(folder: pathlib.Path) -> dict[str, Any] | None:
    """results.json, None of an experiment that has not been run in full."""
    file = folder / "results.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def summary_of(folder: pathlib.Path) -> dict[str, Any] | None:
    """`verdict`, `because`, `effect`, `effect_of` and `wall_seconds`; None where nothing is
    claimed or nothing was run."""
    results = read_results(folder)
    return results and results.get("summary", results)


def overview() -> str:
    """One table of all: question, verdict, effect, hours; their sum; the picture."""
    rows, spent, expected = [], 0.0, 0.0
    for folder in folders():
        question = (
            (folder / "README.md").read_text(encoding="utf-8").splitlines()[0].strip("# ")
        )
        row = {"experiment": f"[{folder.name}]({folder.name}/README.md)", "question": question}
        found = summary_of(folder)
        if found is not None:
            hours = found["wall_seconds"] / 3600
            effect = f"{shown(found['effect'])}, {found['effect_of']}"
            row |= {"verdict": found["verdict"], "effect, 95%": effect, "hours": f"{hours:.1f}"}
            spent += hours
        elif folder.name in EXPECTED_HOURS:
            expected += EXPECTED_HOURS[folder.name]
            of_row = f"{EXPECTED_HOURS[folder.name]:.1f} expected"
            row |= {"verdict": "not run", "effect, 95%": None, "hours": of_row}
        else:
            row |= {"verdict": "a notebook: no claim", "effect, 95%": None, "hours": None}
        rows.append(row)
    text = (
        f"{table(rows)}\n\nTime on two cores: {spent:.1f} hours of those that were run, most "
        f"of them beside other work, and {expected:.1f} expected of the others; on quiet cores "
        f"all are planned to take {sum(EXPECTED_HOURS.values()):.1f}."
    )
    return f"{text}\n\n![effects in nats]({PICTURE})" if effects_in_nats() else text


def effects_in_nats() -> dict[str, dict[str, float]]:
    """Effects with their intervals of all that were run and are measured in nats a token."""
    found = {folder.name.replace("_", " "): summary_of(folder) for folder in folders()}
    return {
        f"{name}: {each['effect_of'].partition(', nats')[0]}": each["effect"]
        for name, each in found.items()
        if each is not None and ", nats a token" in each["effect_of"]
    }


def publish_page(folder: pathlib.Path) -> None:
    """Figure and page of a folder, of its results.json alone, and the table of all."""
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    figure = figure_of(results)
    if figure is not None:
        write_svg(figure, folder / "figure.svg")
    write_page(folder, page(results))
    publish_overview()


def publish_overview() -> None:
    """The table of all and its picture."""
    if effects := effects_in_nats():
        write_svg(intervals_figure(effects, "nats a token"), HERE / PICTURE)
    write_page(HERE, overview())


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
    seeds = len(results["seeds"])
    parts.append(f"{seeds} seed{'s' * (seeds != 1)}. {provenance(results)}")
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
    publish_overview()


if __name__ == "__main__":
    main()
