# SPDX-License-Identifier: Apache-2.0
"""`switchx sweep`: a grid of configurations, each with several seeds, in one folder."""

import argparse
import sys

from switchx.cli import arguments as shared
from switchx.fields import json_text

DESCRIPTION = """\
Trains each configuration of a grid with each seed, as `switchx train` does, and says which has
the lowest validation loss at the end, and whether it is at the edge of the grid; it names none
if validation sets differ:

  switchx sweep --gin_file=configs/runs/pretrain_tiny.gin --gin.TRAIN_STEPS=100 \\
    --gin.LEARNING_RATE=0.3,1,3 --seeds=3 --output=sweeps/rate

A value with commas needs brackets or quotes of its own: --gin.NAME="(1, 2),(3, 4)" has two
values, --gin.NAME="'a,b'" has one.

The same command goes on where it was ended: finished cells are not run again, others resume
from their checkpoints. Values and seeds may be added. If a cell fails, it is named, its log is
in DIR/logs, the others go on, and the exit status is 1. `switchx report DIR/*=*` draws all
cells on one page, and says whether the seeds tell the best two apart.
"""

FLAGS = {
    "--seeds=N": "seeds of each configuration: its own, and the numbers that follow it",
    "--workers=N": "cells run at a time, each in its own process, on the same devices",
}


def add_command(commands) -> None:
    parser = shared.add_command(
        commands, "sweep", run, "train a grid of configurations with several seeds", DESCRIPTION
    )
    shared.add_gin_arguments(parser)
    shared.add_output(parser, "sweep folder, a run folder per cell", "DIR", required=True)
    shared.add_flags(parser, FLAGS, seeds=1, workers=1)
    shared.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    files, bindings, paths = shared.gin_of(arguments)
    from rich.console import Console
    from rich.table import Table

    from switchx import sweep as sweeps

    def note(line: str) -> None:
        print(f"sweep: {line}", file=sys.stderr)

    sweep = sweeps.parse_sweep(arguments.output, files, bindings, paths, arguments.seeds)
    cells = sweeps.cells_of(sweep)
    failed = sweeps.run_cells(
        sweep, cells, arguments.workers, note, has_traceback=arguments.traceback
    )
    rows = sweeps.table_of(sweep, cells)
    is_alike = sweeps.validates_alike(cells)
    optimum = sweeps.optimum_of(sweep, rows) if is_alike else None
    if arguments.json:
        found = {"command": "sweep", "results": rows, "optimum": optimum, "failed": failed}
        print(json_text(found))
        return int(bool(failed))
    table = Table(*sweep.axes, "seeds", "validation loss", "95% interval", box=None)
    for row in rows:
        done = f"{len(row['losses'])} of {arguments.seeds}"
        around = f"{row['low']:.4f} to {row['high']:.4f}" if len(row["losses"]) > 1 else ""
        numbers = f"{row['mean']:.4f}", around
        table.add_row(*row["values"].values(), done, *(numbers if row["losses"] else ()))
    Console(markup=False, highlight=False, soft_wrap=True).print(table)
    caution = "Validation sets differ (files, objective, vocabulary), so losses do not compare."
    print(sweeps.sentence_of(optimum) if is_alike else caution)
    return int(bool(failed))
