# SPDX-License-Identifier: Apache-2.0
"""The parts of `check accelerator` that run the kernels' own tests on the card.

`first` runs those that interpretation cannot stand in for: what Mosaic GPU's interpreter
replaces (grouped_matmul/gpu.py lists it). `rest` runs all that have not run, slow ones, too.
`triton` runs Triton's kernels compiled, in the tests that interpret them elsewhere.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from switchx.bench.accelerator import kernels
from switchx.bench.accelerator.parts import ROOT, Session, row

# Tests that the interpreter cannot run (register operands, conversions, swizzles), and those of
# sums in parts, which were wrong where it had found nothing.
FIRST = "on_the_gpu or shipped-parts"
HOPPER = ["tests/kernels", "-m", "gpu"]
WORKERS = 12
NONE_LEFT = 5  # pytest's exit status where no test is chosen
TRITON = "triton and not refused and not platforms and not last_row"
# What a rehearsal runs: interpreted tests, which need no card.
REHEARSED = ["tests/kernels/test_mosaic_gpu.py"]
REHEARSED_TRITON = ["tests/kernels/test_triton_kernels.py", "-k", "quantized and nothing"]
# As pytest writes them, and as its plug-in for several processes does.
_NAMES = "PASSED|FAILED|ERROR|SKIPPED"
_OUTCOME = re.compile(rf"\b({_NAMES}) (tests/\S+)|(tests/\S+) ({_NAMES})\b")


def first(session: Session) -> Iterator[dict[str, Any]]:
    """Rows of the tests that matter most."""
    yield from outcomes(session, session.sized([*HOPPER, "-k", FIRST], REHEARSED))


def rest(session: Session) -> Iterator[dict[str, Any]]:
    """Rows of all tests."""
    yield from outcomes(session, session.sized(HOPPER, REHEARSED))


def triton(session: Session) -> Iterator[dict[str, Any]]:
    """Rows of the tests of Triton's kernels, then their times."""
    of_triton = ["tests/kernels", "-m", "not slow", "-k", TRITON]
    yield from outcomes(session, session.sized(of_triton, REHEARSED_TRITON))
    yield from kernels.triton(session)


def outcomes(session: Session, chosen: list[str]) -> Iterator[dict[str, Any]]:
    """A row for each test as it ends; those that ran before are left out.

    Raises:
        RuntimeError: pytest ended with anything but passed and failed tests.
    """
    words = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"]
    # The conftest.py above the kernels' own imports what a card's machine does not have.
    words += ["--confcutdir=tests/kernels"]
    if not session.is_rehearsal:
        words += ["-n", str(WORKERS), "--dist", "load"]
    done = [f"--deselect={case}" for case in session.done if case.startswith("tests/")]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": ".05",
    }
    process = subprocess.Popen(
        [*words, *chosen, *done],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    lines, seen = [], set()
    for line in process.stdout:
        lines.append(line)
        if found := _OUTCOME.search(line):
            outcome, test = (found[1], found[2]) if found[1] else (found[4], found[3])
            # pytest's summary names failed tests again.
            if (test, outcome) not in seen:
                seen.add((test, outcome))
                yield row(test, outcome.lower(), "test")
    status = process.wait()
    is_well = status in ((0, 1) if seen else (0, NONE_LEFT))
    why = {} if is_well else {"why": "".join(lines[-20:])[-1500:]}
    yield row("pytest", status, "exit status", **why)
    if not is_well:
        raise RuntimeError(f"pytest ended with status {status}: {lines[-1].strip()}")
