# SPDX-License-Identifier: Apache-2.0
"""`make size`: Python lines by folder, against a committed budget.

A budget is lowered where a folder has become smaller. A change that has to raise one says why
in its message.
"""

import subprocess
import sys

from tests.processes import ROOT

BUDGETS = {
    "switchx": 82_010,
    "pallas_kernels": 9_950,
    "experiments": 8_050,
    "tests": 79_960,
    "tests/bench": 465,
}


def python_lines(folder: str) -> int:
    """Lines of the Python files below a folder that git tracks, without those of fixtures."""
    command = ["git", "ls-files", "-z", "--", folder]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    names = [name for name in listed.stdout.split("\0") if name.endswith(".py")]
    paths = [ROOT / name for name in names if not name.startswith("tests/fixtures/")]
    return sum(len(path.read_text().splitlines()) for path in paths if path.exists())


def main() -> int:
    is_over = False
    for folder, budget in BUDGETS.items():
        lines = python_lines(folder)
        is_over |= lines > budget
        verdict = "over" if lines > budget else "within"
        print(f"{folder:<15} {lines:>7,} of {budget:>7,} lines: {verdict}")
    return int(is_over)


if __name__ == "__main__":
    sys.exit(main())
