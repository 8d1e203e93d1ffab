# SPDX-License-Identifier: Apache-2.0
"""`python -m pallas_kernels`: tunes and measures the kernels on this machine."""

import argparse
import json
import sys
from collections.abc import Sequence

from pallas_kernels.tiling.tuned import VARIABLE, user_file

ROUNDS = {"tune": 7, "bench": 9}


def main(words: Sequence[str] | None = None) -> int:
    """Runs a command; the exit status, 1 where a check does not hold."""
    parser = argparse.ArgumentParser(prog="pallas-kernels", description=__doc__)
    parser.add_argument(
        "what",
        choices=list(ROUNDS),
        help=f"tune writes the quickest tilings to ${VARIABLE} ({user_file()}); bench prints "
        "times beside JAX's own products",
    )
    parser.add_argument("--rounds", type=_positive, metavar="N", help="turns of each product")
    parser.add_argument("--json", action="store_true", help="print one object on the last line")
    arguments = parser.parse_args(words)
    rounds = arguments.rounds or ROUNDS[arguments.what]

    def note(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    if arguments.what == "tune":
        from pallas_kernels.bench import tune

        rows, checks = tune.run(rounds, note=note), []
        note(f"written to {user_file()}")
    else:
        from pallas_kernels.bench import kernels

        rows, checks = kernels.run(rounds, note=note)
        checks = [each | {"holds": _holds(**each)} for each in checks]
    if arguments.json:
        print(json.dumps({"command": arguments.what, "results": rows, "checks": checks}))
    else:
        for row in [*rows, *checks]:
            print("  ".join(f"{name}={_shown(value)}" for name, value in row.items()))
    return int(not all(check["holds"] for check in checks))


def _holds(name: str, value: float, bound: str) -> bool:
    aim = float(bound[2:])
    return {"<=": value <= aim, ">=": value >= aim}[bound[:2]]


def _shown(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number of turns; use 1 or more")
    return number


if __name__ == "__main__":
    sys.exit(main())
