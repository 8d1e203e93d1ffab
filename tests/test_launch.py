# SPDX-License-Identifier: Apache-2.0
"""launch/: syntax, options that exist, and that what it sets is what switchx reads."""

import os
import shlex
import subprocess

import pytest
import yaml

from switchx.cli import hosts
from switchx.cli.arguments import gin_of
from switchx.cli.main import _parse, _parser
from switchx.cli.train import STOPPED_STATUS
from switchx.gin_config import building
from switchx.training.stopping import TrainingStopped
from tests.processes import ROOT

LAUNCH = ROOT / "launch"
SLURM = LAUNCH / "slurm.sh"
TPU_VM = LAUNCH / "tpu_vm.sh"


def job_of(options):
    """The job of some options of `switchx train`."""
    return building.parse_job(*gin_of(_parse(_parser(), ["train", *options])))


def stub(folder, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


def run_slurm(
    folder, body: str, *options, script=SLURM, **environment
) -> subprocess.CompletedProcess:
    """A script with an `srun` that runs `body`."""
    stub(folder, "srun", body)
    return subprocess.run(
        ["bash", str(script), *options],
        env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"} | environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("script", [SLURM, TPU_VM])
def test_scripts_are_bash(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert os.access(script, os.X_OK)


def test_slurm_starts_switchx_with_options_that_exist(tmp_path):
    options = ["--gin_file=x y.gin", "--model_dir=run"]
    done = run_slurm(tmp_path, 'printf "%s\\n" "$@"', *options)
    assert done.returncode == 0
    words = done.stdout.splitlines()
    # Slurm would end process 0 before it says with which status training ended.
    assert "--kill-on-bad-exit=0" in words
    command = words[words.index("switchx") :]
    assert command[-2:] == options  # as they were given, spaces and all
    arguments = _parse(_parser(), command[1:])
    assert (arguments.start_seconds, arguments.silence_seconds) == (600, 60)


# None of them asks for another place in the queue: there is no `scontrol` here.
@pytest.mark.parametrize(
    ("script", "status", "attempts"),
    [
        *((script, *case) for script in (SLURM, TPU_VM)
          for case in ((0, 1), (2, 1), (1, 3), (137, 3))),
        (TPU_VM, 75, 1),
    ],
)  # fmt: skip
def test_what_another_attempt_can_mend_is_begun_again(tmp_path, script, status, attempts):
    body = f"echo attempt >> {tmp_path}/log; exit {status}"
    stub(tmp_path, "program", body)
    program = str(tmp_path / "program")
    done = run_slurm(
        tmp_path, body, "--model_dir=run", script=script, RESTARTS="2", SWITCHX=program
    )
    assert done.returncode == status
    assert (tmp_path / "log").read_text().split() == ["attempt"] * attempts


def fails_after(folder, checkpoints: list[int], status: int) -> str:
    """Each attempt leaves the next one of some checkpoints and fails; the last ones none."""
    for number, step in enumerate(checkpoints):
        (folder / f"attempt_{number}").write_text(str(step))
    return (
        f"cd {folder}; n=$(cat log 2>/dev/null | wc -l); echo attempt >> log\n"
        "step=$(cat attempt_$n 2>/dev/null) && mkdir -p run/checkpoints/$step\n"
        f"exit {status}"
    )


@pytest.mark.parametrize("given", ["=HERE/run", " HERE/run", "=~/run"])
@pytest.mark.parametrize("script", [SLURM, TPU_VM])
def test_a_new_checkpoint_gives_all_restarts_back(tmp_path, script, given):
    # Three that leave a new checkpoint, and after the last of them as many without as ever.
    body = fails_after(tmp_path, [10, 20, 100], 1)
    program = tmp_path / "program"
    stub(tmp_path, "program", body)
    done = run_slurm(
        tmp_path, body, *f"--model_dir{given}".replace("HERE", str(tmp_path)).split(" "),
        script=script, RESTARTS="2", SWITCHX=str(program), HOME=str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 1
    assert len((tmp_path / "log").read_text().split()) == 3 + 3
    assert "begins again from step 100, 2 restarts left" in done.stdout


LOST = "1: switchx: process 1 (node002.cluster, pid 4711) is lost: silent for 60 s"
TWO = LOST.replace(" is lost", ", process 2 (node003, pid 5) is lost")


def srun_that_loses(folder, answering: int, said: str = LOST) -> str:
    """Attempts lose node002, which a probe of it answers with a status."""
    return (
        f'case "$*" in *--overlap*) exit {answering} ;; esac\n'
        f'echo "$@" | grep -o -- "--exclude=[^ ]*\\|--nodes=[^ ]*" | xargs >> {folder}/log\n'
        f'case "$*" in *--exclude*) ;; *) echo "{said}" ;; esac; exit 1'
    )


@pytest.mark.parametrize(("answering", "before"), [(1, 1), (0, 2)])
def test_slurm_leaves_out_a_machine_that_is_lost_where_there_is_a_spare(
    tmp_path, answering, before
):
    """At once where it does not answer, else when its process is lost for the second time."""
    stub(tmp_path, "scontrol", f'echo "$@" >> {tmp_path}/asked')
    more = {"RESTARTS": "3", "SLURM_JOB_NUM_NODES": "3", "NODES": "2", "SLURM_JOB_ID": "4711"}
    done = run_slurm(tmp_path, srun_that_loses(tmp_path, answering), "--model_dir=x", **more)
    assert done.returncode == 1
    without = ["--nodes=2 --exclude=node002"] * (4 - before)
    assert (tmp_path / "log").read_text().splitlines() == ["--nodes=2"] * before + without
    assert not (tmp_path / "asked").exists()


def test_slurm_leaves_out_all_machines_that_are_lost_together(tmp_path):
    more = {"RESTARTS": "1", "SLURM_JOB_NUM_NODES": "4", "NODES": "2", "SLURM_JOB_ID": "4711"}
    run_slurm(tmp_path, srun_that_loses(tmp_path, 1, TWO), "--model_dir=x", **more)
    asked = (tmp_path / "log").read_text().splitlines()
    assert asked == ["--nodes=2", "--nodes=2 --exclude=node002,node003"]


def test_slurm_requeues_where_a_machine_does_not_answer_and_there_is_no_spare(tmp_path):
    stub(tmp_path, "scontrol", f'echo "$@" >> {tmp_path}/asked')
    more = {"RESTARTS": "3", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "4711"}
    done = run_slurm(tmp_path, srun_that_loses(tmp_path, 1), "--model_dir=x", **more)
    assert done.returncode == 1 and "no spare for node002" in done.stdout
    assert (tmp_path / "asked").read_text() == "requeue 4711\n"
    assert (tmp_path / "log").read_text() == "--nodes=2\n"


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


@pytest.mark.parametrize("status", [0, 2, TrainingStopped.exit_status])
@pytest.mark.parametrize("script", [SLURM, TPU_VM])
def test_what_another_attempt_does_not_change_ends_the_launchers(tmp_path, script, status):
    """Though each attempt leaves another checkpoint, as training that stops does."""
    body = f"mkdir -p {tmp_path}/run/checkpoints/$RANDOM; env >> {tmp_path}/env; exit {status}"
    stub(tmp_path, "switchx", body)
    more = {"RESTARTS": "2", "SWITCHX": str(tmp_path / "switchx")}
    done = run_slurm(tmp_path, body, f"--model_dir={tmp_path}/run", script=script, **more)
    assert done.returncode == status
    assert len(list((tmp_path / "run/checkpoints").iterdir())) == 1
    # A process alone is told that a launcher began it.
    is_told = "SWITCHX_LAUNCHED=1\n" in (tmp_path / "env").read_text()
    assert is_told == (script == SLURM)


def example_of(script, start: str):
    """The job of the command that a script's comment has, which begins with some words."""
    lines = script.read_text().split(f"#   {start}", 1)[1].split("\n#\n")[0]
    words = shlex.split(lines.replace("\\\n#", " ").replace("'", ""), comments=True)
    return job_of(words[words.index(f"launch/{script.name}") + 1 :])


def test_the_examples_of_the_scripts_and_the_job_set_are_jobs():
    job = example_of(SLURM, "sbatch")
    assert (job.mesh.node, job.mesh.expert) == (4, 8)
    assert job.compiler.gpu
    mesh = example_of(TPU_VM, "  cd switchx &&").mesh
    # The run's own: no file after it binds another.
    assert (mesh.data, mesh.fsdp, mesh.node, mesh.expert, mesh.model) == (None, 4, 4, 8, 1)
    (container,) = pods()["template"]["spec"]["containers"]
    program, name = container["command"]
    assert (program, name) == ("switchx", "train")
    job = job_of(container["args"])
    assert (job.mesh.node, job.mesh.expert) == (4, 8)
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    (folder,) = [each.split("=")[1] for each in container["args"] if "model_dir" in each]
    assert any(folder.startswith(f"{mount}/") for mount in mounts)


def manifest() -> dict:
    return yaml.safe_load((LAUNCH / "jobset.yaml").read_text())


def pods() -> dict:
    (job,) = manifest()["spec"]["replicatedJobs"]
    return job["template"]["spec"]


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
        assert hosts.processes_of(arguments) == hosts.Processes(first, count, index)
    assert spec["backoffLimit"] == 0 and document["spec"]["failurePolicy"]["maxRestarts"] > 0


def test_a_job_set_tells_wrong_input_and_signals_from_other_failures():
    """By the reason for which the job fails: the status of a pod decides about it."""
    spec, policy = pods(), manifest()["spec"]["failurePolicy"]
    (container,) = spec["template"]["spec"]["containers"]
    wrong, stopped = spec["podFailurePolicy"]["rules"]
    for rule, values in (
        (wrong, [2, TrainingStopped.exit_status]),
        (stopped, [STOPPED_STATUS]),
    ):
        codes = rule["onExitCodes"]
        assert codes["containerName"] == container["name"]
        assert (codes["operator"], codes["values"]) == ("In", values)
    assert (wrong["action"], stopped["action"]) == ("FailIndex", "FailJob")
    # One failed index is one too many; any other failure is more than the limit of the job.
    assert spec["maxFailedIndexes"] == spec["backoffLimit"] == 0 < spec["backoffLimitPerIndex"]
    reactions = {rule["onJobFailureReasons"][0]: rule["action"] for rule in policy["rules"]}
    assert reactions == {
        "PodFailurePolicy": "RestartJobSetAndIgnoreMaxRestarts",
        "MaxFailedIndexesExceeded": "FailJobSet",
    }
    # Kubernetes takes a podFailurePolicy with this one alone.
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
