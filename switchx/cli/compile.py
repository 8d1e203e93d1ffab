# SPDX-License-Identifier: Apache-2.0
"""`switchx compile`: a run's whole training step, compiled for a pod, on any machine."""

import argparse
import signal
import sys

from switchx.cli import arguments as shared

DESCRIPTION = """\
Compiles the training step that gin files describe, forward, backward and optimizer, for a
slice of TPUs or GPUs that this machine need not have, and prints what it takes there: bytes
of each device's memory and whether they fit, FLOPs, and collectives with their bytes. Nothing
is run, and no parameter is allocated.

  switchx compile --gin_file=configs/runs/pretrain_switch_c.gin --topology=v4:8x8x16
  switchx compile --gin_file=configs/runs/pretrain_switch_base.gin --topology=v5e:16x16 --json

Topologies are v4:8x8x16, v5e:16x16, v5p:8x8x16, v6e:16x16, tpu7x:4x4x4 and the like, h200 and
h200:8. Experts may be in host memory on all of them (configs/storage/host.gin): the output
then has host bytes, overlapped copies, and strides that would be read backwards.
The compilers are installed once, each into a folder of its own:

  python -m pallas_kernels.aot.install tpu .venv/aot_tpu
  python -m pallas_kernels.aot.install gpu .venv/aot_gpu

The exit status is 1 if the step does not fit, or another check does not hold.
"""


def add_command(commands) -> None:
    parser = shared.add_command(
        commands, "compile", run, "compile a training step for a pod", DESCRIPTION
    )
    shared.add_gin_arguments(parser)
    shared.add_flags(
        parser, {"--topology=KIND:SIDES": "slice: v4:8x8x16, h200:8, .."}, required="topology"
    )
    shared.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from switchx.partitioning.topology import Topology

    topology = Topology.parse(arguments.topology)
    from switchx.compiled import devices, training_step
    from switchx.gin_config import building
    from switchx.progress import TerminalReporter

    job = building.parse_job(*shared.gin_of(arguments))
    devices.require_mesh_fits(job.mesh, topology)
    if not devices.has_compiler():
        sys.stdout.flush()
        again = ["compile", f"--topology={arguments.topology}"]
        again += shared.configuration_words(arguments)
        again += [f"--{name}" for name in ("json", "traceback") if getattr(arguments, name)]
        return _status(devices.run_with_compiler(again, topology).returncode)
    from switchx.compiled import report as compiled

    with TerminalReporter() as reporter:
        reporter.note(f"compiling for {topology.num_devices} devices of {topology}")
        described = devices.describe_devices(topology)
        limit = topology.generation.hbm_bytes
        step = training_step.compile_step(job, described, limit, with_others=True)
        report = compiled.report_of(step, job, topology, ", ".join(arguments.gin_file))
    if arguments.json:
        report.print(as_json=True)
    else:
        compiled.print_tables(report)
    return 0 if all(check.holds for check in report.checks) else 1


def _status(returncode: int) -> int:
    """The exit status of the compiling process; 1, and a message, if a signal ended it."""
    if returncode >= 0:
        return returncode
    name = signal.Signals(-returncode).name
    text = f"the process that compiled was ended by {name}"
    if name == "SIGKILL":
        text += (
            ", as the system does when memory runs out; compile where more is free, or with "
            "ModelConfig.scan_layers=True, which makes the program smaller"
        )
    print(f"switchx compile: {text}", file=sys.stderr)
    return 1
