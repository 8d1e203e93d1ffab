# SPDX-License-Identifier: Apache-2.0
"""launch/: syntax, options that exist, and that what it sets is what switchx reads."""

import os
import shlex
import subprocess

import pytest
import yaml

from switchx.cli import hosts
from switchx.cli.arguments import parse_job
from switchx.cli.main import _parse, _parser
from switchx.cli.train import STOPPED_STATUS
from switchx.distributed import Processes
from switchx.gin_config import building
from tests.processes import ROOT

LAUNCH = ROOT / "launch"
SLURM = LAUNCH / "slurm.sh"


@pytest.fixture(autouse=True)
def clean_gin():
    yield
    building.gin.clear_config()


def job_of(options):
    """The job of some options of `switchx train`."""
    return parse_job(_parse(_parser(), ["train", *options]))


def stub(folder, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


def run_slurm(folder, body: str, *options, **environment) -> subprocess.CompletedProcess:
    """The script with an `srun` that runs `body`."""
    stub(folder, "srun", body)
    return subprocess.run(
        ["bash", str(SLURM), *options],
        env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"} | environment,
        capture_output=True,
        text=True,
    )


def test_slurm_script_is_bash():
    subprocess.run(["bash", "-n", str(SLURM)], check=True)
    assert os.access(SLURM, os.X_OK)


def test_slurm_starts_switchx_with_options_that_exist(tmp_path):
    options = ["--gin_file=x y.gin", "--model_dir=run"]
    done = run_slurm(tmp_path, 'printf "%s\\n" "$@"', *options)
    assert done.returncode == 0
    words = done.stdout.splitlines()
    command = words[words.index("switchx") :]
    assert command[-2:] == options  # as they were given, spaces and all
    arguments = _parse(_parser(), command[1:])
    assert (arguments.start_seconds, arguments.silence_seconds) == (600, 60)


# None of them asks for another place in the queue: there is no `scontrol` here.
@pytest.mark.parametrize(("status", "attempts"), [(0, 1), (2, 1), (1, 3), (137, 3)])
def test_slurm_begins_again_what_another_attempt_can_mend(tmp_path, status, attempts):
    body = f"echo attempt >> {tmp_path}/log; exit {status}"
    done = run_slurm(tmp_path, body, "--model_dir=run", RESTARTS="2")
    assert done.returncode == status
    assert (tmp_path / "log").read_text().split() == ["attempt"] * attempts


@pytest.mark.parametrize(("refusal", "attempts"), [(0, 1), (1, 3)])
def test_slurm_requeues_a_run_that_a_signal_stopped(tmp_path, refusal, attempts):
    stub(tmp_path, "scontrol", f'echo "$@" >> {tmp_path}/asked; exit {refusal}')
    body = f"echo attempt >> {tmp_path}/log; exit {STOPPED_STATUS}"
    more = {"RESTARTS": "2", "SLURM_JOB_ID": "4711"}
    done = run_slurm(tmp_path, body, "--model_dir=run", **more)
    assert done.returncode == STOPPED_STATUS
    # Where it may not be requeued, it begins again in the same allocation.
    assert (tmp_path / "log").read_text().split() == ["attempt"] * attempts
    assert (tmp_path / "asked").read_text().splitlines() == ["requeue 4711"] * attempts
    assert "#SBATCH --requeue\n" in SLURM.read_text()


def test_the_example_of_the_slurm_script_is_a_job():
    lines = SLURM.read_text().split("#   sbatch", 1)[1].split("\n#\n")[0]
    words = shlex.split(lines.replace("\\\n#", " "))
    job = job_of(words[words.index("launch/slurm.sh") + 1 :])
    assert (job.mesh.node, job.mesh.expert) == (4, 8)
    assert job.compiler.gpu


def manifest() -> dict:
    return yaml.safe_load((LAUNCH / "jobset.yaml").read_text())


def pods() -> dict:
    (job,) = manifest()["spec"]["replicatedJobs"]
    return job["template"]["spec"]


def test_job_set_is_a_job_whose_options_exist():
    (container,) = pods()["template"]["spec"]["containers"]
    program, name = container["command"]
    assert (program, name) == ("switchx", "train")
    job = job_of(container["args"])
    assert (job.mesh.node, job.mesh.expert) == (4, 8)
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    (folder,) = [each.split("=")[1] for each in container["args"] if "model_dir" in each]
    assert any(folder.startswith(f"{mount}/") for mount in mounts)


def test_pods_of_a_job_set_find_each_other(monkeypatch):
    document, spec = manifest(), pods()
    (container,) = spec["template"]["spec"]["containers"]
    environment = {each["name"]: each["value"] for each in container["env"]}
    count = spec["parallelism"]
    assert spec["completions"] == count and spec["completionMode"] == "Indexed"
    arguments = _parse(_parser(), ["train", *container["args"]])
    # A pod's name: the JobSet, the replicated job, its replica, the pod; below the JobSet's.
    name = document["metadata"]["name"]
    (workers,) = document["spec"]["replicatedJobs"]
    first = f"{name}-{workers['name']}-0-0.{name}:8476"
    for index in range(count):
        for variable, value in (environment | {"JOB_COMPLETION_INDEX": str(index)}).items():
            monkeypatch.setenv(variable, value)
        assert hosts.processes_of(arguments) == Processes(first, count, index)
    assert spec["backoffLimit"] == 0 and document["spec"]["failurePolicy"]["maxRestarts"] > 0


def test_a_job_set_that_a_signal_stopped_begins_again_uncounted():
    """The status of a pod fails the job by a policy, and that failure is not counted."""
    spec, policy = pods(), manifest()["spec"]["failurePolicy"]
    (container,) = spec["template"]["spec"]["containers"]
    (rule,) = spec["podFailurePolicy"]["rules"]
    codes = rule["onExitCodes"]
    assert rule["action"] == "FailJob" and codes["containerName"] == container["name"]
    assert (codes["operator"], codes["values"]) == ("In", [STOPPED_STATUS])
    (reaction,) = policy["rules"]
    assert reaction["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert reaction["onJobFailureReasons"] == ["PodFailurePolicy"]
    # Kubernetes takes a podFailurePolicy with this one alone.
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
