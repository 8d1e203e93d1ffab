# SPDX-License-Identifier: Apache-2.0
"""Options of a command that several processes run together, and how they do."""

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

FLAGS = ("coordinator", "num_processes", "process_id")


def add_hosts(parser) -> None:
    """`--coordinator`, `--num_processes`, `--process_id` and the two timeouts."""
    group = parser.add_argument_group(
        "several hosts",
        "One process a machine, all with the same command. Under Slurm (srun), in a\n"
        "Kubernetes JobSet and on a TPU pod they find each other; docs/several_hosts.md.",
    )
    group.add_argument(
        "--coordinator", metavar="HOST:PORT", help="where process 0 listens for the others"
    )
    group.add_argument("--num_processes", type=int, metavar="N", help="processes, all together")
    group.add_argument("--process_id", type=int, metavar="I", help="of this one, 0 to N - 1")
    group.add_argument(
        "--start_seconds",
        type=float,
        default=300.0,
        metavar="S",
        help="how long the last process may take to come (default: %(default)s)",
    )
    group.add_argument(
        "--silence_seconds",
        type=float,
        default=60.0,
        metavar="S",
        help="without a sign of a process, until it is taken for lost and all end "
        "(default: %(default)s); one that dies is noticed at once",
    )


def processes_of(arguments: argparse.Namespace, environment=os.environ):
    """The Processes of the options, or else of the launcher's environment; None of one alone.

    Raises:
        UsageError: some of the options are there, and not all.
        ValueError: they, or the environment, are wrong.
    """
    from switchx.hosts import environment as launcher
    from switchx.hosts.processes import Processes

    given = {name: getattr(arguments, name) for name in FLAGS}
    missing = [f"--{name}" for name, value in given.items() if value is None]
    if len(missing) == len(FLAGS):
        return launcher.processes_of(environment)
    if missing:
        arguments.parser.error(f"give {' and '.join(missing)} too, or none of the three")
    return Processes(arguments.coordinator, arguments.num_processes, arguments.process_id)


def statement(
    job, arguments: argparse.Namespace, commit: str, folder: str, *options: str
) -> dict[str, Any]:
    """What has to be equal in all processes: the job, the folder, some options, the code.

    How a process reads its data, where that lies on its machine, where its disk is, and how
    many experts of that it caches, is its own.

    Args:
        folder, options: names of the options; `folder` is what they write into.
    """
    import jax
    import jaxlib

    from switchx.training.resume import flat_description

    own = ("data_dir", "prefetch", "storage.path", "storage.host_bytes")
    said = {
        name: each
        for name, each in flat_description(job).items()
        if name not in own and name.split(".")[0] not in own
    }
    return said | {
        "vocabulary": job.vocabulary.fingerprint(),
        **{f"--{name}": getattr(arguments, name) for name in options},
        folder: os.path.abspath(os.path.expanduser(getattr(arguments, folder))),
        "commit": commit,
        "jax": f"{jax.__version__} with jaxlib {jaxlib.__version__}",
    }


def run_together(
    processes,
    arguments: argparse.Namespace,
    prepare: Callable[[], Any],
    state: Callable[[Any], dict[str, Any]],
    work: Callable[[Any], Any],
    explain: Callable[[BaseException], int],
) -> tuple[Any, Any]:
    """Prepares, meets the others, and works with them.

    Returns:
        What was prepared, and what became of it. Where the work fails, this process ends.

    Args:
        prepare, state: see `hosts.distributed.prepared_together`.
        work: of what was prepared; `jax.devices()` are those of all processes.
        explain: shows an error to a person; returns the exit status, or raises.
    """
    from switchx.hosts.distributed import Timeouts, distributed, prepared_together

    timeouts = Timeouts(arguments.start_seconds, arguments.silence_seconds)
    prepared, peers = prepared_together(processes, timeouts, prepare, state)
    try:
        with distributed(peers, timeouts):
            outcome = work(prepared)
    except BaseException as error:
        try:
            status = explain(error)
        except BaseException:
            status = 1
            sys.excepthook(*sys.exc_info())
        # The ordinary way out would wait for the other processes, which are ending too.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return prepared, outcome


def reporter_of(processes):
    """Shows all that happens; of processes but the first, what went wrong."""
    from switchx.progress import SilentReporter, TerminalReporter

    if processes is not None and not processes.is_first:
        return SilentReporter(processes.index)
    return TerminalReporter()
