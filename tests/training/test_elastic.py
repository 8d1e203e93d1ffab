# SPDX-License-Identifier: Apache-2.0
"""A job on the devices there are: fewer and fewer, the same losses."""

import dataclasses
import json

import jax
import pytest

from switchx.checkpoint.run_folder import RunFolder
from switchx.planner.hardware import hardware_of, load_hardware
from switchx.storage.cache import StorageSpec
from switchx.training.elastic import job_for_devices
from switchx.training.loop import train
from switchx.training.step import StepConfig
from tests.data.refusals import refused
from tests.planner.test_search import small
from tests.training.jobs import SPARSE, make_job
from tests.training.test_loop import Events

V5E = load_hardware("v5e")
JOB = make_job(SPARSE, batch_size=24, train_steps=6)


def losses_of(run: RunFolder) -> list[float]:
    return [json.loads(line)["loss"] for line in run.metrics.read_text().splitlines()]


def test_lost_devices_change_no_loss(tmp_path):
    whole, elastic = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "elastic")
    train(JOB, whole, Events(), devices=jax.devices()[:1])
    used = []
    for count, steps in ((7, 2), (2, 6)):
        here = job_for_devices(JOB, V5E, jax.devices()[:count])
        job = dataclasses.replace(here.job, train_steps=steps)
        train(job, elastic, events := Events(), devices=here.devices)
        used.append((len(here.devices), here.num_idle))
    assert used == [(6, 1), (2, 0)]
    assert any("resumed from step 2" in note for note in events.notes)
    assert losses_of(elastic) == pytest.approx(losses_of(whole), rel=1e-6)


def test_microbatches_are_raised_until_it_fits():
    (device,) = jax.devices()[:1]
    roomy = job_for_devices(JOB, V5E, [device])
    assert roomy.job.step.num_microbatches == 1
    tight = job_for_devices(JOB, small(V5E, roomy.plan.memory.total * 0.9), [device])
    assert tight.job.step.num_microbatches > 1
    assert tight.job.batch_size == JOB.batch_size


def test_microbatches_that_tear_routing_groups_apart_are_not_taken():
    rows = dataclasses.replace(SPARSE.switch, group_size=24 * 8)  # one group is the batch
    job = make_job(dataclasses.replace(SPARSE, switch=rows), batch_size=24)
    roomy = job_for_devices(job, V5E, jax.devices()[:1])
    assert roomy.job.step.num_microbatches == 1
    with refused("no mesh of up to 1 devices of v5e runs this job with its 24 rows<any>"):
        job_for_devices(job, small(V5E, roomy.plan.memory.total * 0.9), jax.devices()[:1])


def test_what_the_planner_does_not_know_is_refused():
    for changes in (
        dict(step=StepConfig(bucket_bytes=1024)),
        dict(storage=StorageSpec("disk")),
    ):
        with refused("<any>--mesh=auto plans neither; leave them out<any>"):
            job_for_devices(make_job(SPARSE, **changes), V5E)
    with refused("no mesh of up to 8 devices of v5e runs this job<any>needs more memory<any>"):
        job_for_devices(JOB, small(V5E, 1000.0))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
    ],
)
def test_devices_are_known_by_their_kind(kind, name):
    assert hardware_of(kind).name == name


def test_unknown_devices_are_refused():
    with refused("nothing says what a device 'cpu' can do; give --hardware=NAME, of a100<any>"):
        hardware_of("cpu")
