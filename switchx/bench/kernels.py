# SPDX-License-Identifier: Apache-2.0
"""`switchx bench kernels`: the grouped products of `pallas_kernels`, as a report."""

from collections.abc import Callable

from pallas_kernels.bench import kernels
from switchx.bench.report import Check, Report


def run(rounds: int, note: Callable[[str], None] = lambda line: None) -> Report:
    """Measures the grid for this machine: on CPU two to three minutes, else all of it."""
    rows, checks = kernels.run(rounds, note=note)
    return Report("bench kernels", rows, [Check(**check) for check in checks])
