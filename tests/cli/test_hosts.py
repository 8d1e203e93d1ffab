# SPDX-License-Identifier: Apache-2.0
"""The options of several hosts; processes that use them: tests/integration."""

import argparse
import logging
import os

import pytest

from switchx import whole_folders
from switchx.cli import hosts, train
from switchx.cli.arguments import UsageError
from switchx.cli.main import _parse, _parser, main
from switchx.progress import SilentReporter
from switchx.training.offload.storage_spec import StorageSpec
from tests.data.refusals import refused
from tests.training.jobs import make_job

TRAIN = ["train", "--gin_file=x.gin", "--model_dir=run"]
ALL = ["--coordinator=a:1", "--num_processes=2", "--process_id=1"]


def parsed(*options):
    return _parse(_parser(), [*TRAIN, *options])


# What launchers set, as their manuals show it; ports are JAX's.
SLURM = {
    "SLURM_JOB_ID": "70123",
    "SLURM_NTASKS": "16",
    "SLURM_STEP_NODELIST": "gpu[012-019,021],login1",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}
VARIABLES = {"JAX_COORDINATOR_ADDRESS": "b:2", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
JOB_SET = {
    "JAX_COORDINATOR_ADDRESS": "switchx-workers-0-0.switchx:8476",
    "JAX_NUM_PROCESSES": "4",
    "JOB_COMPLETION_INDEX": "2",
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
}
POD = {
    "TPU_SKIP_MDS_QUERY": "1",  # of Google Kubernetes Engine: the variables say it all
    "TPU_WORKER_HOSTNAMES": "localhost,t-1.t,t-2.t,t-3.t",
    "TPU_WORKER_ID": "3",
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
    "MEGASCALE_COORDINATOR_ADDRESS": "localhost:8080",
}


@pytest.fixture
def launched(monkeypatch):
    """The processes of options, where a launcher has set some variables."""
    for name in os.environ:
        if name.startswith(
            ("JAX_COORD", "JAX_NUM_PRO", "JAX_PROC", "SLURM", "OMPI", "TPU_", "K")
        ):
            monkeypatch.delenv(name)

    def processes(variables, *options):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return hosts.processes_of(parsed(*options))

    return processes


@pytest.mark.parametrize(
    ("variables", "processes"),
    [
        ({}, None),
        (VARIABLES, hosts.Processes("b:2", 4, 3)),
        (JOB_SET, hosts.Processes("switchx-workers-0-0.switchx:8476", 4, 2)),
        (SLURM, hosts.Processes("gpu012:61931", 16, 5)),
        (SLURM | VARIABLES, hosts.Processes("b:2", 4, 3)),
        (SLURM | {"JAX_COORDINATOR_PORT": "1"}, hosts.Processes("gpu012:1", 16, 5)),
        (SLURM | {"SLURM_NTASKS": "1"}, None),
        (OPEN_MPI, hosts.Processes("10.96.0.1:62624", 4, 2)),
        # A batch script before any srun, and a pod of no indexed Job.
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "16", "SLURM_PROCID": "0"}, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),
    ],
)
def test_launchers(variables, processes, launched):
    assert launched(variables) == processes


def test_slices_of_tpus(launched, monkeypatch):
    assert launched(POD) is None  # on a machine without TPUs
    monkeypatch.setattr("jax._src.clusters.cloud_tpu_cluster.running_in_cloud_tpu_vm", True)
    assert launched(POD) == hosts.Processes("localhost:8482", 8, 7)
    assert (
        launched(POD | {"TPU_WORKER_HOSTNAMES": "localhost", "MEGASCALE_NUM_SLICES": "1"})
        is None
    )


def test_options_go_before_the_environment(launched):
    assert launched(VARIABLES, *ALL) == hosts.Processes("a:1", 2, 1)
    assert launched(VARIABLES, "--num_processes=1") is None


@pytest.mark.parametrize("missing", VARIABLES)
def test_half_of_it(missing, launched):
    variables = {name: value for name, value in VARIABLES.items() if name != missing}
    with pytest.raises(ValueError, match="which this one is .*give --coordinator, --num_proc"):
        launched(variables)


def test_all_of_them_or_none_and_wrong_ones_end_the_command(capsys, cli):
    with pytest.raises(UsageError, match="give --process_id too, or none of the three"):
        hosts.processes_of(parsed(*ALL[:2]))
    with pytest.raises(UsageError, match="give --coordinator and --num_processes too, or none"):
        hosts.processes_of(parsed(ALL[2]))
    assert cli.refused(*TRAIN, *ALL[:2], "--process_id=2") == (
        "switchx train: error: process_id=2 is not one of num_processes=2; use 0 to N - 1\n"
    )
    assert main([*TRAIN, "--coordinator=here", *ALL[1:]]) == 2
    assert "coordinator='here' is no HOST:PORT" in capsys.readouterr().err


def test_the_statement_is_of_what_has_to_be_equal(monkeypatch, tmp_path):
    def state(job):
        return hosts.statement(job, parsed(), "model_dir", "mesh", "hardware")

    same, job = state(make_job()), make_job()
    assert state(job) == same and "jax" in same and same["model_dir"].startswith("/")
    assert state(make_job(data_dir="elsewhere")) == same
    assert state(make_job(storage=StorageSpec(path="/fast", host_bytes=10**9))) == same
    for changes, name in (
        (dict(batch_size=16), "batch_size"),
        (dict(log_every=7), "log_every"),
        (dict(storage=StorageSpec("disk")), "storage.experts"),
        (dict(train_steps=5), "train_steps"),
    ):
        differing = state(make_job(**changes))
        assert {key for key in same if same[key] != differing[key]} == {name}
    of_store = argparse.Namespace(**vars(parsed()) | {"model_dir": "s3://bucket/run"})
    said = hosts.statement(job, of_store, "model_dir")
    assert said["model_dir"] == "s3://bucket/run"  # from any directory
    # Two installed copies have no commit, and may yet be of two versions.
    installed = [tmp_path / name / "switchx" / "whole_folders.py" for name in "ab"]
    codes = []
    for number, path in enumerate(installed):
        path.parent.mkdir(parents=True)
        path.write_text(f"VERSION = {number}\n")
        monkeypatch.setattr(whole_folders, "__file__", str(path))
        codes.append(state(job)["code"])
    assert len({same["code"], *codes}) == 3 and {"numpy", "flax", "grain"} < same.keys()


def test_other_processes_show_faults_and_a_launcher_is_told_to_go_on(capsys, monkeypatch):
    with SilentReporter(3) as reporter:
        reporter.note("resumed")
        logging.getLogger("switchx.x").info("opening")
        logging.getLogger("switchx.x").warning("the disk is slow")
    assert capsys.readouterr().err == "process 3: warning: the disk is slow\n"
    several = hosts.Processes("localhost:8476", 2, 0)
    assert train.exit_status(is_finished=True, processes=several) == 0
    assert train.exit_status(is_finished=False, processes=several) == os.EX_TEMPFAIL == 75
    # A person who ends a run with Ctrl-C did what was meant.
    assert train.exit_status(is_finished=False, processes=None) == 0
    monkeypatch.setenv("SWITCHX_LAUNCHED", "1")
    assert train.exit_status(is_finished=False, processes=None) == 75
    assert train.exit_status(is_finished=True, processes=None) == 0


@pytest.mark.parametrize("address", ["node001", ":8476", "node001:", "node001:http", "a:65536"])
def test_no_address(address):
    with refused(f"coordinator={address!r} is no HOST:PORT with a port of 1 to 65535"):
        hosts.Processes(address, 2, 0)


@pytest.mark.parametrize("index", [-1, 4])
def test_an_index_that_is_not_one_of_them(index):
    with refused(f"process_id={index} is not one of num_processes=4"):
        hosts.Processes("a:1", 4, index)
