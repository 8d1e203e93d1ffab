# SPDX-License-Identifier: Apache-2.0
"""`switchx bench`: measurements against a baseline in the same run."""

from switchx.cli import arguments as shared

DESCRIPTION = """\
Measures, in one process whose contenders take turns, and prints ratios against a baseline
measured in the same run. Medians; the machine should have nothing else to do.

  switchx bench train          a training step with 8 to 64 experts against the dense model,
                               and against PyTorch where the extra `hf` is installed
  switchx bench moe            one sparse layer by dispatcher, 8 to 128 experts, against the
                               dense layer of equal FLOPs, and against Flaxformer's where
                               it can be imported; a step of decoding
  switchx bench kernels        grouped products with float, int8 and int4 weights, by active
                               experts and rows of each; on CPU some cells of the grid
  switchx bench decode         tokens a second of decoding, against transformers where the
                               extra `hf` is installed; pruning; bytes of int4 experts; a
                               server's requests a second with the extra `serve`
  switchx bench scale          what meshes change, on eight simulated devices and by
                               compilation: losses, a pipeline's memory, collectives and
                               their bytes against the planner's; no times
  switchx bench train --json   the same as one JSON object on the last line
"""

ROUNDS = 9


def add_command(commands) -> None:
    parser = shared.add_command(
        commands, "bench", run, "measure speed against a baseline", DESCRIPTION
    )
    parser.add_argument(
        "what",
        choices=["train", "moe", "kernels", "decode", "scale"],
        help="what to measure",
    )
    parser.add_argument(
        "--rounds", type=int, metavar="N", help=f"turns (default: {ROUNDS}); scale takes none"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments) -> int:
    rounds = ROUNDS if arguments.rounds is None else arguments.rounds
    if rounds < 1:
        raise ValueError(f"--rounds={rounds}; use at least 1")
    if arguments.what == "scale":
        if arguments.rounds is not None:
            raise ValueError(
                f"--rounds={rounds}: `bench scale` takes no times, so it has no rounds; leave "
                "--rounds out"
            )
        arguments.ask_for(8)
    from switchx.bench import decode, kernels, moe, scale, train
    from switchx.cli.progress import TerminalReporter

    if arguments.what in ("kernels", "scale"):
        with TerminalReporter() as reporter:
            if arguments.what == "scale":
                report = scale.run(reporter.note)
            else:
                report = kernels.run(rounds, note=reporter.note)
    else:
        bench = {"train": train, "moe": moe, "decode": decode}[arguments.what]
        report = bench.run(rounds)
    report.print(arguments.json)
    return 0
