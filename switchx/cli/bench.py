# SPDX-License-Identifier: Apache-2.0
"""`switchx bench`, `tune` and `check`: what is measured, and what has to hold."""

import importlib.util

from switchx.bench.accelerator import command as accelerator
from switchx.cli import arguments as shared

BENCH = """\
Measures contenders that take turns in one process, and prints medians, and ratios against a
baseline measured in the same run. The machine should have nothing else to do. The exit
status is 1 if a bound does not hold.

  switchx bench train          a training step, sparse against dense and against PyTorch
  switchx bench moe            one sparse layer by dispatcher, and a step of decoding
  switchx bench kernels        grouped products with float, int8 and int4 weights
  switchx bench decode         decoding against transformers, pruning, samples, a server
  switchx bench compiled       layers compiled for a TPU and an H200; nothing is run
  switchx bench compiled --peer=FOLDER
                               the same beside the layers of clones of MaxText and
                               Flaxformer; --peer may be given twice
  switchx bench soak --seconds=3600
                               a server with good and bad clients, for that long
  switchx bench train --json   the same as one JSON object on the last line

PyTorch and transformers come with the extra `hf`, servers with `serve`, CTranslate2 with
`ctranslate2`; docs/capabilities.md lists all comparisons and what was measured. The JSON
object's `environment` says whether malloc was tuned (docs/command_line.md).
"""
TUNE = """\
Measures the candidate tilings of the grouped products on this machine, and writes the
fastest ones to the file in which `pallas_kernels` looks them up: $PALLAS_KERNELS_TILINGS,
or pallas_kernels/tilings.json in the user's cache folder. The machine should have nothing
else to do.

  switchx tune kernels          float, int8 and int4 weights; takes a minute on CPU
  switchx tune kernels --json   one JSON object on the last line
"""
CHECK = """\
Checks and prints the largest errors; the exit status is 1 if a check does not hold.
`make promises` measures what else switchx promises.

  switchx check equivalence            every router, dispatcher and way to split eight
                                       devices against one device: outputs, auxiliary
                                       losses, raw gradients, global gradient norm
  switchx check equivalence --sample   each router with each dispatcher on one mesh
  switchx check equivalence --json     one JSON object on the last line
  switchx check accelerator --seconds=540 --output=DIR
                                       what one NVIDIA card does: its rates, kernels and their
                                       variants and tests, training, decoding, exports, each
                                       beside its prediction, most depended-on first; what
                                       does not fit is left for a call with --after=DIR
  switchx check accelerator --rehearsal --output=DIR
                                       the same on a CPU, with tiny shapes: nothing is judged

Eight devices are simulated on CPU unless XLA_FLAGS says otherwise.
"""
BENCH_ROUNDS, TUNE_ROUNDS = 9, 7
SOAK_S = 3600
SOAK = {
    "--seconds=N": f"soak: how long to run (default: {SOAK_S})",
    "--model_dir=DIR": "soak: model to serve (default: a small random one)",
}


def add_command(commands) -> None:
    bench = shared.add_command(
        commands, "bench", run_bench, "measure speed against a baseline", BENCH
    )
    what = ["train", "moe", "kernels", "decode", "compiled", "soak"]
    bench.add_argument("what", choices=what, help="what to measure")
    bench.add_argument("--quick", action="store_true", help="compiled: fewer cells")
    bench.add_argument(
        "--peer",
        action="append",
        metavar="FOLDER",
        help="compiled: a clone of another project",
    )
    shared.add_flags(bench, SOAK)
    tune = shared.add_command(
        commands, "tune", run_tune, "find the fastest tilings for this machine", TUNE
    )
    tune.add_argument("what", choices=["kernels"], help="what to tune")
    for parser, rounds in (
        (bench, f"{BENCH_ROUNDS}; compiled and soak take none"),
        (tune, TUNE_ROUNDS),
    ):
        parser.add_argument(
            "--rounds", type=shared.positive, metavar="N", help=f"rounds (default: {rounds})"
        )
        shared.add_json(parser)
    check = shared.add_command(
        commands, "check", run_check, "check that numbers are the same everywhere", CHECK
    )
    check.add_argument("what", choices=["equivalence", "accelerator"], help="what to check")
    of_accelerator = check.add_argument_group("accelerator")
    accelerator.add_arguments(of_accelerator, shared.positive)
    check.add_argument(
        "--sample", action="store_true", help="check each router with each dispatcher once"
    )
    shared.add_json(check)


def run_bench(arguments) -> int:
    if arguments.what in ("compiled", "soak") and arguments.rounds is not None:
        raise ValueError(
            f"--rounds={arguments.rounds}: `bench {arguments.what}` takes no turns, so it has "
            "no rounds; leave --rounds out"
        )
    only = {"quick": "compiled", "peer": "compiled", "seconds": "soak", "model_dir": "soak"}
    for name, what in only.items():
        if getattr(arguments, name) and arguments.what != what:
            raise ValueError(f"--{name} with {arguments.what}: it is for {what}; leave it out")
    if arguments.what == "soak":
        return _soak(arguments)
    from switchx.malloc import keep_freed_memory

    keep_freed_memory()  # before JAX
    from pallas_kernels.bench import kernels
    from switchx.bench import compiled_peers, decode, moe, train
    from switchx.progress import TerminalReporter
    from switchx.results import Check, Report

    rounds = arguments.rounds or BENCH_ROUNDS
    with TerminalReporter() as reporter:
        if arguments.what == "compiled":
            peers = arguments.peer or ()
            report = compiled_peers.run(reporter.note, peers, is_quick=arguments.quick)
        elif arguments.what == "kernels":
            rows, checks = kernels.run(rounds, note=reporter.note)
            report = Report("bench kernels", rows, [Check(**check) for check in checks])
        else:
            report = {"train": train, "moe": moe, "decode": decode}[arguments.what].run(rounds)
    return report.print(arguments.json)


def _soak(arguments) -> int:
    needed = ("starlette", "uvicorn", "prometheus_client", "httpx2")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"needs {', '.join(missing)}: pip install 'switchx[serve,client]'")
    from switchx.bench import soak
    from switchx.progress import TerminalReporter

    with TerminalReporter() as reporter:
        report = soak.run(arguments.seconds or SOAK_S, arguments.model_dir, reporter.note)
    return report.print(arguments.json)


def run_tune(arguments) -> int:
    from pallas_kernels.bench import tune
    from pallas_kernels.tiling.tuned import user_file
    from switchx.progress import TerminalReporter
    from switchx.results import Report

    with TerminalReporter() as reporter:
        rows = tune.run(arguments.rounds or TUNE_ROUNDS, note=reporter.note)
        reporter.note(f"written to {user_file()}")
    return Report("tune kernels", rows, []).print(arguments.json)


def run_check(arguments) -> int:
    if arguments.what == "accelerator":
        return _check_accelerator(arguments)
    for name in accelerator.HELP:
        if value := getattr(arguments, name):
            raise ValueError(f"--{name}={value} with {arguments.what}: it is for accelerator")
    shared.simulate_devices(8)
    from switchx.bench import equivalence
    from switchx.progress import TerminalReporter

    with TerminalReporter() as reporter:
        report = equivalence.run(is_sample=arguments.sample, note=reporter.note)
    return report.print(arguments.json)


def _check_accelerator(arguments) -> int:
    if arguments.sample:
        raise ValueError("--sample with accelerator: it is for equivalence; leave it out")
    from switchx.progress import TerminalReporter

    with TerminalReporter() as reporter:
        report, status = accelerator.report_of(arguments, reporter.note)
    report.print(arguments.json)
    return status
