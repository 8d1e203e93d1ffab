# SPDX-License-Identifier: Apache-2.0
"""Options of a command that several processes run together, and how they run it."""

import argparse
import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable
from typing import Any

from switchx.cli.arguments import add_flags, explain, status_of
from switchx.fields import require
from switchx.object_store import is_address

FLAGS = ("coordinator", "num_processes", "process_id")
# What steps and data are computed with: other versions may compute something else.
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
HOSTS = {
    "--coordinator=HOST:PORT": "where process 0 listens for the others",
    "--num_processes=N": (int, "total number of processes"),
    "--process_id=I": (int, "number of this process, 0 to N - 1"),
    "--start_seconds=S": "how long to wait for the last process to arrive",
    "--silence_seconds=S": "seconds without a heartbeat after which a process is considered "
    "lost and all end",
}


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes that train one model together.

    Attributes:
        coordinator: `HOST:PORT` at which `jax.distributed` listens in process 0.
        count: number of processes.
        index: number of this process, from 0.
    """

    coordinator: str
    count: int
    index: int

    def __post_init__(self):
        host, _, port = self.coordinator.rpartition(":")
        is_address = host and port.isdecimal() and 0 < int(port) < 1 << 16
        require(
            bool(is_address),
            f"coordinator={self.coordinator!r} is no HOST:PORT with a port of 1 to 65535; give "
            "the address of process 0 as the others see it, as node001:8476",
        )
        require(
            0 <= self.index < self.count,
            f"process_id={self.index} is not one of num_processes={self.count}; use 0 to N - 1",
        )

    @property
    def is_first(self) -> bool:
        return self.index == 0


def add_hosts(parser) -> None:
    """Adds `--coordinator`, `--num_processes`, `--process_id` and the two timeouts."""
    group = parser.add_argument_group(
        "several hosts",
        "One process per machine, all with the same command. Under Slurm (srun), in a\n"
        "Kubernetes JobSet and on a TPU pod they find each other; docs/several_hosts.md.",
    )
    add_flags(group, HOSTS, start_seconds=300, silence_seconds=60)


def processes_of(arguments: argparse.Namespace) -> Processes | None:
    """The Processes of the options, or else the launcher's environment; None for just one.

    Raises:
        UsageError: some of the options are given, but not all.
        ValueError: the options or the environment are wrong.
    """
    given = {name: getattr(arguments, name) for name in FLAGS}
    missing = [f"--{name}" for name, value in given.items() if value is None]
    if len(missing) == len(FLAGS):
        return _launched()
    if arguments.num_processes == 1 and len(missing) == 2:
        return None
    if missing:
        arguments.parser.error(f"give {' and '.join(missing)} too, or none of the three")
    return Processes(arguments.coordinator, arguments.num_processes, arguments.process_id)


def _launched() -> Processes | None:
    """The Processes that a launcher started, or None if it started only this one.

    `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID` (or Kubernetes'
    `JOB_COMPLETION_INDEX`) say so, or else what JAX detects: Open MPI, Slurm, TPU pods, and
    indexed Jobs of Kubernetes. Unlike JAX, a process keeps all devices that it sees.
    """
    # JAX exports its detection only as a part of `jax.distributed.initialize`.
    from jax._src.clusters import ClusterEnv, K8sCluster

    env = os.environ
    try:
        if address := env.get("JAX_COORDINATOR_ADDRESS"):
            index = "JAX_PROCESS_ID" if "JAX_PROCESS_ID" in env else "JOB_COMPLETION_INDEX"
            return Processes(address, int(env["JAX_NUM_PROCESSES"]), int(env[index]))
        for cluster in ClusterEnv._cluster_types:
            # JAX would ask the API server about any pod, and fail if it is of no such Job.
            is_no_job = cluster is K8sCluster and "JOB_COMPLETION_INDEX" not in env
            if cluster.opt_in_only_method or is_no_job or not cluster.is_env_present():
                continue
            if (count := cluster.get_process_count()) == 1:
                return None
            address = cluster.get_coordinator_address(60, env.get("JAX_COORDINATOR_PORT"))
            return Processes(address, count, cluster.get_process_id())
        if int(env.get("JAX_NUM_PROCESSES", 1)) > 1:
            raise KeyError("JAX_COORDINATOR_ADDRESS")
    except (KeyError, ValueError, TypeError, RuntimeError, OSError) as error:
        raise ValueError(
            "the environment has several processes, and not which this one is "
            f"({type(error).__name__}: {error}); give --coordinator, --num_processes and "
            "--process_id, or --num_processes=1 where it is alone"
        ) from error
    return None


def statement(job, arguments: argparse.Namespace, folder: str, *options: str) -> dict[str, Any]:
    """What has to be equal in all processes: the job, its data, the folder, options, the code.

    How a process reads its data, where the data lie on its machine, where its disk storage is,
    and how many of the experts stored there it caches may differ.

    Args:
        folder, options: names of the options; `folder` is what they write into.
    """
    from importlib.metadata import version

    from switchx.data.corpora.splits import open_split
    from switchx.data.mixtures import splits_read
    from switchx.training.resume import flat_description
    from switchx.whole_folders import code_digest

    target = getattr(arguments, folder)
    if not is_address(target):
        target = os.path.abspath(os.path.expanduser(target))
    own = ("data_dir", "prefetch", "storage.path", "storage.host_bytes")
    facts = {
        name: each
        for name, each in flat_description(job).items()
        if name not in own and name.split(".")[0] not in own
    }
    corpora = {
        f"data of {task.name}, {split}": open_split(
            task.corpus, split, job.data_dir
        ).fingerprint
        for task, split in splits_read(job.source)
    }
    return (
        facts
        | corpora
        | {
            "vocabulary": job.vocabulary.fingerprint(),
            **{f"--{name}": getattr(arguments, name) for name in options},
            folder: target,
            "code": code_digest(),
            **{name: version(name) for name in PACKAGES},
        }
    )


def run_together(
    processes: Processes,
    arguments: argparse.Namespace,
    prepare: Callable[[], Any],
    state: Callable[[Any], dict[str, Any]],
    work: Callable[[Any], Any],
) -> tuple[Any, Any]:
    """Prepares, meets the other processes at the rendezvous, and works with them.

    Returns:
        The results of `prepare` and of `work`. Where the work fails, this process ends.

    Args:
        prepare, state: `state` takes what `prepare` returns. They must not use a device: JAX
            starts only after them. If they fail, all processes are told the reason.
        work: takes what `prepare` returned; `jax.devices()` has the devices of all processes.
    """
    from switchx.distributed import FAILURE, connect, distributed

    peer = (processes.coordinator, processes.count, processes.index)
    timeouts = dict(start_s=arguments.start_seconds, silence_s=arguments.silence_seconds)
    try:
        prepared = prepare()
        statement = state(prepared)
    except (ValueError, OSError) as error:
        with contextlib.suppress(ValueError, OSError):  # this process's own fault matters more
            connect(*peer, {FAILURE: str(error)}, **timeouts)
        raise
    peers = connect(*peer, statement, **timeouts)
    try:
        with distributed(peers, status_of):
            peers.require_equal_devices()
            outcome = work(prepared)
    except BaseException as error:
        try:
            status = explain(error, arguments)
        except BaseException:
            status = 1
            sys.excepthook(*sys.exc_info())
        # A normal exit would wait for the other processes, which are ending too.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return prepared, outcome


def reporter_of(processes):
    """Shows all that happens; for processes other than the first, only what went wrong."""
    from switchx.progress import SilentReporter, TerminalReporter

    if processes is not None and not processes.is_first:
        return SilentReporter(processes.index)
    return TerminalReporter()
