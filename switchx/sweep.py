# SPDX-License-Identifier: Apache-2.0
"""Sweeps: a grid of configurations, each trained with several seeds, and the best of them.

A cell of the grid is one configuration with one seed. It is trained as `switchx train` does it,
in a run folder of its own below the sweep's: a cell that is done is not run again, and one that
was killed goes on from its checkpoint.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from switchx.analysis.comparison import shown
from switchx.analysis.intervals import Interval, interval_of, paired
from switchx.analysis.routing import read_lines
from switchx.checkpoint.run_folder import RunFolder
from switchx.fields import describe, require
from switchx.files import write_atomically
from switchx.gin_config import gin_internals
from switchx.gin_config.building import job_from_gin, operative_config, parse_job
from switchx.jobs import train
from switchx.training.job import TrainingJob
from switchx.training.resume import check_same_run

POLL_S = 0.1


def split_values(text: str) -> list[str]:
    """Splits at commas outside of brackets and quotes: `1,(2, 3),'a,b'` has three values."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote or character in "'\"":
            quote = "" if character == quote else quote or character
        else:
            depth += (character in "([{") - (character in ")]}")
        if character == "," and not (depth or quote):
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A grid over what gin files describe.

    Attributes:
        gin_files, search_paths: arguments of `switchx.job_from_gin`.
        bindings: bindings of all cells, as `TRAIN_STEPS=100`.
        axes: values of each name that has several.
        num_seeds: number of seeds: the configuration's own and those that follow it.
    """

    gin_files: Sequence[str]
    bindings: Sequence[str]
    axes: dict[str, list[str]]
    num_seeds: int = 1
    search_paths: Sequence[str] = ()


def parse_sweep(
    gin_files: Sequence[str],
    bindings: Sequence[str],
    search_paths: Sequence[str] = (),
    num_seeds: int = 1,
) -> Sweep:
    """The sweep of bindings such as `LEARNING_RATE=0.1,0.3`, split by `split_values`.

    Raises:
        ValueError: there is one configuration with one seed, a name is given twice, a value is
            empty or given twice, or seeds are given as values.
    """
    axes, common, names = {}, [], set()
    for binding in bindings:
        name, _, text = binding.partition("=")
        require(name not in names, f"--gin.{name} is given twice; give all its values at once")
        names.add(name)
        values = split_values(text)
        if len(values) == 1:
            common.append(binding)
            continue
        require(name != "SEED", "--gin.SEED has several values; use --seeds=N instead")
        is_clear = all(values) and len({*values}) == len(values)
        require(is_clear, f"--gin.{name}={text} has an empty value, or one twice; take it out")
        axes[name] = values
    require(
        bool(axes) or num_seeds > 1,
        "nothing is swept over: give a name several values, as --gin.LEARNING_RATE=0.1,0.3, or "
        "several seeds, as --seeds=3",
    )
    return Sweep(gin_files, common, axes, num_seeds, search_paths)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One configuration with one seed.

    Attributes:
        point: value of each axis.
        run: its run folder, named by the point and the seed.
        bindings: all its bindings.
    """

    point: tuple[str, ...]
    seed: int
    run: RunFolder
    bindings: Sequence[str]
    job: TrainingJob

    @property
    def name(self) -> str:
        return self.run.root.name

    @property
    def log(self) -> pathlib.Path:
        """What its training printed, or how it failed."""
        return self.run.root.parent / "logs" / f"{self.name}.log"

    @property
    def loss(self) -> float | None:
        """Validation loss after the last step, in nats a token, NaN where it is not finite; None
        until that step is saved."""
        step = self.job.train_steps
        if not ((self.run.checkpoints / str(step)).is_dir() and self.run.validation.exists()):
            return None
        *_, last = read_lines(self.run.validation)
        value = last["neg_log_perplexity"]
        return None if last["step"] != step else math.nan if value is None else -value


def cells_of(sweep: Sweep, output: pathlib.Path) -> list[Cell]:
    """All cells, those with the first seed first; every job is built, and nothing is written.

    Raises:
        ValueError: a configuration cannot be built, two are the same, or `output` is not a new
            folder, an empty one, or that of this sweep with other values or fewer seeds.
    """
    _require_folder(sweep, output)
    cells, known = [], {}
    for k, values in itertools.product(
        range(sweep.num_seeds), itertools.product(*sweep.axes.values())
    ):
        own = [f"{name}={value}" for name, value in zip(sweep.axes, values, strict=True)]
        bindings = [*sweep.bindings, *own]
        job = job_from_gin(sweep.gin_files, bindings, sweep.search_paths)
        if k:
            others = [each for each in bindings if not each.startswith("SEED=")]
            bindings = [*others, f"SEED={job.seed + k}"]
            job = job_from_gin(sweep.gin_files, bindings, sweep.search_paths)
        name = _folder_name([*own, f"seed={job.seed}"])
        other = known.setdefault(json.dumps(describe(job)), name)
        require(other == name, f"{other} and {name} are the same configuration; drop a value")
        run = RunFolder(output / name)
        if run.is_begun:
            check_same_run(run, job)
        cells.append(Cell(values, job.seed, run, bindings, job))
    return cells


def _require_folder(sweep: Sweep, output: pathlib.Path) -> None:
    run, file = RunFolder(output), output / "sweep.json"
    if file.exists():
        found, mine = json.loads(file.read_text(encoding="utf-8")), _identity(sweep)
        different = [
            f"{n}: {found.get(n)} there, {mine[n]} here"
            for n in mine
            if found.get(n) != mine[n]
        ]
        require(
            not different,
            f"--output={output} is the folder of another sweep ({'; '.join(different)}); give "
            "another one. Values and seeds may be added, all else is as it was",
        )
    else:
        is_free = run.found() in ("nothing is there", "empty")
        require(
            is_free, f"--output={output} is no folder of a sweep: {run.found()}; give a new one"
        )


def _identity(sweep: Sweep) -> dict[str, Any]:
    """What all cells of a folder have in common."""
    described = {n: [*getattr(sweep, n)] for n in ("gin_files", "search_paths", "bindings")}
    return described | {"axes": sorted(sweep.axes)}


def _folder_name(words: Sequence[str]) -> str:
    """Words as a folder's name; what has no place there is a digest."""
    text = ",".join(words)
    plain = re.sub(r"[^\w.,=+-]+", "-", text)[:100]
    return (
        plain if plain == text else f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    )


def run_cells(
    sweep: Sweep,
    output: pathlib.Path,
    cells: Sequence[Cell],
    workers: int,
    note: Callable[[str], None],
) -> dict[str, str]:
    """Trains the cells that are not done, each in turn in this process, or in several.

    A cell that fails leaves how in its log, and others go on. `KeyboardInterrupt` ends all;
    those that run save their states first.

    Returns:
        What went wrong, by the name of the cell.
    """
    write_atomically(output / "sweep.json", (json.dumps(_identity(sweep)) + "\n").encode())
    (output / "logs").mkdir(exist_ok=True)
    waiting = [cell for cell in cells if cell.loss is None]
    note(f"{len(cells)} cells, {len(cells) - len(waiting)} of them done before")
    failed = {}

    def ended(cell: Cell, error: str) -> None:
        if cell.loss is None:
            failed[cell.name] = error or "it was ended before its last step"
            note(f"{cell.name} failed: {failed[cell.name]}; {cell.log} has all of it")
        else:
            note(f"{cell.name}: validation loss {cell.loss:.4f}")

    if workers == 1:
        for cell in waiting:
            note(cell.name)
            ended(cell, _train_here(sweep, cell))
        return failed
    running: list[tuple[Cell, subprocess.Popen]] = []
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                running.append((waiting[0], _started(sweep, waiting.pop(0), workers)))
            time.sleep(POLL_S)
            for cell, process in [each for each in running if each[1].poll() is not None]:
                running.remove((cell, process))
                said = cell.log.read_text(errors="replace").split("\n")
                *_, last = ["no word", *filter(None, said)]
                ended(
                    cell,
                    f"exit status {status}: {last}" if (status := process.returncode) else "",
                )
    finally:
        for _, process in running:
            process.terminate()  # it saves
        for _, process in running:
            process.wait()
    return failed


def _train_here(sweep: Sweep, cell: Cell) -> str:
    """Trains a cell in this process; returns what went wrong, or nothing."""
    try:
        with gin_internals.restored():
            job = parse_job(sweep.gin_files, cell.bindings, sweep.search_paths)
            train(job, cell.run.path, configuration=operative_config("JOB"))
    except Exception as error:  # whatever it is, the other cells are of use
        cell.log.write_text(traceback.format_exc(), encoding="utf-8")
        return f"{type(error).__name__}: {error}"
    return ""


def _started(sweep: Sweep, cell: Cell, workers: int) -> subprocess.Popen:
    """A process that trains a cell and takes no Ctrl-C of this terminal."""
    paths = [f"--gin_search_paths={','.join(sweep.search_paths)}"] if sweep.search_paths else []
    words = [
        *(f"--gin_file={file}" for file in sweep.gin_files),
        *(f"--gin.{binding}" for binding in cell.bindings),
        *(*paths, f"--model_dir={cell.run.path}"),
    ]
    # JAX would take most of a GPU's memory for each process.
    share = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / workers:.2f}"}
    with cell.log.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "switchx", "train", *words],
            env=share | os.environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def table_of(sweep: Sweep, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """A row a configuration: its values, and of the seeds that are done the losses by seed and
    their `mean`, with the 95% interval `low` to `high`."""
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for cell in cells:
        values = dict(zip(sweep.axes, cell.point, strict=True))
        row = rows.setdefault(cell.point, {"values": values, "losses": {}})
        if (loss := cell.loss) is not None:
            row["losses"][cell.seed] = loss
    for row in rows.values():
        around = interval_of([*row["losses"].values()] or [math.nan])
        row |= dataclasses.asdict(around)
    return [*rows.values()]


def optimum_of(sweep: Sweep, rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The row of the lowest mean among those whose seeds are all done, with finite losses.

    `places` has where it stands on each axis: `interior` where rows with a smaller and a larger
    value and all else the same are worse, else `edge`, or `unordered` where values are no
    numbers. `second` is the next best row, `lead` its losses less the optimum's, paired by seed.
    Returns None where no row is finished.
    """
    finished = [r for r in rows if len(r["losses"]) == sweep.num_seeds]
    finished = sorted(
        (r for r in finished if math.isfinite(r["mean"])), key=lambda r: r["mean"]
    )
    if not finished:
        return None
    best, *others = finished
    found = best | {"places": {name: _place(name, best, others) for name in sweep.axes}}
    if others:
        lead = paired(*([*row["losses"].values()] for row in (others[0], best)))
        found |= {"second": others[0], "lead": dataclasses.asdict(lead)}
    return found


def _place(name: str, best: dict[str, Any], others: Sequence[dict[str, Any]]) -> str:
    mine = best["values"]
    beside = [r["values"] for r in others if r["values"] | {name: mine[name]} == mine]
    try:
        x, *theirs = (float(values[name]) for values in (mine, *beside))
    except ValueError:
        return "unordered"
    return "interior" if theirs and min(theirs) < x < max(theirs) else "edge"


_PLACES = {
    "interior": "inside the grid",
    "edge": "at the edge of what is finished, so try values beyond it",
    "unordered": "not numbers, so there is no edge",
}


def sentence_of(optimum: dict[str, Any] | None) -> str:
    """What came of a sweep, for a person."""
    if optimum is None:
        return "No configuration is finished with a finite loss."

    def named(row: dict[str, Any]) -> str:
        return ", ".join(f"{name}={value}" for name, value in row["values"].items())

    places = "".join(f"; {n}: {_PLACES[place]}" for n, place in optimum["places"].items())
    own = Interval(optimum["mean"], optimum["low"], optimum["high"])
    text = (
        f"Lowest validation loss: {shown(own)} at {named(optimum) or 'the one point'}{places}."
    )
    if "second" not in optimum:
        return text
    lead = Interval(**optimum["lead"])
    told = "told" if lead.low < lead.high and lead.excludes(0) else "not told"
    return f"{text} Next is {named(optimum['second'])}, {shown(lead)} above: {told} apart by the seeds."
