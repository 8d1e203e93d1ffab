# SPDX-License-Identifier: Apache-2.0
"""Writes the table of docs/scale.md: the four Switch models compiled for pods.

    SWITCHX_AOT_TPU=.venv/aot_tpu python -m switchx.bench.scale_page

compiles all of them, writes the reports to `docs/scale.json` and the table to the page; with
names of models (`switch_c`) it does so for those alone. Each takes minutes to half an hour. The
exit status is 1 where a check does not hold.
"""

import json
import pathlib
import sys

from switchx.bench.compiled import PODS, compiled_reports, name_of, pod_checks
from switchx.partitioning.hlo_collectives import KINDS

DOCS = pathlib.Path(__file__).parents[2] / "docs"
RESULTS, PAGE = DOCS / "scale.json", DOCS / "scale.md"
BEGIN, END = "<!-- table: made by switchx.bench.scale_page -->\n", "<!-- end of table -->\n"


def tables(reports: dict[str, dict]) -> str:
    """Markdown tables: what each model needs of a device, and what it communicates."""
    names = [name_of(run_file) for run_file, _ in PODS if name_of(run_file) in reports]
    rows = {name: reports[name]["results"][0] for name in names}
    columns = {
        "": lambda row: None,
        "slice": lambda row: f"`{row['topology']}`",
        "devices": lambda row: f"{row['devices']:,}",
        "parameters": lambda row: f"{row['parameters'] / 1e9:,.1f} B",
        "tokens a batch": lambda row: f"{row['tokens_per_batch']:,}",
        "slots a token": lambda row: f"{row['slots_per_token']:.3f}",
        "arguments, GiB": lambda row: _gib(row["argument_bytes_per_device"]),
        "temporaries, GiB": lambda row: _gib(row["temporary_bytes_per_device"]),
        "of, GiB": lambda row: _gib(row["hbm_bytes_per_device"]),
        "fits": lambda row: "no" if row["excess_bytes_per_device"] else "yes",
        "TFLOPs": lambda row: _tera(row["matrix_flops_per_device"]),
    }
    text = _table(list(columns), names, lambda name, column: columns[column](rows[name]))
    text += (
        "\nCollectives of a step: how often it executes each kind, and GiB on one device.\n\n"
    )
    # A step that its compiler refused has none.
    found = {name: row["collectives"] or {} for name, row in rows.items()}
    kinds = [kind for kind in KINDS if any(kind in one for one in found.values())]

    def sent(name, kind):
        one = found[name].get(kind)
        return (
            "" if one is None else f"{one['count_per_step']}: {_gib(one['bytes_per_device'])}"
        )

    return text + _table(["", *kinds], names, sent)


def with_tables(page: str, reports: dict[str, dict]) -> str:
    """The page with new tables in the place of the old ones.

    Raises:
        ValueError: the page does not mark their place.
    """
    if BEGIN not in page or END not in page:
        raise ValueError(f"{PAGE} has no lines {BEGIN.strip()!r} and {END.strip()!r}")
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{tables(reports)}\n{END}{rest.partition(END)[2]}"


def main(names: list[str]) -> int:
    """Compiles models and writes the page; returns 1 where one of their checks does not hold.

    Raises:
        ValueError: a model is not one of the pods'.
    """
    known = [name_of(run_file) for run_file, _ in PODS]
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(f"there is no {', '.join(unknown)}; use {', '.join(known)}")
    pods = [pod for pod in PODS if not names or name_of(pod[0]) in names]
    reports = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    failed = []
    for pod in pods:
        [reports[name_of(pod[0])]] = compiled_reports([pod])
        RESULTS.write_text(json.dumps(reports, indent=1) + "\n")
        PAGE.write_text(with_tables(PAGE.read_text(), reports))
        failed += [one for one in pod_checks([reports[name_of(pod[0])]]) if not one.holds]
    for check in failed:
        print(f"{check.name} {check.value:,.6g} {check.bound}: does not hold")
    return 1 if failed else 0


def _table(columns: list[str], names: list[str], cell) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for name in names:
        cells = [name.replace("_", "-"), *(cell(name, column) for column in columns[1:])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _tera(flops: int | None) -> str:
    return "" if flops is None else f"{flops / 1e12:.2f}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
