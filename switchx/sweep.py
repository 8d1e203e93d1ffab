# SPDX-License-Identifier: Apache-2.0
"""Sweeps: a grid of configurations, each trained with several seeds, and the best of them.

A cell of the grid is one configuration with one seed. It is trained as by `switchx train`, in
its own run folder below the sweep's: a cell that is done is not run again, and one that was
killed resumes from its checkpoint.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import os
import pathlib
import subprocess
import sys
import time
import traceback
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any

import jax

from switchx.analysis.comparison import Interval, interval_of, shown
from switchx.checkpoint.restore import checkpoint_paths
from switchx.checkpoint.run_folder import RunFolder
from switchx.data.mixtures import evaluated_tasks
from switchx.fields import describe, require
from switchx.files import write_atomically
from switchx.gin_config import gin_internals
from switchx.gin_config.building import job_from_gin, operative_config, parse_job
from switchx.gin_config.taken_settings import name_of
from switchx.jobs import train
from switchx.progress import is_for_a_person
from switchx.training.job import TrainingJob
from switchx.training.resume import check_same_run
from switchx.training.telemetry.metrics import logged_lines

POLL_S = 0.1


def split_values(text: str) -> list[str]:
    """Splits at commas outside brackets and quotes: `1,(2, 3),'a,b'` has three values."""
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
    require(
        len(parts) == text.count(",") + 1 or not (depth or quote),
        f"{text} has a bracket or a quote that is not closed; close it",
    )
    return [part.strip() for part in parts]


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A grid over the configurations that gin files describe.

    Attributes:
        output: folder of the sweep, with `sweep.json`, `logs/`, and a run folder per cell.
        gin_files, search_paths: arguments of `switchx.job_from_gin`.
        bindings: bindings of all cells, such as `TRAIN_STEPS=100`.
        axes: values of each name that has several.
        num_seeds: number of seeds: the configuration's own and the ones after it.
    """

    output: pathlib.Path
    gin_files: Sequence[str]
    bindings: Sequence[str]
    axes: dict[str, list[str]]
    num_seeds: int = 1
    search_paths: Sequence[str] = ()

    @property
    def common(self) -> dict[str, Any]:
        """What all cells of the folder have in common."""
        mine = {n: [*getattr(self, n)] for n in ("gin_files", "search_paths", "bindings")}
        return mine | {"axes": sorted(self.axes), "order": [*self.axes]}


def parse_sweep(
    output, gin_files: Sequence[str], bindings: Sequence[str], search_paths=(), num_seeds=1
) -> Sweep:
    """The sweep of bindings such as `LEARNING_RATE=0.1,0.3`, split by `split_values`.

    Raises:
        ValueError: there is one configuration with one seed, a name is given twice, a value is
            empty or given twice, or seeds are given as values.
    """
    axes, common = {}, {}
    for binding in bindings:
        name, _, text = binding.partition("=")
        require(name not in axes | common, f"--gin.{name} is given twice; give it once")
        if len(values := split_values(text)) == 1:
            common[name] = binding
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
    output = pathlib.Path(output).expanduser()
    order = _settings(output).get("order")
    if isinstance(order, list) and sorted(order) == sorted(axes):
        axes = {name: axes[name] for name in order}  # the order in which cells are named
    return Sweep(output, gin_files, [*common.values()], axes, num_seeds, search_paths)


def _settings(output: pathlib.Path) -> dict[str, Any]:
    """What a sweep's folder records that its cells have in common; empty without a folder.

    Raises:
        ValueError: the file cannot be read.
    """
    if not (file := output / "sweep.json").exists():
        return {}
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} cannot be read ({error}); give another --output") from None


@dataclasses.dataclass(frozen=True)
class Cell:
    """One configuration with one seed.

    Attributes:
        values: value of each axis.
        name: name of its run folder: the values and the seed.
        log: file with its training's output, if it failed or was a process.
        bindings: all of its bindings.
    """

    values: tuple[str, ...]
    seed: int
    name: str
    run: RunFolder
    log: pathlib.Path
    bindings: Sequence[str]
    job: TrainingJob

    @property
    def loss(self) -> float | None:
        """Validation loss after the last step, in nats per token; NaN where it is not finite or
        training diverged earlier.

        It is None until that step is saved.
        """
        step = self.job.train_steps
        *_, last = [{"step": None}, *logged_lines(self.run.validation, step)]
        if last["step"] != step or not (self.run.checkpoints / str(step)).is_dir():
            return math.nan if self.is_diverged else None
        value = last["neg_log_perplexity"]
        return math.nan if value is None else -value

    @property
    def is_diverged(self) -> bool:
        """Whether the newest checkpoint is one from which training does not go on."""
        newest = [path.name for path in checkpoint_paths(self.run.checkpoints)[:1]]
        skipped = [self.run.skipped_batches / f"{step}.0.json" for step in newest]
        in_a_row = [
            json.loads(x.read_text()).get("in_a_row", 0) for x in skipped if x.is_file()
        ]
        return max(in_a_row, default=0) >= self.job.max_skipped_in_a_row


def cells_of(sweep: Sweep) -> list[Cell]:
    """All cells, those with the first seed first; builds every job, but writes nothing.

    Raises:
        ValueError: a configuration cannot be built, two are the same, or the folder is neither
            new, nor empty, nor this sweep's with other values or seeds.
    """
    output = sweep.output
    if found := _settings(output):
        common = sweep.common | {"order": found.get("order")}  # any order is accepted
        other = {name: v for name, v in found.items() if common.get(name) != v}
        require(
            not other,
            f"--output={output} is the folder of another sweep, with {other}; give another "
            "one. Values and seeds may be added, all else is as it was",
        )
    elif (state := RunFolder(output).found()) not in ("nothing is there", "empty"):
        raise ValueError(f"--output={output} is no folder of a sweep: {state}; give a new one")
    cells, names = [], {}
    points = [*itertools.product(*sweep.axes.values())]
    for k, values in itertools.product(range(sweep.num_seeds), points):
        own = [f"{name}={value}" for name, value in zip(sweep.axes, values, strict=True)]
        bindings = [*sweep.bindings, *own]
        job = job_from_gin(sweep.gin_files, bindings, sweep.search_paths)
        if k:
            bindings = [each for each in bindings if name_of(each) != "SEED"]
            bindings.append(f"SEED={job.seed + k}")
            job = job_from_gin(sweep.gin_files, bindings, sweep.search_paths)
        # A slash becomes %2F.
        name = urllib.parse.quote(",".join([*own, f"seed={job.seed}"]), safe="=,+")
        if len(name) > 240:  # file systems allow 255 bytes
            name = f"{name[:200]}...{hashlib.sha256(name.encode()).hexdigest()[:16]}"
        # 1 and 1.0 are the same in training.
        same = jax.tree.map(lambda x: float(x) if type(x) is int else x, describe(job))
        same = names.setdefault(json.dumps(same), name)
        require(same == name, f"{same} and {name} are the same configuration; drop a value")
        if (run := RunFolder(output / name)).is_begun:
            check_same_run(run, job)
        log = output / f"logs/{name}.log"
        cells.append(Cell(values, job.seed, name, run, log, bindings, job))
    return cells


def run_cells(
    sweep: Sweep,
    cells: Sequence[Cell],
    workers: int,
    note: Callable[[str], None],
    *,
    has_traceback: bool = False,
) -> dict[str, str]:
    """Trains the cells that are not done, one after another here or several in processes.

    A cell that fails leaves the reason in its log: a paragraph, as from a command, or a
    traceback with `has_traceback` or where the error is not meant for people. Others go on; a
    cell that another process trains fails, and is left to it. `KeyboardInterrupt` ends all, as
    does the end of this process; running cells save their states first.

    Returns:
        Descriptions of what went wrong, by the cell's name.
    """
    write_atomically(sweep.output / "sweep.json", f"{json.dumps(sweep.common)}\n".encode())
    (sweep.output / "logs").mkdir(exist_ok=True)
    waiting = [cell for cell in cells if cell.loss is None]
    failed = {}
    note(f"{len(cells)} cells, {len(cells) - len(waiting)} of them done before")

    def is_free(cell: Cell) -> bool:
        try:
            with cell.run.locked() if cell.run.root.exists() else contextlib.nullcontext():
                return True
        except ValueError as error:  # another process trains it
            failed[cell.name] = str(error)
            note(f"{cell.name}: failed: {error}")
            return False

    def ended(cell: Cell) -> None:
        if (loss := cell.loss) is not None:
            why = f" (it diverged: {cell.log})" * cell.is_diverged
            note(f"{cell.name}: validation loss {loss:.4f}{why}")
            return
        lines = cell.log.read_text(errors="replace").splitlines() if cell.log.exists() else []
        failed[cell.name] = lines[-1] if lines else "it ended before its last step"
        note(f"{cell.name}: failed: {failed[cell.name]} (all of it: {cell.log})")

    if workers == 1:
        for cell in filter(is_free, waiting):
            note(cell.name)
            _train_here(sweep, cell, has_traceback=has_traceback)
            ended(cell)
        return failed
    running: list[tuple[Cell, subprocess.Popen]] = []
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                if is_free(cell := waiting.pop(0)):
                    process = _started(sweep, cell, workers, has_traceback=has_traceback)
                    running.append((cell, process))
            time.sleep(POLL_S)
            for cell, process in [each for each in running if each[1].poll() is not None]:
                running.remove((cell, process))
                process.stdin.close()
                ended(cell)
    finally:
        for _, process in running:
            process.terminate()  # it saves
        for _, process in running:
            process.wait()
    return failed


def _train_here(sweep: Sweep, cell: Cell, *, has_traceback: bool) -> None:
    """Trains a cell in this process."""
    try:
        with gin_internals.restored():
            job = parse_job(sweep.gin_files, cell.bindings, sweep.search_paths)
            train(job, cell.run.path, configuration=operative_config("JOB"))
    except Exception as error:  # whatever it is, the other cells are still useful
        is_short = is_for_a_person(error) and not has_traceback
        text = f"switchx train: error: {error}\n" if is_short else traceback.format_exc()
        with cell.log.open("a", encoding="utf-8") as log:
            log.write(text)


def _started(
    sweep: Sweep, cell: Cell, workers: int, *, has_traceback: bool
) -> subprocess.Popen:
    """A process that trains a cell, ignores this terminal's Ctrl-C and ends with this one."""
    given = {
        "--gin_file": sweep.gin_files,
        "--gin_search_paths": [",".join(sweep.search_paths)],
    }
    words = [f"{option}={value}" for option, values in given.items() for value in values]
    words += [*(f"--gin.{each}" for each in cell.bindings), f"--model_dir={cell.run.path}"]
    words += ["--stop_with_stdin", *["--traceback"] * has_traceback]
    # By default, JAX takes most of a GPU's memory for each process.
    share = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / workers:.2f}"}
    with cell.log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "switchx", "train", *words],
            **dict(stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True),
            env=share | os.environ,
        )


def table_of(sweep: Sweep, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """A row per configuration: its values, the losses of finished seeds, and the 95% interval
    over them (`mean`, `low`, `high`)."""
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for cell in cells:
        values = dict(zip(sweep.axes, cell.values, strict=True))
        row = rows.setdefault(cell.values, {"values": values, "losses": {}})
        if (loss := cell.loss) is not None:
            row["losses"][cell.seed] = loss
    for row in rows.values():
        around = interval_of([*row["losses"].values()] or [math.nan])
        row |= dataclasses.asdict(around)
    return [*rows.values()]


def validates_alike(cells: Sequence[Cell]) -> bool:
    """Whether all cells are evaluated on the same examples in the same tokens."""
    read = [
        [(t.corpus, t.evaluation_split, t.objective, t.vocabulary) for t in tasks]
        for tasks in (evaluated_tasks(cell.job.source) for cell in cells)
    ]
    return all(each == read[0] for each in read)


def optimum_of(sweep: Sweep, rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The row with the lowest mean among those whose seeds are all done, with finite losses.

    `places` has its position on each axis: `interior` where rows whose seeds are all done, with
    a smaller and a larger value and the rest the same, are worse (as diverged ones are), else
    `edge`; `unordered` where values are not numbers. It is None where there is no such row.
    """
    done = [row for row in rows if len(row["losses"]) == sweep.num_seeds]
    best, *others = sorted(done, key=_mean_or_worst) or [{"mean": math.inf}]
    if not math.isfinite(best["mean"]):
        return None
    return best | {"places": {name: _place(name, best, others) for name in sweep.axes}}


def _mean_or_worst(row: dict[str, Any]) -> float:
    """A key for sorting: a row's mean, with NaN after all others."""
    return row["mean"] if math.isfinite(row["mean"]) else math.inf


def _place(name: str, best: dict[str, Any], others: Sequence[dict[str, Any]]) -> str:
    mine = best["values"]
    beside = [r["values"] for r in others if r["values"] | {name: mine[name]} == mine]
    try:
        x, *theirs = (float(values[name]) for values in (mine, *beside))
    except ValueError:
        return "unordered"
    return "interior" if theirs and min(theirs) < x < max(theirs) else "edge"


def sentence_of(optimum: dict[str, Any] | None) -> str:
    """The outcome of a sweep, in a sentence for people."""
    if optimum is None:
        return "No configuration is finished with a finite loss."
    at = ", ".join(f"{name}={value}" for name, value in optimum["values"].items())
    own = Interval(optimum["mean"], optimum["low"], optimum["high"])
    words = {
        "interior": "inside the grid",
        "edge": "at the grid's edge, so try values beyond it,",
        "unordered": "without an order",
    }
    places = "".join(f"; {words[place]} in {n}" for n, place in optimum["places"].items())
    return f"Lowest validation loss: {shown(own)}{' at ' * bool(at)}{at}{places}."
