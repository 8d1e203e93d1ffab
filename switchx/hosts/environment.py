# SPDX-License-Identifier: Apache-2.0
"""What a cluster's launcher says in the environment: Slurm, Kubernetes, TPU pods.

Nothing is asked over a network; what a launcher does not say, options of the command do.
"""

import re
from collections.abc import Mapping

from switchx.hosts.processes import Processes

# Where no port is given; the next one is JAX's. Systems do not hand these out by themselves.
PORT = 8476


def processes_of(environment: Mapping[str, str]) -> Processes | None:
    """The processes that a launcher started, or None where it started this one alone.

    Read are, the first that there is:

    1. `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`; instead of the
       last one `JOB_COMPLETION_INDEX`, which Kubernetes sets in an indexed job.
    2. A step of Slurm (`srun`) with more than one task.
    3. A TPU pod: `TPU_WORKER_HOSTNAMES`, `TPU_WORKER_ID`, and `MEGASCALE_*` of several
       slices.

    Raises:
        ValueError: a launcher says a part of it only, or what is no number.
    """
    for read in (_from_jax, _from_slurm, _from_tpu_pod):
        if found := read(environment):
            return found
    return None


def _from_jax(environment: Mapping[str, str]) -> Processes | None:
    if "JAX_COORDINATOR_ADDRESS" not in environment:
        return None
    address = environment["JAX_COORDINATOR_ADDRESS"]
    index = "JAX_PROCESS_ID"
    if index not in environment and "JOB_COMPLETION_INDEX" in environment:
        index = "JOB_COMPLETION_INDEX"
    return Processes(
        address if ":" in address else f"{address}:{PORT}",
        _number(environment, "JAX_NUM_PROCESSES", "JAX_COORDINATOR_ADDRESS"),
        _number(environment, index, "JAX_COORDINATOR_ADDRESS"),
    )


def _from_slurm(environment: Mapping[str, str]) -> Processes | None:
    # In a batch script, before any `srun`, there is a job and no step with tasks.
    if "SLURM_STEP_NUM_TASKS" not in environment:
        return None
    count = _number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_TASKS")
    if count == 1:
        return None
    if "SLURM_STEP_NODELIST" not in environment:
        raise ValueError(_incomplete("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"))
    # Two jobs that share a machine take other pairs of ports, a job's processes the same.
    port = PORT + 2 * (_number(environment, "SLURM_JOB_ID", "SLURM_STEP_NUM_TASKS") % 1000)
    return Processes(
        f"{first_host(environment['SLURM_STEP_NODELIST'])}:{port}",
        count,
        _number(environment, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    )


def _from_tpu_pod(environment: Mapping[str, str]) -> Processes | None:
    names = environment.get("TPU_WORKER_HOSTNAMES", "")
    hosts = [name.strip() for name in names.split(",") if name.strip()]
    # Set and empty is what some images do where there is one slice.
    slices = 1
    if environment.get("MEGASCALE_NUM_SLICES"):
        slices = _number(environment, "MEGASCALE_NUM_SLICES", "MEGASCALE_NUM_SLICES")
    if slices > 1 and not hosts:
        # Each slice would train alone, and write into the same run folder.
        raise ValueError(_incomplete("MEGASCALE_NUM_SLICES", "TPU_WORKER_HOSTNAMES"))
    if len(hosts) * slices < 2:
        return None
    worker = _number(environment, "TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES")
    first, slice_index = hosts[0], 0
    if slices > 1:
        slice_index = _number(environment, "MEGASCALE_SLICE_ID", "MEGASCALE_NUM_SLICES")
        if "MEGASCALE_COORDINATOR_ADDRESS" not in environment:
            raise ValueError(
                _incomplete("MEGASCALE_NUM_SLICES", "MEGASCALE_COORDINATOR_ADDRESS")
            )
        # The first worker of the first slice; the port is of another service.
        first = environment["MEGASCALE_COORDINATOR_ADDRESS"].split(":")[0]
    return Processes(f"{first}:{PORT}", len(hosts) * slices, slice_index * len(hosts) + worker)


def first_host(node_list: str) -> str:
    """`node003` of Slurm's `node[003-006,009],login1`."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", node_list)
    if not match:
        raise ValueError(f"SLURM_STEP_NODELIST={node_list!r} names no host; give --coordinator")
    return "".join(part or "" for part in match.groups())


def _number(environment: Mapping[str, str], name: str, beside: str) -> int:
    if name not in environment:
        raise ValueError(_incomplete(beside, name))
    if not environment[name].strip().isdecimal():
        raise ValueError(f"{name}={environment[name]!r} in the environment is no number")
    return int(environment[name])


def _incomplete(there: str, missing: str) -> str:
    return (
        f"the environment has {there} and no {missing}; set it, or give --coordinator, "
        "--num_processes and --process_id"
    )
