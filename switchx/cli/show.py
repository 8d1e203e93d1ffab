# SPDX-License-Identifier: Apache-2.0
"""`switchx show`: what a configuration means, drawn."""

import argparse

from switchx.cli import arguments as shared

DESCRIPTION = """\
Draws the schedule of a pipeline: which microbatch a stage runs forward (F) and backward (B)
in which tick, the share of time that is lost (the bubble), and how many inputs are kept.

  switchx show schedule --stages=4 --microbatches=8
  switchx show schedule --stages=4 --microbatches=8 --schedule=interleaved --chunks=2
  switchx show schedule --stages=4 --microbatches=8 --stacks=2     an encoder and a decoder
  switchx show schedule --stages=4 --microbatches=8 --output=1f1b.png

A letter after a microbatch's number is its chunk of an interleaved schedule.
"""
STACKS = ((" ",), ("encoder", "decoder"))


def add_command(commands) -> None:
    parser = shared.add_command(
        commands, "show", run, "draw the schedule of a pipeline", DESCRIPTION
    )
    parser.add_argument("what", choices=["schedule"], help="what to draw")
    number = {"type": int, "metavar": "N"}
    parser.add_argument("--stages", required=True, help="devices along `pipe`", **number)
    parser.add_argument("--microbatches", required=True, help="of one batch", **number)
    parser.add_argument(
        "--schedule",
        default="1f1b",
        choices=["gpipe", "1f1b", "interleaved"],
        help="default: 1f1b",
    )
    parser.add_argument("--chunks", default=1, help="of a stage, when interleaved", **number)
    parser.add_argument(
        "--stacks", type=int, choices=[1, 2], default=1, help="2 for an encoder-decoder"
    )
    shared.add_output(parser, "also draw it: .png, .svg or .pdf")
    shared.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from switchx.bench.report import Check, Report
    from switchx.partitioning.schedule import ScheduleSpec

    spec = ScheduleSpec(arguments.schedule, arguments.chunks)
    schedule = spec.build(arguments.stages, arguments.microbatches, arguments.stacks)
    row = summary(schedule)
    if not arguments.json:
        print("\n".join(table_lines(schedule)))
        print(f"\n{sentence(row)}")
    if arguments.output:
        _draw(schedule, sentence(row), arguments.output)
        if not arguments.json:
            print(arguments.output)
    if arguments.json:
        P, M, v = schedule.num_stages, schedule.num_microbatches, schedule.num_chunks
        formula = (P - 1) / (v * M + P - 1)
        check = Check("bubble_vs_formula", abs(row["bubble"] - formula), "<=1e-9")
        Report("show schedule", [row], [check]).print(as_json=True)
    return 0


def summary(schedule) -> dict:
    """The schedule in numbers, as one row of results."""
    time, free = schedule.time(), schedule.time_without_lock_step()
    return {
        "schedule": schedule.spec.kind,
        "stages": schedule.num_stages,
        "microbatches": schedule.num_microbatches,
        "chunks": schedule.num_chunks,
        "stacks": schedule.num_lanes,
        "ticks": schedule.num_ticks,
        "bubble": schedule.bubble(),
        "lock_step_adds": time / free - 1,
        "kept_inputs": sum(schedule.num_slots),
    }


def sentence(row: dict) -> str:
    """`1f1b, 4 stages, ...`: what `summary` says, in words."""
    return (
        f"{row['schedule']}, {row['stages']} stages, {row['microbatches']} microbatches: "
        f"{row['ticks']} ticks, bubble {row['bubble']:.1%} (B = 2 F), common ticks add "
        f"{row['lock_step_adds']:.1%}, at most {row['kept_inputs']} inputs kept a stage"
    )


def table_lines(schedule) -> list[str]:
    """A line a stage, stack and direction; a column a tick."""
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
    import pathlib

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
