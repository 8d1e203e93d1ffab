# SPDX-License-Identifier: Apache-2.0
"""The part of `check accelerator` that asks NVIDIA's profiler what the warps wait for.

Nsight Compute (`ncu`) samples the warps of four kernels. What it wrote is kept, packed, with
the machine code; the rows are each kernel's reasons to stall, by share of the samples, and the
instructions at which most of them were taken.
"""

import csv
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.bench.cells import Cell
from pallas_kernels.mosaic_gpu import Mosaic
from switchx.bench.accelerator.kernels import TimedProduct
from switchx.bench.accelerator.parts import ROOT, Session, row

# (bits, rows of each expert); None is bfloat16.
KERNELS = ((None, 4), (8, 4), (4, 4), (4, 16))
KEPT = "profile.tar.gz"
STALLED = "stall_"
MOST_LINES = 12  # of a kernel's instructions
SECONDS = 40


def products(session: Session) -> list[TimedProduct]:
    E, D, F = session.sized((32, 1024, 4096), (2, 512, 128))
    kernels = session.sized(KERNELS, KERNELS[1:2])
    return [TimedProduct(Cell(D, F, E, E, rows), bits) for bits, rows in kernels]


def run_once(session: Session) -> None:
    """Runs each kernel once: the program that the profiler watches."""
    mosaic = Mosaic(session.is_rehearsal)
    for each in products(session):
        x_RD = jax.random.normal(jax.random.key(0), (each.cell.R, each.cell.D), "bfloat16")
        function = jax.jit(each.function(mosaic))
        sizes_E = jax.numpy.asarray(each.cell.group_sizes())
        jax.block_until_ready(function(x_RD, each.weight_sets()[0], sizes_E))


def profile(session: Session) -> Iterator[dict[str, Any]]:
    """Rows of each kernel, and the packed output of profiler and disassembler."""
    program = [sys.executable, "-m", "switchx.bench.accelerator.profile"]
    program += ["rehearsal"] if session.is_rehearsal else []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dump = {"MOSAIC_GPU_DUMP_TO": name, "MOSAIC_GPU_DUMP_SASS": "1"}
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        # The profiler slows down what it watches: the machine code is written separately.
        _run(program, environment | dump)
        yield row("machine code", len(list(folder.glob("*.sass*"))), "files")
        if (ncu := shutil.which("ncu")) is None:
            yield row("profiler", None, "samples", why="no ncu on the path")
        else:
            report = folder / "kernels.ncu-rep"
            options = ["--clock-control", "none", "--kernel-name", "regex:grouped_matmul"]
            for section in ("SourceCounters", "WarpStateStats", "SpeedOfLight", "LaunchStats"):
                options += ["--section", section]
            output = _run([ncu, *options, "-f", "-o", str(report), *program], environment)
            (folder / "ncu.log").write_text(output)
            pages = {}
            for page in ("source", "details"):
                words = [ncu, "--import", str(report), "--page", page, "--csv"]
                pages[page] = _run(words, environment)
                (folder / f"{page}.csv").write_text(pages[page])
            found = stalls(pages["source"])
            if not found:
                yield row("profiler", None, "samples", why=output[-300:] or "no samples")
            for each, kernel in zip(products(session), found, strict=False):
                yield from rows_of_kernel(each.case, kernel)
        with tarfile.open(session.output / KEPT, "w:gz") as kept:
            for file in sorted(folder.iterdir()):
                kept.add(file, file.name)


def _run(words: list[str], environment) -> str:
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    return done.stdout if done.returncode == 0 else done.stdout + done.stderr


def stalls(source_page: str) -> list[list[dict[str, str]]]:
    """The instructions of each kernel, as rows of the profiler's page `source`.

    A table begins with the row that names its columns, among them `Source`.
    """
    kernels, columns = [], []
    for cells in csv.reader(io.StringIO(source_page)):
        if "Source" in cells:
            columns = cells
            kernels.append([])
        elif columns and len(cells) == len(columns):
            kernels[-1].append(dict(zip(columns, cells, strict=True)))
    return [each for each in kernels if each]


def rows_of_kernel(case: str, instructions: list[dict[str, str]]) -> Iterator[dict[str, Any]]:
    """Shares of the samples by reason, and the instructions with most of them."""
    # Beside each is a column of the samples in which no warp was issued.
    reasons = [name for name in instructions[0] if re.fullmatch(rf"{STALLED}\w+", name)]
    counted = [{name: _number(each[name]) for name in reasons} for each in instructions]
    total = sum(sum(each.values()) for each in counted)
    if not total:
        yield row(f"{case}: stalls", None, "share", why="no samples")
        return
    shares = {name: sum(each[name] for each in counted) / total for name in reasons}
    for name, share in sorted(shares.items(), key=lambda item: -item[1]):
        if share >= 0.01:
            yield row(f"{case}: {name.removeprefix(STALLED)}", share, "share of samples")
    ranked = sorted(range(len(counted)), key=lambda i: -sum(counted[i].values()))
    for i in ranked[:MOST_LINES]:
        found = counted[i]
        yield row(
            f"{case}: instruction {i}",
            sum(found.values()) / total,
            "share of samples",
            text=instructions[i]["Source"].strip(),
            reason=max(found, key=found.get).removeprefix(STALLED),
        )


def _number(text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return 0.0


if __name__ == "__main__":
    run_once(Session(is_rehearsal=sys.argv[1:] == ["rehearsal"], output=Path()))
