# SPDX-License-Identifier: Apache-2.0
"""The options of several hosts; processes that use them: tests/integration."""

import logging
import os

import pytest

from switchx.cli import hosts, train
from switchx.cli.arguments import UsageError
from switchx.cli.main import _parse, _parser, main
from switchx.hosts.processes import Processes
from switchx.progress import SilentReporter
from switchx.storage.cache import StorageSpec
from tests.training.jobs import make_job

TRAIN = ["train", "--gin_file=x.gin", "--model_dir=run"]
ALL = ["--coordinator=a:1", "--num_processes=2", "--process_id=1"]


def parsed(*options):
    return _parse(_parser(), [*TRAIN, *options])


def test_options_go_before_the_environment():
    launcher = {
        "JAX_COORDINATOR_ADDRESS": "b:2",
        "JAX_NUM_PROCESSES": "4",
        "JAX_PROCESS_ID": "3",
    }
    assert hosts.processes_of(parsed(), {}) is None
    assert hosts.processes_of(parsed(), launcher) == Processes("b:2", 4, 3)
    assert hosts.processes_of(parsed(*ALL), launcher) == Processes("a:1", 2, 1)


def test_all_of_them_or_none():
    with pytest.raises(UsageError, match="give --process_id too, or none of the three"):
        hosts.processes_of(parsed(*ALL[:2]), {})
    with pytest.raises(UsageError, match="give --coordinator and --num_processes too, or none"):
        hosts.processes_of(parsed(ALL[2]), {})


def test_wrong_ones_end_the_command_at_once(capsys):
    assert main([*TRAIN, *ALL[:2], "--process_id=2"]) == 2
    assert capsys.readouterr().err == (
        "switchx train: error: process_id=2 is not one of num_processes=2; use 0 to 1, each "
        "once\n"
    )
    assert main([*TRAIN, "--coordinator=here", *ALL[1:]]) == 2
    assert "coordinator='here' is no HOST:PORT" in capsys.readouterr().err


def test_the_statement_is_of_what_has_to_be_equal():
    def state(job, commit="abc"):
        return hosts.statement(job, parsed(), commit, "model_dir", "mesh", "hardware")

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
    assert state(job, "def") != same


def test_other_processes_show_what_went_wrong_alone(capsys):
    with SilentReporter(3) as reporter:
        reporter.note("resumed")
        logging.getLogger("switchx.x").info("opening")
        logging.getLogger("switchx.x").warning("the disk is slow")
    assert capsys.readouterr().err == "process 3: warning: the disk is slow\n"


def test_a_launcher_is_told_that_a_stopped_run_is_to_go_on():
    several = Processes("localhost:8476", 2, 0)
    assert train.exit_status(is_finished=True, processes=several) == 0
    assert train.exit_status(is_finished=False, processes=several) == os.EX_TEMPFAIL == 75
    # A person who ends a run with Ctrl-C did what was meant.
    assert train.exit_status(is_finished=False, processes=None) == 0
