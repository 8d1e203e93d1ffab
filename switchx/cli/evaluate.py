# SPDX-License-Identifier: Apache-2.0
"""`switchx eval`: the validation metrics of a trained model."""

import json

from rich.console import Console
from rich.table import Table

from switchx.cli import arguments as shared
from switchx.training.loop import evaluate_job
from switchx.training.program import TrainingProgram
from switchx.training.restore import choose_step, restore_params
from switchx.training.run_config import check_same_run
from switchx.training.run_folder import RunFolder

DESCRIPTION = """\
Evaluates the newest complete checkpoint of a run folder on the validation split of the gin
files' task: negative log perplexity, accuracy, dropped tokens and load per Switch layer.

  switchx eval --gin_file=configs/runs/pretrain_tiny.gin --model_dir=DIR
  switchx eval --gin_file=configs/runs/pretrain_tiny.gin --model_dir=DIR --step=best --json
"""


def add_command(commands) -> None:
    parser = shared.add_command(commands, "eval", run, "evaluate a trained model", DESCRIPTION)
    shared.add_gin_arguments(parser)
    shared.add_model_dir(parser, "run folder of `switchx train`")
    parser.add_argument(
        "--step",
        default=None,
        metavar="N|best",
        help="checkpoint to evaluate; default: the newest",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments) -> int:
    job = shared.parse_job(arguments)
    folder = RunFolder(arguments.model_dir)
    check_same_run(folder, job)
    step = choose_step(folder, _step(arguments.step))
    program = TrainingProgram(job)
    with program.scope():
        params = restore_params(folder.root, step, target=program.restore_target().params)
        metrics = {"step": step} | evaluate_job(job, program, params)
    if arguments.json:
        print(json.dumps(metrics))
        return 0
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in metrics.items():
        if isinstance(value, int | float):
            table.add_row(name, f"{value:,}" if isinstance(value, int) else f"{value:.4f}")
    Console(highlight=False).print(table)
    return 0


def _step(text: str | None) -> int | str | None:
    if text is None or text == "best":
        return text
    if not text.isdecimal():
        raise ValueError(f"--step={text}; use a step's number, or best")
    return int(text)
