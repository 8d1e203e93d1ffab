# SPDX-License-Identifier: Apache-2.0
"""docs/compiled.md: the Switch models of the paper, compiled for pods.

    make scale

says how far estimates of seconds are from times, compiles all four, writes the reports to
`docs/scale.json` and the tables to the page; with names of models (`ARGS=switch_c`) it does so
for those alone. Each takes minutes to half an hour. The exit status is 1 where a check does not
hold.
"""

import json
import pathlib
import sys

from experiments.pages import ROOT, table, write_page
from switchx.bench.compiled_peers import estimates_vs_times
from switchx.compiled.collectives import KINDS
from switchx.compiled.devices import json_of_child
from switchx.compiled.report import in_gib
from switchx.partitioning.topology import Topology
from switchx.results import Check

# The runs that the page reports, and the slices that they are for.
PODS = (
    ("configs/runs/pretrain_switch_base.gin", "v5e:16x16"),
    ("configs/runs/pretrain_switch_large.gin", "v5e:16x16"),
    ("configs/runs/pretrain_switch_xxl.gin", "v5p:8x8x16"),
    ("configs/runs/pretrain_switch_c.gin", "v4:8x8x16"),
)
# "About 2^20 tokens a batch".
POD_TOKENS = 1 << 20
MOST_OFF = 0.05
BEGIN = "<!-- made of scale.json -->"
RESULTS, PAGE = ROOT / "docs/scale.json", ROOT / "docs/compiled.md"


def compiled_report(run_file: str, slice_name: str) -> dict:
    """The object of `switchx compile --json` for a run on its slice, in a process of its own.

    Raises:
        FileNotFoundError: the compiler is not installed.
        RuntimeError: the process ended without a report; the message has its last output.
    """
    print(f"compiling {run_file} for {slice_name}")
    words = ["compile", f"--gin_file={run_file}", f"--topology={slice_name}", "--json"]
    return json_of_child(words, Topology.parse(slice_name))


def name_of(run_file: str) -> str:
    """The name of a run's model: `switch_c` of `configs/runs/pretrain_switch_c.gin`."""
    return pathlib.PurePath(run_file).stem.removeprefix("pretrain_")


def pod_checks(report: dict) -> list[Check]:
    """The checks of a report, each with its model's name in front, and the batch's.

    `switch_c_tokens_off_aim` is the distance from 2^20 tokens a batch as a share of them.
    """
    [row] = report["results"]
    name = name_of(row["run"])
    off = abs(row["tokens_per_batch"] / POD_TOKENS - 1)
    found = [
        Check(f"{name}_{one['name']}", one["value"], one["bound"]) for one in report["checks"]
    ]
    return [*found, Check(f"{name}_tokens_off_aim", off, f"<={MOST_OFF:g}")]


def tables(reports: dict[str, dict]) -> str:
    """Markdown tables: what each model needs of a device, and what it communicates."""
    names = filter(reports.__contains__, (name_of(run_file) for run_file, _ in PODS))
    rows = {name.replace("_", "-"): reports[name]["results"][0] for name in names}
    needs = [
        {
            "": name,
            "slice": f"`{row['topology']}`",
            "devices": row["devices"],
            "parameters": f"{row['parameters'] / 1e9:,.1f} B",
            "tokens a batch": row["tokens_per_batch"],
            "slots a token": f"{row['slots_per_token']:.3f}",
            "arguments, GiB": in_gib(row["argument_bytes_per_device"]),
            "temporaries, GiB": in_gib(row["temporary_bytes_per_device"]),
            "of, GiB": in_gib(row["hbm_bytes_per_device"]),
            "evaluation, GiB": in_gib(row.get("evaluation_bytes_per_device")),
            "initialization, GiB": in_gib(row.get("initialization_bytes_per_device")),
            "fits": "no" if row["excess_bytes_per_device"] else "yes",
            # A step that its compiler refused has neither FLOPs nor collectives.
            "TFLOPs": (flops := row["matrix_flops_per_device"]) and f"{flops / 1e12:.2f}",
            "planned step, s": (planned := row.get("planned_step_s")) and f"{planned:.2f}",
        }
        for name, row in rows.items()
    ]
    sent = {
        name: {
            kind: f"{one['count_per_step']}: {in_gib(one['bytes_per_device'])}"
            for kind, one in (row["collectives"] or {}).items()
        }
        for name, row in rows.items()
    }
    kinds = [kind for kind in KINDS if any(kind in one for one in sent.values())]
    sends = [{"": name} | {kind: one.get(kind) for kind in kinds} for name, one in sent.items()]
    title = "Collectives of a step: how often it executes each kind, and GiB on one device."
    return f"{table(needs)}\n\n{title}\n\n{table(sends)}"


def main(names: list[str]) -> int:
    """Compiles models and writes the page; returns 1 where one of their checks does not hold.

    Raises:
        ValueError: a model is not one of the pods'.
    """
    known = [name_of(run_file) for run_file, _ in PODS]
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(f"there is no {', '.join(unknown)}; use {', '.join(known)}")
    print(estimates_vs_times())
    reports, failed = json.loads(RESULTS.read_text()), []
    for name, pod in zip(known, PODS, strict=True):
        if not names or name in names:
            reports[name] = compiled_report(*pod)
            RESULTS.write_text(json.dumps(reports, indent=1) + "\n")
            write_page(PAGE, tables(reports), BEGIN)
            failed += [one for one in pod_checks(reports[name]) if not one.holds]
    for check in failed:
        print(f"{check.name} {check.value:,.6g} {check.bound}: does not hold")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
