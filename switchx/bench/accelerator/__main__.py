# SPDX-License-Identifier: Apache-2.0
"""`python -m switchx.bench.accelerator`: `switchx check accelerator` without installation."""

import argparse
import sys

from switchx.bench.accelerator.command import add_arguments, report_of


def main(words: list[str] | None = None) -> int:
    """Runs the command; the exit status."""
    parser = argparse.ArgumentParser(prog="switchx.bench.accelerator", description=__doc__)
    add_arguments(parser, int)
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    arguments = parser.parse_args(words)

    def note(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        report, status = report_of(arguments, note)
    except ValueError as error:
        note(f"error: {error}")
        return 2
    report.print(arguments.json)
    return status


if __name__ == "__main__":
    sys.exit(main())
