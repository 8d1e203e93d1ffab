# SPDX-License-Identifier: Apache-2.0
"""`switchx tune`: measures what a machine is best at, and keeps it."""

from switchx.cli import arguments as shared

DESCRIPTION = """\
Measures the candidate tilings of the grouped products on this machine, and writes the
quickest ones to the file that `pallas_kernels` looks them up in: $SWITCHX_KERNEL_TILINGS,
or switchx/kernel_tilings.json in the user's cache folder. The machine should have nothing
else to do.

  switchx tune kernels          float, int8 and int4 weights; on CPU a minute
  switchx tune kernels --json   one JSON object on the last line
"""


def add_command(commands) -> None:
    parser = shared.add_command(
        commands, "tune", run, "find the quickest tilings of this machine", DESCRIPTION
    )
    parser.add_argument("what", choices=["kernels"], help="what to tune")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="turns (default: 7)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments) -> int:
    from pallas_kernels.bench import tune
    from pallas_kernels.tiling.tuned import user_file
    from switchx.bench.report import Report
    from switchx.cli.progress import TerminalReporter

    if arguments.rounds < 1:
        raise ValueError(f"--rounds={arguments.rounds}; use at least 1")
    with TerminalReporter() as reporter:
        rows = tune.run(arguments.rounds, note=reporter.note)
        reporter.note(f"written to {user_file()}")
    Report("tune kernels", rows, []).print(arguments.json)
    return 0
