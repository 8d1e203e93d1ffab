# SPDX-License-Identifier: Apache-2.0
"""`switchx train` in several processes on one machine: the same run as in one.

A process stands for a machine with two devices.
"""

import json
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from switchx import tree
from switchx.analysis.routing import read_snapshots
from switchx.checkpoint.restore import restore_params
from switchx.checkpoint.run_folder import RunFolder
from switchx.cli.main import main
from switchx.cli.train import STOPPED_STATUS
from tests.compilation import on_devices
from tests.integration import recorded_reads
from tests.integration.runs import arguments, lines, write_corpus
from tests.processes import child_environment, free_port, run_together

BRIEF = ("TrainingJob.eval_batches=1",)
NAMES = ("loss", "grad_norm", "neg_log_perplexity", "target_tokens", "dropped_fraction")


class Cluster:
    """Starts runs; what is still running at the end of the test is killed.

    `alone` is a run in this process.
    """

    def __init__(self, folder: pathlib.Path, cache: pathlib.Path):
        self.folder, self._cache = folder, cache
        self.files = write_corpus(folder)
        self._started: list[subprocess.Popen] = []

    def alone(self, name: str, devices: int, *bindings) -> None:
        words = arguments(self.folder / name, self.files, *BRIEF, *bindings)
        with recorded_reads.recording(self.folder / f"{name}.reads"), on_devices(devices):
            assert main(["train", *words]) == 0

    def start(
        self, name: str, count: int, devices: int, *bindings, options=(), before: str = ""
    ):
        """`count` processes that train in the run folder `name`.

        Args:
            before: what each does first, in Python.
        """
        port, processes = free_port(), []
        for index in range(count):
            words = arguments(self.folder / name, self.files, *BRIEF, *bindings)
            words += [f"--coordinator=localhost:{port}", f"--num_processes={count}"]
            words += [f"--process_id={index}", "--start_seconds=120", *options]
            command = [sys.executable, "-c", before + recorded_reads.PROGRAM]
            with (self.folder / f"{name}.{index}.log").open("ab") as log:
                process = subprocess.Popen(
                    [*command, str(self.folder / f"{name}.reads"), "train", *words],
                    env=child_environment(self._cache, devices),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            processes.append(process)
        self._started += processes
        return processes

    def log(self, name: str, index: int = 0) -> str:
        return (self.folder / f"{name}.{index}.log").read_text(errors="replace")

    def finish(self, name: str, processes, status: int = 0) -> None:
        """Waits for the processes, which are to end with the status."""
        for index, process in enumerate(processes):
            assert process.wait(280) == status, self.log(name, index)

    def wait_for_lines(self, name: str, number: int) -> None:
        path = self.folder / name / "metrics.jsonl"
        self.wait_until(
            name, lambda: path.exists() and len(path.read_text().splitlines()) >= number
        )

    def wait_until(self, name: str, holds) -> None:
        deadline = time.monotonic() + 240
        while not holds():
            assert time.monotonic() < deadline, self.log(name)
            time.sleep(0.1)

    def kill_all(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.fixture
def cluster(in_a_folder, session_cache):
    cluster = Cluster(in_a_folder, session_cache)
    yield cluster
    cluster.kill_all()


def mesh(**sizes) -> list[str]:
    return [f"MeshSpec.{axis}={size}" for axis, size in sizes.items()]


def assert_same_run(cluster, got: str, want: str, rtol: float = 1e-5) -> None:
    """Metrics, evaluations and parameters of two runs; each line is there once."""
    for log in ("metrics.jsonl", "validation.jsonl"):
        ours, theirs = (lines(cluster.folder / name / log) for name in (got, want))
        assert [line["step"] for line in ours] == [line["step"] for line in theirs]
        for line, other in zip(ours, theirs, strict=True):
            for name in set(NAMES) & other.keys():
                assert line[name] == pytest.approx(other[name], rel=rtol), (log, name)
    samples = [read_snapshots(cluster.folder / name / "routing") for name in (got, want)]
    for ours, theirs in zip(*samples, strict=True):
        for stack, other in zip(ours.stacks, theirs.stacks, strict=True):
            np.testing.assert_array_equal(stack.token_T, other.token_T)
            if ours.step == 0:  # before anything is learnt
                np.testing.assert_array_equal(stack.expert_NTS, other.expert_NTS)
    params = [tree.named_leaves(restore_params(cluster.folder / each)) for each in (got, want)]
    for name, leaf in params[1].items():
        np.testing.assert_allclose(params[0][name], leaf, rtol=0, atol=1e-4, err_msg=name)


def assert_same_rows(cluster, got: str, want: str, held: dict[int, list[int]]) -> None:
    """Byte by byte: each process read its rows of each batch of the run in one process."""
    together = recorded_reads.read(cluster.folder / f"{got}.reads")
    alone = recorded_reads.read(cluster.folder / f"{want}.reads")[0]
    assert sorted(together) == sorted(held)
    for index, batches in together.items():
        assert len(batches) == len(alone) > 0
        for batch, whole in zip(batches, alone, strict=True):
            assert batch["row_B"].tolist() == held[index]
            for name in whole.keys() - {"row_B"}:
                expected = whole[name][held[index]]
                assert batch[name].dtype == expected.dtype
                assert batch[name].tobytes() == expected.tobytes(), (index, name)


def test_two_processes_train_as_one(cluster):
    """Experts over both machines, `data` inside each: rows of a process have gaps."""
    sizes = mesh(data=2, node=2) + ["TRAIN_STEPS=2", "LOG_EVERY=1"]
    together = cluster.start("together", 2, 2, *sizes)
    cluster.alone("alone", 4, *sizes)
    cluster.finish("together", together)
    assert_same_run(cluster, "together", "alone")
    held = {0: [0, 1, 4, 5], 1: [2, 3, 6, 7]}
    assert_same_rows(cluster, "together", "alone", held)
    # Process 0 alone speaks and writes; both wrote their part of the checkpoint.
    assert "Training finished" in cluster.log("together", 0)
    assert "step" not in cluster.log("together", 1)
    checkpoint = RunFolder(cluster.folder / "together").checkpoints / "2"
    states = sorted(path.name for path in (checkpoint / "data").glob("process_*"))
    assert states == ["process_0_of_2.json", "process_1_of_2.json"]
    rows = [
        json.loads((checkpoint / "data" / name).read_text())["json"]["rows"] for name in states
    ]
    assert dict(enumerate(rows)) == held
    parts = {path.name for path in (checkpoint / "params").glob("ocdbt.process_*")}
    assert parts == {"ocdbt.process_0", "ocdbt.process_1"}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("sizes", "held"),
    [
        (dict(data=2, node=2, expert=2), {i: [2 * i, 2 * i + 1] for i in range(4)}),
        # Two machines share the rows of a part of the batch, and split its experts' matrices.
        (
            dict(data=2, model=4),
            {i: [4 * (i // 2) + row for row in range(4)] for i in range(4)},
        ),
    ],
)
def test_four_processes_train_as_one(cluster, sizes, held):
    more = [*mesh(**sizes), "TRAIN_STEPS=2", "LOG_EVERY=1", "ModelConfig.num_heads=4"]
    cluster.alone("alone", 8, *more)
    cluster.finish("together", cluster.start("together", 4, 2, *more))
    assert_same_run(cluster, "together", "alone")
    assert_same_rows(cluster, "together", "alone", held)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_run_and_the_restart_resumes(cluster, victim):
    often = ["LOG_EVERY=1", "CHECKPOINT_EVERY=3"]
    endless = ["TRAIN_STEPS=100000", *often]
    processes = cluster.start("together", 2, 2, *endless, options=["--silence_seconds=10"])
    checkpoints = cluster.folder / "together" / "checkpoints"
    cluster.wait_until("together", (checkpoints / "3").exists)
    processes[victim].send_signal(signal.SIGKILL)
    began = time.monotonic()
    assert processes[1 - victim].wait(90) not in (0, None)
    assert time.monotonic() - began < 40  # 10 s, on a quiet machine
    log = cluster.log("together", 1 - victim)
    assert f"process {victim} (" in log
    # Where JAX is faster to say that process 0, its leader task, is lost, it says only that.
    assert ") is lost: " in log or (victim == 0 and "leader task was" in log)
    if ") is lost: " in log:
        assert "start all processes again to go on from the last checkpoint" in log
    assert log.rstrip().count("Traceback") == 0
    newest = max(int(path.name) for path in checkpoints.iterdir() if path.name.isdecimal())
    steps = [f"TRAIN_STEPS={newest + 2}", *often]
    cluster.finish("together", cluster.start("together", 2, 2, *steps))
    assert f"resumed from step {newest} " in cluster.log("together")
    cluster.alone("alone", 4, *steps)
    assert_same_run(cluster, "together", "alone", rtol=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_frozen_process_is_lost_after_the_silence(cluster):
    processes = cluster.start(
        "together", 2, 2, "TRAIN_STEPS=100000", options=["--silence_seconds=5"]
    )
    cluster.wait_for_lines("together", 1)
    processes[1].send_signal(signal.SIGSTOP)
    began = time.monotonic()
    assert processes[0].wait(90) == 1
    assert time.monotonic() - began < 60
    assert ") is lost: silent for " in cluster.log("together", 0)


LATE = """
import time
import jax
from jax._src import compiler

compile = compiler.backend_compile_and_load

def late(backend, module, *more):
    is_step = "train_step" in str(module.operation.attributes["sym_name"])
    if is_step and jax.process_index() == 1:
        print("late", flush=True)
        time.sleep(45)
    return compile(backend, module, *more)

compiler.backend_compile_and_load = late
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_processes_may_compile_45_s_apart(cluster):
    """Gloo waits for 30 s at the first exchange of a group of processes."""
    sizes = [*mesh(data=2, node=2), "TRAIN_STEPS=2", "LOG_EVERY=1"]
    cluster.finish("together", cluster.start("together", 2, 2, *sizes, before=LATE))
    assert "late" in cluster.log("together", 1)
    assert len(lines(cluster.folder / "together" / "metrics.jsonl")) == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_signal_to_one_process_saves_and_ends_all(cluster):
    processes = cluster.start("together", 2, 2, "TRAIN_STEPS=100000", "LOG_EVERY=1")
    cluster.wait_for_lines("together", 2)
    processes[1].send_signal(signal.SIGTERM)
    # Of each of them, so that whichever a launcher looks at says: start all again.
    cluster.finish("together", processes, STOPPED_STATUS)
    said = re.search(
        r"Training stopped by a signal; the state is saved at step (\d+)",
        cluster.log("together"),
    )
    assert said and (cluster.folder / "together" / "checkpoints" / said[1]).is_dir()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_another_number_of_processes_goes_on(cluster):
    """Two processes begin, one goes on, with the data where they left off."""
    first, steps = ["TRAIN_STEPS=2", "LOG_EVERY=1"], ["TRAIN_STEPS=4", "LOG_EVERY=1"]
    more = ["EVAL_EVERY=2", "CHECKPOINT_EVERY=2"]
    cluster.alone("alone", 4, *steps, *more)
    cluster.finish("changing", cluster.start("changing", 2, 2, *first, *more))
    cluster.alone("changing", 4, *steps, *more)
    assert_same_run(cluster, "changing", "alone", rtol=1e-4)


@pytest.mark.slow
def test_differing_commands_are_refused_by_name(cluster):
    port, commands = free_port(), []
    for index in range(2):
        words = arguments(cluster.folder / "run", cluster.files, f"BATCH_SIZE={8 + 8 * index}")
        words += [f"--coordinator=localhost:{port}", "--num_processes=2"]
        commands.append(
            [sys.executable, "-m", "switchx", "train", *words, f"--process_id={index}"]
        )
    outcomes = run_together(commands, child_environment(cluster.folder / "cache", 2))
    for status, said in outcomes:
        assert status == 2 and "process 1 (" in said and "batch_size: 16, not 8" in said
    assert not (cluster.folder / "run").exists()
