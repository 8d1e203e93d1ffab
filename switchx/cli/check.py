# SPDX-License-Identifier: Apache-2.0
"""`switchx check`: promises that hold or do not, with the numbers."""

from switchx.cli import arguments as shared

DESCRIPTION = """\
Checks a promise and prints the largest errors; the exit status is 1 where one does not hold.

  switchx check equivalence            every router, dispatcher and way to split eight
                                       devices against one device: outputs, auxiliary
                                       losses, raw gradients, global gradient norm
  switchx check equivalence --sample   each router with each dispatcher on one mesh
  switchx check equivalence --json     one JSON object on the last line
  switchx check planned_bytes          bytes that compiled training steps communicate on
                                       several meshes against the planner's

Eight devices are simulated on CPU where XLA_FLAGS does not say otherwise.
"""


def add_command(commands) -> None:
    parser = shared.add_command(
        commands, "check", run, "check that numbers are the same everywhere", DESCRIPTION
    )
    parser.add_argument("what", choices=["equivalence", "planned_bytes"], help="what to check")
    parser.add_argument(
        "--sample", action="store_true", help="each router with each dispatcher once"
    )
    shared.add_json(parser)


def run(arguments) -> int:
    shared.simulate_devices(8)
    if arguments.sample and arguments.what != "equivalence":
        raise ValueError(f"--sample with {arguments.what}: it is for equivalence; leave it out")
    from switchx.bench import equivalence, planned_bytes
    from switchx.cli.progress import TerminalReporter

    with TerminalReporter() as reporter:
        if arguments.what == "equivalence":
            report = equivalence.run(is_sample=arguments.sample, note=reporter.note)
        else:
            report = planned_bytes.run(note=reporter.note)
    report.print(arguments.json)
    return 0 if all(check.holds for check in report.checks) else 1
