# SPDX-License-Identifier: Apache-2.0
"""`switchx compile`: what a compiled training step takes, as a row and checks.

docs/scale.md reports the four Switch models on pods so. Memory and collectives
are those of the program that a pod would run; nothing is run, so there are no times.

    SWITCHX_AOT_TPU=.venv/aot_tpu python -m switchx.compiled.report

says how far estimates of seconds are from times, compiles all four, writes the reports to
`docs/scale.json` and the tables to the page; with names of models (`switch_c`) it does so for
those alone. Each takes minutes to half an hour. The exit status is 1 where a check does not
hold.
"""

import collections
import json
import pathlib
import sys
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from switchx.compiled.collectives import KINDS
from switchx.compiled.devices import json_of_child
from switchx.compiled.training_step import CompiledStep, HostMemory
from switchx.compiled.workload import layout_of, planned_storage, workload_of
from switchx.hardware.spec import load_hardware
from switchx.models.flops import count_parameters
from switchx.partitioning.topology import GENERATIONS, Topology
from switchx.planner.search import predict
from switchx.planner.step_comm import step_collectives
from switchx.planner.step_time import executed_flops
from switchx.results import Check, Report
from switchx.training.job import TrainingJob

# The runs that docs/scale.md reports, and the slices that they are for.
PODS = (
    ("configs/runs/pretrain_switch_base.gin", "v5e:16x16"),
    ("configs/runs/pretrain_switch_large.gin", "v5e:16x16"),
    ("configs/runs/pretrain_switch_xxl.gin", "v5p:8x8x16"),
    ("configs/runs/pretrain_switch_c.gin", "v4:8x8x16"),
)
# "About 2^20 tokens a batch": of the runs in PODS, not of every job that is compiled.
POD_TOKENS = 1 << 20
MOST_OFF = 0.05
# Of a row, what is in no table of names and values.
SHOWN_APART = ("collectives", "planned_bytes_per_device", "way_out")
# Slots over the capacity factor that rounding may add.
MOST_PADDING = 1.25
# tokamax' published times of grouped products over the seconds that `switchx bench compiled`
# estimates for the same: forward, dx, dw, and the number of cases.
MEASURED_OVER_ESTIMATED = {
    "v5p": (1.03, 1.01, 0.94, 102),
    "v5e": (1.09, 1.44, 1.03, 16),
    "tpu7x": (1.47, 1.77, 0.97, 100),
}
DOCS = pathlib.Path(__file__).parents[2] / "docs"
RESULTS, PAGE = DOCS / "scale.json", DOCS / "scale.md"
BEGIN, END = "<!-- tables: made by switchx.compiled.report -->\n", "<!-- end of tables -->\n"


def report_of(step: CompiledStep, job: TrainingJob, topology: Topology, name: str) -> Report:
    """The report of a compiled step: a row that holds its collectives, and the checks.

    Args:
        name: name of the job, for the row.
    """
    memory = step.memory
    others = {f"{kind}_bytes_per_device": other.needed for kind, other in step.others.items()}
    row = {
        "run": name,
        "topology": str(topology),
        "devices": step.devices,
        "parameters": step.parameters,
        **({"teacher_parameters": step.teacher_parameters} if step.teacher_parameters else {}),
        "tokens_per_batch": step.tokens_per_batch,
        "target_tokens_per_batch": step.target_tokens_per_batch,
        "slots_per_token": step.slots_per_token,
        "argument_bytes_per_device": memory.arguments,
        "temporary_bytes_per_device": memory.temporaries,
        "needed_bytes_per_device": memory.needed,
        "hbm_bytes_per_device": memory.limit,
        "excess_bytes_per_device": memory.excess,
        **others,
        "matrix_flops_per_device": step.flops,
        "collectives": step.collectives
        and {
            kind: {"count_per_step": count, "bytes_per_device": size}
            for kind, (count, size) in step.collectives.items()
        },
        **planned_step(job, topology),
        "compile_s": round(step.seconds, 1),
    }
    if step.overlapped_exchanges is not None:
        row["overlapped_exchanges"] = step.overlapped_exchanges
    if step.host is not None:
        row |= {
            "host_bytes_per_device": step.host.needed,
            "argument_bytes_without_storage": step.host.without.arguments,
            "needed_bytes_without_storage": step.host.without.needed,
        }
    if memory.excess:
        row["way_out"] = way_out(step)
    counted = count_parameters(job.model).total
    encoder, decoder = job.sequence_lengths
    tokens = job.batch_size * (encoder or decoder)  # the latter of a decoder-only model
    checks = [
        Check("fits", int(memory.fits), "==1"),
        *(Check(f"{kind}_fits", int(one.fits), "==1") for kind, one in step.others.items()),
        Check("parameters", step.parameters, f"=={counted}"),
        Check("devices", step.devices, f"=={topology.num_devices}"),
        Check("tokens_per_batch", step.tokens_per_batch, f"=={tokens}"),
    ]
    if step.slots_per_token is not None:
        factor = job.model.switch.capacity_factor * job.model.switch.router.num_selected
        bound = f"<={MOST_PADDING * factor:g}"
        checks.append(Check("slots_per_token", step.slots_per_token, bound))
    is_in_parts = job.model.switch is not None and job.model.switch.exchange_parts > 1
    if is_in_parts and step.overlapped_exchanges is not None:
        checks.append(Check("overlapped_exchanges", step.overlapped_exchanges, ">=1"))
    return Report("compile", [row], checks + _storage_checks(step.host))


def planned_step(job: TrainingJob, topology: Topology) -> dict[str, Any]:
    """The step as the planner predicts it: seconds by its spec file's constants, with an even
    load of the experts and no communication behind products; FLOPs, and bytes by collective.

    The result is empty where there is no formula for the job.
    """
    layout = layout_of(job, job.mesh.sizes(topology.num_devices))
    try:
        hardware, workload = load_hardware(topology.kind), workload_of(job)
        plan = predict(workload, layout, hardware, planned_storage(job))
        collectives = step_collectives(workload, layout, hardware.compute)
    except ValueError:
        return {}
    sizes = collections.Counter()
    for each in collectives:
        sizes[each.kind] += each.total_bytes
    return {
        "planned_step_s": plan.time.step_s,
        "planned_matrix_flops_per_device": round(executed_flops(workload, layout)),
        "planned_bytes_per_device": {kind: round(sizes[kind]) for kind in sorted(sizes)},
    }


def _storage_checks(host: HostMemory | None) -> list[Check]:
    """The checks of a step with experts in host memory; none where there is no such step."""
    if host is None:
        return []
    checks = [Check("fits_without_storage", int(host.without.fits), "==0")]
    if host.needed is not None:
        checks += [
            Check("host_bytes_vs_formula", host.needed / host.formula, "<=1.01"),
            Check("copies_overlapped", host.copies_overlapped, ">=0.8"),
            Check("reversed_strides_wrong", sum(each < 0 for each in host.strides), "==0"),
        ]
    return checks


def way_out(step: CompiledStep) -> str:
    """Says where a step that does not fit could, by the size of its arguments."""
    total = step.memory.arguments * step.devices
    said = f"too large by {_gib(step.memory.excess)} GiB a device"
    if step.memory.arguments <= step.memory.limit:
        return (
            f"{said}, of temporaries: use ModelConfig.remat='full', more microbatches, or more "
            "devices"
        )
    fitting = [
        f"{kind} from {needed} devices"
        for kind, one in GENERATIONS.items()
        # Gradients are as large as the parameters: half of the memory is for the arguments.
        if (needed := -(-2 * total // one.hbm_bytes)) <= one.most_chips * one.devices_per_chip
    ]
    if not fitting:
        return (
            f"{said}, of arguments alone: {_gib(total)} GiB of arguments fit no slice there "
            "is; use fewer experts, or split what this mesh replicates"
        )
    return f"{said}, of arguments alone: split them over more devices ({', '.join(fitting)})"


def compiled_reports(pods=PODS) -> list[dict]:
    """The objects of `switchx compile --json` for runs on their slices, a process for each.

    Raises:
        FileNotFoundError: the compiler is not installed.
        RuntimeError: a process ended without a report; the message has its last output.
    """
    reports = []
    for run_file, slice_name in pods:
        print(f"compiling {run_file} for {slice_name}")
        words = ["compile", f"--gin_file={run_file}", f"--topology={slice_name}", "--json"]
        reports.append(json_of_child(words, Topology.parse(slice_name)))
    return reports


def name_of(run_file: str) -> str:
    """The name of a run's model: `switch_c` of `configs/runs/pretrain_switch_c.gin`."""
    return pathlib.PurePath(run_file).stem.removeprefix("pretrain_")


def pod_checks(reports: list[dict]) -> list[Check]:
    """The checks of `compiled_reports`, each with its model's name in front, and the batch's.

    `switch_c_tokens_off_aim` is the distance from 2^20 tokens a batch as a share of them.
    """
    checks = []
    for report in reports:
        [row] = report["results"]
        name = name_of(row["run"])
        checks += [
            Check(f"{name}_{one['name']}", one["value"], one["bound"])
            for one in report["checks"]
        ]
        off = abs(row["tokens_per_batch"] / POD_TOKENS - 1)
        checks.append(Check(f"{name}_tokens_off_aim", off, f"<={MOST_OFF:g}"))
    return checks


def print_tables(report: Report) -> None:
    """Prints the row from top to bottom, its collectives, and the checks."""
    console = Console(highlight=False)
    for row in report.results:
        table = Table(
            title=f"switchx compile, {row['topology']}", title_justify="left", box=None
        )
        table.add_column()
        table.add_column(justify="right")
        for name, value in row.items():
            if name not in SHOWN_APART and value is not None:
                table.add_row(name.replace("_", " "), _shown(name, value))
        console.print(table)
        if row["collectives"]:
            names = "times a step", "GiB a device", "planned"
            right = (Column(name, justify="right") for name in names)
            table = Table("collective", *right, box=None)
            planned = row.get("planned_bytes_per_device", {})
            for kind, one in row["collectives"].items():
                sizes = one["bytes_per_device"], planned.get(kind)
                table.add_row(kind, f"{one['count_per_step']:,}", *map(_gib, sizes))
            console.print(table)
        if "way_out" in row:
            console.print(row["way_out"])
    for check in report.checks:
        console.print(f"{check.name} {check.value:,.6g} {check.bound}: {check.verdict}")
    console.print("Compiled, not run.")


def _shown(name: str, value) -> str:
    if "bytes" in name:
        return f"{_gib(value)} GiB"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _gib(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / (1 << 30):,.2f}"


def estimates_vs_times() -> str:
    """Says by how much estimated seconds were off where others published times."""
    found = [
        f"{chip} {min(ratios):.2f} to {max(ratios):.2f} ({cases} cases)"
        for chip, (*ratios, cases) in MEASURED_OVER_ESTIMATED.items()
    ]
    return (
        "Estimated seconds are no times: tokamax' published ones over the same estimator's are "
        f"{', '.join(found)}. tokamax has SparseCore gathers and tables tuned by shape; "
        "switchx has not."
    )


def tables(reports: dict[str, dict]) -> str:
    """Markdown tables: what each model needs of a device, and what it communicates."""
    names = filter(reports.__contains__, (name_of(run_file) for run_file, _ in PODS))
    rows = {name.replace("_", "-"): reports[name]["results"][0] for name in names}
    needs = [
        {
            "": name,
            "slice": f"`{row['topology']}`",
            "devices": f"{row['devices']:,}",
            "parameters": f"{row['parameters'] / 1e9:,.1f} B",
            "tokens a batch": f"{row['tokens_per_batch']:,}",
            "slots a token": f"{row['slots_per_token']:.3f}",
            "arguments, GiB": _gib(row["argument_bytes_per_device"]),
            "temporaries, GiB": _gib(row["temporary_bytes_per_device"]),
            "of, GiB": _gib(row["hbm_bytes_per_device"]),
            "evaluation, GiB": _gib(row.get("evaluation_bytes_per_device")),
            "initialization, GiB": _gib(row.get("initialization_bytes_per_device")),
            "fits": "no" if row["excess_bytes_per_device"] else "yes",
            # A step that its compiler refused has neither FLOPs nor collectives.
            "TFLOPs": f"{flops / 1e12:.2f}"
            if (flops := row["matrix_flops_per_device"])
            else "",
            "planned step, s": f"{seconds:.2f}"
            if (seconds := row.get("planned_step_s"))
            else "",
        }
        for name, row in rows.items()
    ]
    sent = {
        name: {
            kind: f"{one['count_per_step']}: {_gib(one['bytes_per_device'])}"
            for kind, one in (row["collectives"] or {}).items()
        }
        for name, row in rows.items()
    }
    kinds = [kind for kind in KINDS if any(kind in one for one in sent.values())]
    sends = [
        {"": name} | {kind: one.get(kind, "") for kind in kinds} for name, one in sent.items()
    ]
    title = "Collectives of a step: how often it executes each kind, and GiB on one device."
    return f"{_markdown(needs)}\n{title}\n\n{_markdown(sends)}"


def _markdown(rows: list[dict[str, str]]) -> str:
    head = f"| {' | '.join(rows[0])} |\n{'|---' * len(rows[0])}|\n"
    return head + "".join(f"| {' | '.join(row.values())} |\n" for row in rows)


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
    print(estimates_vs_times())
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
