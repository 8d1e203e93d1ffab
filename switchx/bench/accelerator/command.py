# SPDX-License-Identifier: Apache-2.0
"""`switchx check accelerator`: runs parts in a budget of seconds; their rows and checks.

Only the standard library is imported before a part runs, in a process of its own: all parts
run even where gin, Grain or TFDS is missing, as on machines that cards are lent with.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import tomllib
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

from switchx.bench.accelerator.cards import REHEARSAL, Card, find_card
from switchx.bench.accelerator.parts import PARTS, REST, ROOT, ROW, Part
from switchx.bench.accelerator.records import RESULTS, Records, Row, of_part, read_results

SECONDS = 540
PREDICTIONS = tomllib.loads(pathlib.Path(__file__).with_name("predictions.toml").read_text())
# Seconds reserved for the last rows and the report.
RESERVE_S = 5
HELP = {
    "seconds": f"the budget of the call (default: {SECONDS})",
    "output": "a new folder: results.jsonl, what the profiler wrote, a log",
    "after": "the folder of an earlier call on the same card: what it measured is not measured "
    "again where its code is the same",
    "only": "names of parts, apart by commas",
    "ladder": "cells of `python -m experiments.card`, which --only=ladder trains",
    "rehearsal": "all parts on a CPU, with tiny shapes, through the same code",
}


def add_arguments(parser: argparse.ArgumentParser, positive) -> None:
    """Adds the arguments that both commands have."""
    parser.add_argument("--seconds", type=positive, metavar="N", help=HELP["seconds"])
    parser.add_argument("--output", metavar="DIR", help=HELP["output"])
    parser.add_argument("--after", metavar="DIR", help=HELP["after"])
    parser.add_argument("--only", metavar="PART,...", help=HELP["only"])
    parser.add_argument("--ladder", metavar="FILE", help=HELP["ladder"])
    parser.add_argument("--rehearsal", action="store_true", help=HELP["rehearsal"])


def report_of(arguments, note):
    """Runs what was asked for.

    Returns:
        The report, and the exit status: 1 where a check does not hold or a part failed.
    """
    if not arguments.output:
        raise ValueError("needs --output=DIR, a new folder for what is measured")
    outcome = run(
        arguments.output,
        seconds=SECONDS if arguments.seconds is None else arguments.seconds,
        only=arguments.only.split(",") if arguments.only else (),
        after=arguments.after,
        ladder=arguments.ladder,
        is_rehearsal=arguments.rehearsal,
        note=note,
    )
    from switchx.bench.accelerator.checks import BOUNDS, values_of
    from switchx.results import Check, Report

    is_judged = not arguments.rehearsal
    checks = [
        Check(name, value, BOUNDS[name], is_judged)
        for name, value in values_of(outcome.rows).items()
    ]
    for name, why in (outcome.left | outcome.failed).items():
        note(f"not done: {name}: {why}")
    if RESULTS not in outcome.failed:
        note(f"all rows are in {pathlib.Path(arguments.output) / RESULTS}")
    has_failed = outcome.failed or any(check.holds is False for check in checks)
    # A person has already read the rows as they came.
    rows = outcome.rows if arguments.json else []
    return Report("check accelerator", rows, checks), 1 if has_failed else 0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The results of one call.

    Attributes:
        rows: measured rows of all parts, with the rows of an earlier call.
        left: reasons why parts did not fit, by part.
        failed: reasons why parts ended before they were done, by part; `RESULTS` where that
            file could not be written.
    """

    rows: list[Row]
    left: dict[str, str]
    failed: dict[str, str]


def run(
    output: str | pathlib.Path,
    *,
    seconds: int = SECONDS,
    only: Sequence[str] = (),
    after: str | pathlib.Path | None = None,
    ladder: str | None = None,
    is_rehearsal: bool = False,
    note: Callable[[str], Any] = print,
) -> Outcome:
    """Measures what fits into `seconds`; the rest is left for a call with `after`.

    Args:
        output: a new or empty folder.
        only: names of parts; all others are left out.
        after: the folder of an earlier call on the same card. Cases whose part's code is
            unchanged are taken from it.
        ladder: the file of cells that the part `ladder` trains.

    Raises:
        ValueError: there is no card, or none that can run this; fewer seconds than the first
            part takes; an output folder with something in it, or that cannot be written; an
            earlier folder of another card, or that cannot be read.
    """
    deadline_s = time.time() + seconds - RESERVE_S
    card = Card(REHEARSAL) if is_rehearsal else find_card()
    wanted = parts_named(only)
    if ("ladder" in only) != (ladder is not None):
        raise ValueError(
            "--only=ladder and --ladder=FILE of `python -m experiments.card` go together; give "
            "both or none"
        )
    if ladder is not None and not zipfile.is_zipfile(ladder):
        raise ValueError(
            f"--ladder={ladder} is no file that `python -m experiments.card` wrote; give one"
        )
    if seconds < (least := wanted[0].seconds + RESERVE_S):
        raise ValueError(
            f"--seconds={seconds}: the first part, {wanted[0].name}, takes {least}; give at "
            f"least as many, {SECONDS} for all"
        )
    earlier = [] if after is None else read_results(after, card)
    left, failed = {}, {}
    with Records(output, card) as records:
        kept = {part.name: of_part(earlier, part) for part in PARTS}
        anew = [part for part in wanted if not (part.goes_on or is_done(kept[part.name]))]
        for part in PARTS:
            if part not in anew:
                records.write_all(kept[part.name])
        for i, part in enumerate(wanted):
            earlier_rows = kept[part.name]
            if is_done(earlier_rows) and not part.is_asked:  # which may be asked for more
                note(f"{part.name}: measured before")
                continue
            limit_s = limit_of(part, wanted[i + 1 :], deadline_s - time.time(), is_rehearsal)
            if limit_s is None:
                if part in anew:
                    records.write_all(earlier_rows)
                left[part.name] = f"takes {part.seconds} s, which are not left"
                note(f"{part.name}: {left[part.name]}")
                continue
            note(f"{part.name}, {limit_s:.0f} s at most, decides: {part.decides}")
            if why := measure(part, earlier_rows, limit_s, card, records, note, ladder):
                failed[part.name] = why
                note(f"{part.name}: {why}")
    if records.fault:
        failed[RESULTS] = f"cannot be written ({records.fault}); what was measured is said here"
    return Outcome(records.rows, left, failed)


def is_done(lines: list[Row]) -> bool:
    return any(line.get("status") == "done" for line in lines)


def limit_of(
    part: Part, following: Sequence[Part], left_s: float, is_rehearsal: bool
) -> float | None:
    """Seconds that a part may take: its own, plus those that earlier parts left over.

    None if too few are left; a rehearsal has no limits per part.
    """
    if is_rehearsal:
        return left_s if left_s > 0 else None
    if left_s < part.seconds:
        return None
    limit_s = left_s
    for other in following:
        if limit_s - other.seconds >= part.seconds:
            limit_s -= other.seconds
    return limit_s


def measure(
    part: Part,
    earlier_rows: list[Row],
    limit_s: float,
    card: Card,
    records: Records,
    note: Callable[[str], Any],
    ladder: str | None = None,
) -> str | None:
    """Runs a part except the cases measured before; returns None, or why it is not done."""
    settings = {
        "run": part.run,
        "is_rehearsal": card.is_rehearsal,
        "output": str(records.folder.absolute()),
        "done": done_before(part, earlier_rows, records),
        "rates": records.rates(),
        "limit_s": limit_s,
        "ladder": ladder and str(pathlib.Path(ladder).absolute()),
    }
    labels, start_s = {"part": part.name, "code": part.code}, time.time()

    def take(row: Row) -> None:
        row = labels | {"predicted": predicted(card.name, part.name, row["case"])} | row
        records.write(row)
        note(told(row))

    why = run_part(settings, limit_s, records.log, take)
    took = {"seconds": round(time.time() - start_s, 1), "status": why or "done"}
    records.write(labels | took)
    return why


def predicted(card: str, part: str, case: str) -> float | None:
    """The predicted value, in the unit of the row; None if there is none."""
    if card not in PREDICTIONS:
        return None
    tables = (PREDICTIONS[each].get(part, {}) for each in (card, "Hopper"))
    return next((table[case] for table in tables if case in table), None)


def done_before(part: Part, earlier_rows: list[Row], records: Records) -> list[str]:
    """Cases that need not be measured again: a part's own, and tests that another part ran."""
    done = [row["case"] for row in earlier_rows if row.get("measured") is not None]
    if part.name == REST:
        done += [row["case"] for row in records.rows if row["unit"] == "test"]
    return done


def run_part(
    settings: dict[str, Any], limit_s: float, log: pathlib.Path, take: Callable[[Row], None]
) -> str | None:
    """Runs a part in a process of its own; None if it ended well, else why not."""
    is_rehearsal = settings["is_rehearsal"]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu" if is_rehearsal else "cuda,cpu",
        # PyTorch's process needs some of the card's memory, too.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    words = [sys.executable, "-m", "switchx.bench.accelerator.parts", json.dumps(settings)]
    begin = log.stat().st_size if log.exists() else 0
    is_over = threading.Event()
    process = None

    def end() -> None:
        is_over.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(min(limit_s, threading.TIMEOUT_MAX), end)
    # When this process ends, it ends the part, too, which would otherwise keep the card.
    handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with log.open("ab") as errors:
            process = subprocess.Popen(
                words,
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        timer.start()
        for line in process.stdout:
            if line.startswith(ROW):
                take(json.loads(line.removeprefix(ROW)))
        status = process.wait()
    finally:
        signal.signal(signal.SIGTERM, handler)
        timer.cancel()
        if process is not None and process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if is_over.is_set():
        return f"was ended after {limit_s:.0f} s; its other cases are left for a next call"
    if status:
        lines = log.read_bytes()[begin:].decode(errors="replace").strip().splitlines()
        return f"ended with status {status}: {lines[-1] if lines else 'it said nothing'}"
    return None


def told(row: Row) -> str:
    """A row as a line: what was predicted, what was measured, their ratio."""
    measured, expected = row["measured"], row["predicted"]
    if measured is None:
        return f"  {row['case']}: not measured: {row.get('why')}"
    text = measured if isinstance(measured, str) else f"{measured:.4g}"
    if expected is None or isinstance(measured, str):
        return f"  {row['case']}: {text} {row['unit']}"
    ratio = f", ratio {measured / expected:.2f}" if expected else ""
    return f"  {row['case']}: {text} {row['unit']}, predicted {expected:.4g}{ratio}"


def parts_named(names: Sequence[str]) -> list[Part]:
    """The parts of these names, in their order; all of them without names."""
    known = [part.name for part in PARTS]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--only={','.join(unknown)}: no such part; use {', '.join(known)}")
    return [part for part in PARTS if part.name in names or not (names or part.is_asked)]
