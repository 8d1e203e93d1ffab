# SPDX-License-Identifier: Apache-2.0
"""Verdicts, pages and pictures of all experiments, made anew of what results.json measured.

make experiments
"""

import dataclasses
import datetime
import json
import math
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
from matplotlib.figure import Figure

from experiments import figures, rules
from experiments.measured import Interval
from experiments.statistics import intervals
from switchx.analysis.plots import write_svg
from switchx.fields import json_text
from switchx.files import write_atomically

ROOT = pathlib.Path(__file__).resolve().parent.parent
HERE = ROOT / "experiments"
BEGIN, END = "<!-- made of results.json -->", "<!-- end -->"
NOT_RUN = "Not run."
# The picture at the top of README.md, and whose results it shows.
PICTURE = "law.svg"
LADDER = "switch_vs_dense"
OF_LADDER = "<!-- made of switch_vs_dense -->"
# Folders that claim nothing.
NO_CLAIM = {
    "accelerator": "measurements of cards: no claim",
    "first_steps": "notebooks: no claim",
}
INTERVAL = "95% interval, unless it says another or a range"


def folders() -> list[pathlib.Path]:
    """Of all experiments, by name."""
    return sorted(path.parent for path in HERE.glob("*/README.md"))


def read_results(folder: pathlib.Path) -> dict[str, Any] | None:
    """results.json, None of an experiment that has not been run in full."""
    file = folder / "results.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def write_results(
    folder: pathlib.Path,
    measured: dict[str, Any],
    judge: Callable[[dict[str, Any]], dict[str, Any]],
) -> dict[str, Any]:
    """Writes what was measured and what a run.py's `judge` makes of it (`Study.publish`).

    Returns:
        It, as `read_results` reads it.
    """
    results = _judged(measured, judge)
    text = json.dumps(results, indent=1)
    write_atomically(folder / "results.json", f"{text}\n".encode())
    return results


def _judged(measured: dict[str, Any], judge: Callable) -> dict[str, Any]:
    measured = as_written(measured)
    results = rules.standing(as_written(measured | judge(measured)))
    if results["verdict"] not in rules.WORDS:
        raise ValueError(f"verdict={results['verdict']!r}; use one of {', '.join(rules.WORDS)}")
    return results


def as_written(found: Any) -> Any:
    """What JSON makes of it; Intervals become their fields, wherever they are, and NaN None."""
    return json.loads(json_text(json.loads(json.dumps(found, default=dataclasses.asdict))))


def judge_anew(folder: pathlib.Path) -> None:
    """By run.py as it stands now; what that changes is dated. Results of another rule than
    run.py has keep what was judged of them."""
    results, constants = read_results(folder), rules.constants_of(folder.name)
    is_its_rule = rules.digest(constants) == results.get("rule")
    judge = constants["judge"] if is_its_rule else dict
    if not agree(_judged(results, judge), results):
        today = {"judged": datetime.date.today().isoformat()}
        write_results(folder, results | today, judge)


def agree(a: Any, b: Any) -> bool:
    """Whether results are alike but for what another CPU rounds otherwise."""
    leaves, structures = zip(*map(jax.tree.flatten, (a, b)), strict=True)
    return structures[0] == structures[1] and all(
        x == y or isinstance(x, float) and math.isclose(x, y, rel_tol=1e-9)
        for x, y in zip(*leaves, strict=True)
    )


def all_claims() -> dict[str, list[dict[str, Any]]]:
    """By experiment, claims that were judged by rules, with p over all of them."""
    found = [results for folder in folders() if (results := read_results(folder))]
    claims = [(each["experiment"], claim) for each in found for claim in each.get("claims", ())]
    adjusted = rules.over_all_claims([claim for _, claim in claims])
    by_name = {}
    for (name, _), claim in zip(claims, adjusted, strict=True):
        by_name.setdefault(name, []).append(claim)
    return by_name


def overview() -> str:
    """One table of all, a row each claim; the hours."""
    rows, claims = [], all_claims()
    for folder in folders():
        text = (folder / "README.md").read_text(encoding="utf-8")
        row = {
            "experiment": f"[{folder.name}]({folder.name}/README.md)",
            "question": text.splitlines()[0].strip("# "),
        }
        found = read_results(folder)
        if found is None:
            word = NO_CLAIM.get(folder.name, "not run")
            empty = dict.fromkeys(("effect", INTERVAL, "power", "hours", "rule"))
            rows.append(row | {"verdict": word} | empty)
            continue
        for each in claims.get(folder.name, [found]):
            rows.append(row | _numbers(each) | _cost(found))
    return (
        f"{table(rows)}\n\nTime: {hours_of_all():.1f} hours on two cores, of which the ladder "
        f'(pages without a "Before") has {hours_of_all(is_ladder=True):.1f}; an experiment '
        "that had one of them counts half."
    )


def _numbers(found: dict[str, Any]) -> dict[str, Any]:
    """Columns of a claim, or of results without a rule."""
    earlier_verdict = found.get("verdict_before")
    effect = found["effect"]
    mean, _, bounds = shown(effect).partition(" ")
    return {
        "verdict": found["verdict"] + f" (was: {earlier_verdict})" * bool(earlier_verdict),
        "effect": ", ".join(filter(None, (mean, found["effect_of"]))),
        INTERVAL: bounds.strip("()"),
        "power": found.get("power"),
    }


def _cost(found: dict[str, Any]) -> dict[str, str]:
    return {"hours": f"{found['wall_seconds'] / 3600:.1f}", "rule": found.get("rule", "")[:8]}


def hours_of_all(*, is_ladder: bool = False) -> float:
    """Of two cores: an experiment that had one of them counts half.

    Args:
        is_ladder: leaves out what was run before the ladder, whose results have no `code`.
    """
    every = [found for folder in folders() if (found := read_results(folder))]
    every = [found for found in every if "code" in found or not is_ladder]
    return sum(e["wall_seconds"] * min(e["environment"]["cores"], 2) / 2 for e in every) / 3600


def publish_page(folder: pathlib.Path) -> None:
    """Figure and page of a folder, of its results.json, and the table of all."""
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    figure = figure_of(results)
    if figure is not None:
        write_svg(figure, folder / "figure.svg")
    write_page(folder / "README.md", page(results))
    publish_overview()


def publish_overview() -> None:
    """The table of all and its picture, and the pages that give a p over all claims."""
    for name in all_claims():
        write_page(HERE / name / "README.md", page(read_results(HERE / name)))
    results, ladder = read_results(HERE / LADDER), rules.constants_of(LADDER)
    if results and (figure := ladder["picture"](results)):
        write_svg(figure, HERE / PICTURE)
        shown_above = f"![what experts are worth]({PICTURE})\n\n{ladder['CAPTION']}"
        write_page(HERE / "README.md", shown_above, OF_LADDER)
    write_page(HERE / "README.md", overview())


def figure_of(results: dict[str, Any]) -> Figure | None:
    """Differences with their intervals, losses by bytes or quality by rate; else none."""
    if "points" in results:
        return figures.points_figure(results["points"])
    if results.get("intervals"):
        first = next(iter(results["intervals"].values()))
        label = results.get("intervals_of", results["effect_of"])
        return figures.intervals_figure(
            results["intervals"], label, first.get("no_effect", 0.0)
        )
    if "curves" in results:
        label = f"over {next(iter(results['curves']))} after the last step, nats per token"
        return figures.intervals_figure(intervals(results), label)
    if "quality" in results:
        return figures.rates_figure(results["quality"], "negative log perplexity, last step")
    return None


def page(results: dict[str, Any]) -> str:
    """What was found, tables, figure, and where it comes from."""
    claims = all_claims().get(results["experiment"], [])
    words = ", ".join(dict.fromkeys(each["verdict"] for each in claims or [results]))
    parts = [f"**Found: {words}.** {results['because']}"]
    if "exploratory_because" in results:
        earlier_verdict = results.get("verdict_before")
        earlier = f" The verdict was: {earlier_verdict}." * bool(earlier_verdict)
        parts.append(f"Exploratory, as {results['exploratory_because']}.{earlier}")
    if claims:
        parts.append(table(map(_claim_row, claims)))
    for each in results["tables"]:
        parts.append("\n\n".join([each["title"]] * bool(each["title"]) + [table(each["rows"])]))
    if figure_of(results) is not None:
        parts.append("![what was found](figure.svg)")
    parts.append(f"{seeds_of(results)}{provenance(results)}")
    return "\n\n".join(parts)


def _claim_row(claim: dict[str, Any]) -> dict[str, Any]:
    mean, _, bounds = shown(claim["effect"]).partition(" ")
    kept = ("margin", "p", "p_holm", "power", "variance", "sd")
    return {
        "claim": claim["claim"],
        "verdict": claim["verdict"],
        "effect": mean,
        "interval": bounds.strip("()"),
        "look": f"{claim['look']} of {claim['looks']}",
    } | {key.replace("_", " "): claim[key] for key in kept}


def seeds_of(results: dict[str, Any]) -> str:
    """How many; of tables that say it row by row, the fewest and the most."""
    rows = [row for each in results["tables"] for row in each["rows"]]
    most = len(results["seeds"])
    least = min((row["seeds"] for row in rows if "seeds" in row), default=most)
    if not most:
        return ""
    return f"{least} to {most} seeds. " if least < most else f"{most} seed{'s' * (most > 1)}. "


def write_page(file: pathlib.Path, page: str, begin: str = BEGIN) -> None:
    """Puts a page between the marks of a file."""
    head, rest = file.read_text(encoding="utf-8").split(begin)
    after = rest.split(END, 1)[1]
    write_atomically(file, f"{head}{begin}\n\n{page.strip()}\n\n{END}{after}".encode())


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Rows of the same columns as a table of Markdown; floats to four digits."""
    rows = list(rows)
    lines = [list(rows[0]), ["---"] * len(rows[0])]
    lines += [[shown(value) for value in row.values()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def shown(value: Any) -> str:
    """A value of results.json on a page."""
    if value is None or (isinstance(value, dict) and None in value.values()):
        return ""
    if isinstance(value, dict):  # an Interval; of one value it has no width
        text = str(Interval(*map(value.get, ("mean", "low", "high"))))
        text = text.replace("+", "") if "no_effect" in value else text  # a Ratio has no sign
        return text.partition(" ")[0] if value["low"] == value["high"] else text
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def provenance(results: dict[str, Any]) -> str:
    """A line that says where and when results come from."""
    where, hours = results["environment"], results["wall_seconds"] / 3600
    commit, _, is_dirty = where["commit"].partition("-")
    commit = commit[:12] + " with changes" * bool(is_dirty)
    trained = [each[:12] for each in results.get("trained_by", ()) if each[:12] not in commit]
    if trained:
        commit += f", models trained by {', '.join(trained)}"
    if "pretraining" in results:
        began = ", ".join(each[:12] for each in results["pretraining"])
        commit += f", from pretraining of {began}"
    cores = f"{where['cores']} core{'s' * (where['cores'] != 1)}"
    if "rule" in results:
        commit += f", rule {results['rule'][:8]} of {results['registered'][:12]}"
    judged = f"; judged anew on {results['judged']}" if "judged" in results else ""
    return (
        f"Run on {results['date']}, {where.get('processor') or where['device']}, {cores}, JAX "
        f"{where['jax']}, commit {commit}; {hours:.1f} hours in all{judged}."
    )


def main() -> None:
    for folder in folders():
        if folder.name in NO_CLAIM:
            continue
        if read_results(folder) is None:
            write_page(folder / "README.md", NOT_RUN)
        else:
            judge_anew(folder)
            publish_page(folder)
    publish_overview()


if __name__ == "__main__":
    main()
