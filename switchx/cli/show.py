# SPDX-License-Identifier: Apache-2.0
"""`switchx report` and `switchx show`: a run's routing and a pipeline's schedule, drawn."""

import argparse
import pathlib

from switchx.cli import arguments as shared

# Cells of a drawn schedule.
MOST_CELLS = 1_000_000
REPORT = """\
Writes one HTML page, which needs no other file and no network, about the routing of a run:
load, drops, entropy and gate of every Switch layer over training, dead experts, where tokens
go from layer to layer, which tokens an expert gets, and how early the final routing
appeared.

  switchx report --model_dir=DIR                   writes DIR/report.html
  switchx report --model_dir=DIR --output=FILE

Several folders are compared: loss in training and validation by step, tokens, FLOPs and time,
with 95% intervals if runs differ only in the seed; differences between their configurations;
their routing side by side.

  switchx report runs/a runs/b runs/c              writes comparison.html
  switchx report runs/a runs/b --output=FILE

It reads what training recorded, such as DIR/metrics.jsonl and DIR/routing/, and may be run
while training goes on. The models are not run.
"""
SHOW = """\
Draws the schedule of a pipeline: which microbatch a stage runs forward (F) and backward (B)
in each tick, the share of time that is lost (the bubble), and how many inputs are kept.

  switchx show schedule --stages=4 --microbatches=8
  switchx show schedule --stages=4 --microbatches=8 --schedule=interleaved --chunks=2
  switchx show schedule --stages=4 --microbatches=8 --stacks=2     an encoder and a decoder
  switchx show schedule --stages=4 --microbatches=8 --output=1f1b.png

A letter after a microbatch's number is its chunk in an interleaved schedule.
"""
STACKS = ((" ",), ("encoder", "decoder"))


def add_command(commands) -> None:
    what = "plot a run's routing, or compare runs"
    parser = shared.add_command(commands, "report", run_report, what, REPORT)
    parser.add_argument(
        "folders", nargs="*", type=shared.not_empty, metavar="DIR", help="runs to compare"
    )
    shared.add_model_dir(parser, "run folder of `switchx train`", required=False)
    shared.add_output(
        parser, "page to write; default: report.html in the run folder, or comparison.html"
    )
    parser = shared.add_command(
        commands, "show", run_show, "draw the schedule of a pipeline", SHOW
    )
    parser.add_argument("what", choices=["schedule"], help="what to draw")
    number = {"type": int, "metavar": "N"}
    parser.add_argument("--stages", required=True, help="devices along `pipe`", **number)
    parser.add_argument("--microbatches", required=True, help="number per batch", **number)
    parser.add_argument(
        "--schedule",
        default="1f1b",
        choices=["gpipe", "1f1b", "interleaved"],
        help="default: 1f1b",
    )
    parser.add_argument("--chunks", default=1, help="per stage, if interleaved", **number)
    parser.add_argument(
        "--stacks", type=int, choices=[1, 2], default=1, help="2 for an encoder-decoder"
    )
    shared.add_output(parser, "also draw it: .png, .svg or .pdf")
    shared.add_json(parser)


def run_report(arguments: argparse.Namespace) -> int:
    folders, model_dir = arguments.folders, arguments.model_dir
    if bool(folders) == bool(model_dir):
        arguments.parser.error("give --model_dir=DIR for one run, or the folders of several")
    if len(folders) > 1:
        return _compare(folders, arguments.output or "comparison.html")
    return _report(model_dir or shared.model_folder(folders[0]), arguments.output)


def _compare(folders: list[str], output: str) -> int:
    from switchx.analysis.comparison import compare
    from switchx.analysis.report import page
    from switchx.checkpoint.run_folder import RunFolder
    from switchx.files import write_atomically

    comparison = compare([RunFolder(folder).root for folder in folders])
    facts = {
        each.name: ", ".join(run.folder for run in each.runs)
        for each in comparison.configurations
    }
    text = page("Runs compared", facts, comparison.sections())
    write_atomically(pathlib.Path(output).expanduser(), text.encode())
    print(f"{comparison.headline}\n{output}")
    return 0


def _report(model_dir: str, output: str | None) -> int:
    from switchx.analysis.report import all_sections, page, read_run
    from switchx.checkpoint.run_folder import RunFolder, read_sparse_model_config
    from switchx.data.token_classes import token_classes
    from switchx.data.vocabularies import load_vocabulary
    from switchx.files import write_atomically

    folder = RunFolder(model_dir)
    model = read_sparse_model_config(folder)
    if output is None and folder.is_in_store:
        raise ValueError(
            f"{folder.where} is in a store, which a trainer alone writes; give "
            "--output, a file of this machine"
        )
    vocabulary = load_vocabulary(folder.root)
    classes = token_classes(vocabulary)
    routing = read_run(
        folder.root, classes.names, classes.class_V, lambda token: vocabulary.piece(token).text
    )
    sizes = [
        f"{len(stack.token_T):,} {stack.layers[0].split()[0]}" for stack in routing.final.stacks
    ]
    facts = {
        "run folder": str(folder.root),
        "experts": f"{model.switch.num_experts} in each of {model.num_sparse_layers} layers",
        "steps": f"{routing.history.steps[-1]}",
        "sample": f"{' and '.join(sizes)} tokens of the validation data, "
        f"{len(routing.snapshots)} evaluations, the last one at step {routing.final.step}",
    }
    output = pathlib.Path(output or folder.root / "report.html").expanduser()
    title = f"Routing of {folder.root.name}"
    write_atomically(output, page(title, facts, all_sections(routing)).encode())
    print(output)
    return 0


def run_show(arguments: argparse.Namespace) -> int:
    from switchx.pipeline.schedule import ScheduleSpec
    from switchx.results import Check, Report

    spec = ScheduleSpec(arguments.schedule, arguments.chunks)
    if (cells := arguments.stages * arguments.microbatches) > MOST_CELLS:
        raise ValueError(
            f"--stages={arguments.stages} --microbatches={arguments.microbatches}: {cells:,} "
            f"cells are not drawn; use at most {MOST_CELLS:,}"
        )
    schedule = spec.build(arguments.stages, arguments.microbatches, arguments.stacks)
    row = {
        "schedule": spec.kind,
        "stages": schedule.num_stages,
        "microbatches": schedule.num_microbatches,
        "chunks": schedule.num_chunks,
        "stacks": schedule.num_lanes,
        "ticks": schedule.num_ticks,
        "bubble": schedule.bubble(),
        "lock_step_adds": schedule.time() / schedule.time_without_lock_step() - 1,
        "kept_inputs": sum(schedule.num_slots),
    }
    sentence = (
        f"{row['schedule']}, {row['stages']} stages, {row['microbatches']} microbatches: "
        f"{row['ticks']} ticks, bubble {row['bubble']:.1%} (B = 2 F), common ticks add "
        f"{row['lock_step_adds']:.1%}, at most {row['kept_inputs']} inputs kept a stage"
    )
    if arguments.output:
        _draw(schedule, sentence, arguments.output)
    if arguments.json:
        P = schedule.num_stages
        M = schedule.num_microbatches
        v = schedule.num_chunks
        formula = (P - 1) / (v * M + P - 1)
        check = Check("bubble_vs_formula", abs(row["bubble"] - formula), "<=1e-9")
        Report("show schedule", [row], [check]).print(as_json=True)
    else:
        print("\n".join([*table_lines(schedule), "", sentence]))
        if arguments.output:
            print(arguments.output)
    return 0


def table_lines(schedule) -> list[str]:
    """One line per stage, stack and direction; one column per tick."""
    width = len(str(schedule.num_microbatches - 1)) + (schedule.num_chunks > 1)
    stacks = STACKS[schedule.num_lanes - 1]
    label = max(map(len, stacks))
    ticks = " ".join(f"{tick % 10**width:>{width}}" for tick in range(schedule.num_ticks))
    lines = [f"{'tick':<{label + 10}} {ticks}"]
    for stage in range(schedule.num_stages):
        for lane, name in enumerate(stacks):
            for mark, ops in (("F", schedule.forward), ("B", schedule.backward)):
                cells = [
                    f"{_cell(schedule, ops, tick, stage, lane):>{width}}"
                    for tick in range(schedule.num_ticks)
                ]
                first = f"stage {stage}" if lane == 0 and mark == "F" else ""
                lines.append(f"{first:<8}{name:<{label}} {mark} {' '.join(cells)}".rstrip())
    return lines


def _cell(schedule, ops, tick: int, stage: int, lane: int) -> str:
    if not ops.is_active_TPS[tick, stage, lane]:
        return "."
    chunk = ops.chunk_TPS[tick, stage, lane]
    letter = chr(ord("a") + chunk % 26) if schedule.num_chunks > 1 else ""
    return f"{ops.microbatch_TPS[tick, stage, lane]}{letter}"


def _draw(schedule, title: str, output: str) -> None:
    from switchx.analysis.plots import FORMATS, schedule_figure

    path = pathlib.Path(output).expanduser()
    if path.suffix not in FORMATS:
        raise ValueError(
            f"--output={output!r}: a picture ends in {', '.join(FORMATS)}; give one of these"
        )
    if not path.parent.is_dir():
        raise ValueError(
            f"--output={output!r}: there is no folder {path.parent}; make it first"
        )
    schedule_figure(schedule, title).savefig(path, dpi=150)
