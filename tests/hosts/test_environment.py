# SPDX-License-Identifier: Apache-2.0
"""What launchers set, as their manuals show it."""

import pytest

from switchx.hosts.environment import first_host, processes_of
from switchx.hosts.processes import Processes
from tests.data.refusals import refused

SLURM = {
    "SLURM_JOB_ID": "70123",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_NODELIST": "gpu[012-019,021],login1",
    "SLURM_PROCID": "5",
}
JOB_SET_FIRST = "switchx-workers-0-0.switchx"
JOB_SET = {
    "JAX_COORDINATOR_ADDRESS": JOB_SET_FIRST,
    "JAX_NUM_PROCESSES": "4",
    "JOB_COMPLETION_INDEX": "2",
}
POD = {"TPU_WORKER_HOSTNAMES": "t-0.t, t-1.t,t-2.t,t-3.t", "TPU_WORKER_ID": "3"}
SLICES = POD | {
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
    "MEGASCALE_COORDINATOR_ADDRESS": "s0-t-0.s:8080",
}


@pytest.mark.parametrize(
    ("environment", "processes"),
    [
        (SLURM, Processes("gpu012:8722", 16, 5)),
        (JOB_SET, Processes(f"{JOB_SET_FIRST}:8476", 4, 2)),
        (JOB_SET | {"JAX_COORDINATOR_ADDRESS": "a:1"}, Processes("a:1", 4, 2)),
        (
            JOB_SET | {"JAX_PROCESS_ID": "0"},
            Processes(f"{JOB_SET_FIRST}:8476", 4, 0),
        ),
        (POD, Processes("t-0.t:8476", 4, 3)),
        (SLICES, Processes("s0-t-0.s:8476", 8, 7)),
        (SLURM | JOB_SET, Processes(f"{JOB_SET_FIRST}:8476", 4, 2)),
    ],
)
def test_launchers(environment, processes):
    assert processes_of(environment) == processes


@pytest.mark.parametrize(
    "environment",
    [
        {},
        # A batch script before any srun, and a step of one task.
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "16", "SLURM_PROCID": "0"},
        SLURM | {"SLURM_STEP_NUM_TASKS": "1"},
        # An indexed job of one process each.
        {"JOB_COMPLETION_INDEX": "2", "KUBERNETES_SERVICE_HOST": "10.0.0.1"},
        {"MEGASCALE_NUM_SLICES": "1", "MEGASCALE_SLICE_ID": "0"},
        # One host; this is also what compiling for a pod elsewhere sets.
        {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"},
    ],
)
def test_a_process_alone(environment):
    assert processes_of(environment) is None


@pytest.mark.parametrize(
    ("environment", "there", "missing"),
    [
        (SLURM, "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
        (SLURM, "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"),
        (JOB_SET, "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES"),
        (POD, "TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID"),
        (SLICES, "MEGASCALE_NUM_SLICES", "TPU_WORKER_HOSTNAMES"),
        (SLICES, "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID"),
        (SLICES, "MEGASCALE_NUM_SLICES", "MEGASCALE_COORDINATOR_ADDRESS"),
    ],
)
def test_half_of_it(environment, there, missing):
    environment = {name: value for name, value in environment.items() if name != missing}
    with refused(
        f"the environment has {there} and no {missing}; set it, or give --coordinator, "
        "--num_processes and --process_id"
    ):
        processes_of(environment)


def test_no_number():
    with refused("JAX_NUM_PROCESSES='four' in the environment is no number"):
        processes_of(JOB_SET | {"JAX_NUM_PROCESSES": "four"})
    with refused("MEGASCALE_NUM_SLICES='two' in the environment is no number"):
        processes_of(SLICES | {"MEGASCALE_NUM_SLICES": "two"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node001", "node001"),
        ("node001,host2", "node001"),
        ("node[001-0015],host2", "node001"),
        ("node[007,010-015],host2", "node007"),
        ("rack[3-4]-gpu", "rack3-gpu"),
    ],
)
def test_the_first_of_slurms_nodes(nodes, first):
    assert first_host(nodes) == first
