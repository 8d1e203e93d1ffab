# SPDX-License-Identifier: Apache-2.0
"""`make promises`: measures what switchx promises; prints value, bound and what holds.

    python -m tests.promises [NAME ...] [--json]

A NAME is that of a check (`mesh_loss_parity`) or the beginning of some. All take an hour or
two. The exit status is 1 where one does not hold. `--list` prints the table of the checks.
"""

import argparse
import pathlib
import sys
import tempfile

from switchx.cli.arguments import simulate_devices


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m tests.promises", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--json", action="store_true", help="one object on the last line")
    parser.add_argument("--list", action="store_true", help="measure nothing; print the checks")
    arguments = parser.parse_args(words)
    simulate_devices(8)
    from switchx.results import Report
    from tests.compilation import compiled_once
    from tests.promises.promises import PROMISES, judged, table

    if arguments.list:
        print(table())
        return 0
    known = [name for promise in PROMISES for name in promise.bounds]
    for asked in arguments.names:
        if not any(name.startswith(asked) for name in known):
            parser.error(f"there is no promise {asked!r}; there are {', '.join(sorted(known))}")
    rows, checks = [], []
    names = tuple(arguments.names) or ("",)
    # Several promises, and their child processes, have the same programs.
    with tempfile.TemporaryDirectory() as folder, compiled_once(pathlib.Path(folder)):
        for promise in PROMISES:
            if any(name.startswith(names) for name in promise.bounds):
                print(f"measuring {promise.name}", file=sys.stderr, flush=True)
                found, more = judged(promise.measure(), promise.bounds)
                rows, checks = rows + found, checks + more
    return Report("promises", rows, checks).print(arguments.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
