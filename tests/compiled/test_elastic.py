# SPDX-License-Identifier: Apache-2.0
"""A job on the devices there are: fewer and fewer, the same losses."""

import dataclasses

import jax
import pytest

from switchx.compiled.elastic import job_for_devices
from switchx.models.adapters import LoRASpec
from switchx.models.stored_experts import storage_refusal
from switchx.training.offload.storage_spec import StorageSpec
from switchx.training.step import StepConfig
from tests.compiled.fewer_devices import V5E, losses_on_fewer
from tests.data.refusals import refused
from tests.planner.workloads import small
from tests.training.jobs import SPARSE, make_job, stacked

pytestmark = pytest.mark.usefixtures("steps_traced_once")

JOB = make_job(SPARSE, batch_size=24, eval_every=4)


def test_microbatches_are_raised_until_it_fits():
    (device,) = jax.devices()[:1]
    roomy = job_for_devices(JOB, V5E, [device])
    assert roomy.job.step.num_microbatches == 1
    tight = job_for_devices(JOB, small(V5E, roomy.plan.memory.total * 0.9), [device])
    assert tight.job.step.num_microbatches > 1
    assert tight.job.batch_size == JOB.batch_size


def test_exchanges_in_parts_end_where_nothing_is_exchanged():
    switch = dataclasses.replace(SPARSE.switch, dispatcher="all_to_all", exchange_parts=2)
    job = make_job(dataclasses.replace(SPARSE, switch=switch), batch_size=24)
    planned = job_for_devices(job, V5E, jax.devices()[:1]).job.model.switch
    assert (planned.dispatcher, planned.exchange_parts) != ("all_to_all", 2)


def test_microbatches_that_tear_routing_groups_apart_are_not_taken():
    rows = dataclasses.replace(SPARSE.switch, group_size=24 * 8)  # one group is the batch
    job = make_job(dataclasses.replace(SPARSE, switch=rows), batch_size=24)
    roomy = job_for_devices(job, V5E, jax.devices()[:1])
    assert roomy.job.step.num_microbatches == 1
    with refused("no mesh of up to 1 devices of v5e runs this job with its 24 rows<any>"):
        job_for_devices(job, small(V5E, roomy.plan.memory.total * 0.9), jax.devices()[:1])


def test_experts_stay_in_storage():
    """All meshes that `storage_refusal` lets through, and the memory of slots alone."""
    model = stacked(dataclasses.replace(SPARSE, d_ff=512), 4)
    plans = {}
    for tier in ("device", "host", "disk"):
        job = make_job(model, batch_size=24, storage=StorageSpec(tier))
        here = job_for_devices(job, V5E, jax.devices()[:7])
        plan = plans[tier] = here.plan
        assert (plan.storage.tier, here.job.storage) == (tier, job.storage)
        assert storage_refusal(model, tier, 2, plan.layout.shape) is None
        assert tier == "device" or (plan.layout.pipe == 1 and plan.memory.slots > 0)
        assert len(here.devices) == here.job.mesh.num_devices(1) == 7 - here.num_idle
    assert len({plans["host"].layout.size, plans["device"].layout.size, 6}) == 1
    # A device that has room for the slots and not for all experts.
    (device,) = jax.devices()[:1]
    whole, host = (
        job_for_devices(make_job(model, storage=StorageSpec(tier)), V5E, [device]).plan.memory
        for tier in ("device", "host")
    )
    tight = small(V5E, (whole.total + host.total) / 2)
    host_job = make_job(model, storage=StorageSpec("host"))
    assert job_for_devices(host_job, tight, [device]).job.step.num_microbatches == 1
    # ... or not on one device without microbatches.
    resident = job_for_devices(make_job(model), tight, [device]).job.step
    assert resident.num_microbatches > 1


@pytest.mark.slow
def test_lost_devices_change_no_loss_of_experts_in_host_memory(tmp_path):
    model = dataclasses.replace(stacked(SPARSE, 4), dropout_rate=0.0)
    losses_on_fewer(make_job(model, batch_size=24, storage=StorageSpec("host")), tmp_path)


def test_what_the_planner_does_not_know_is_refused():
    for changes, message in (
        (dict(step=StepConfig(bucket_bytes=1024)), "<any>does not plan buckets; leave<any>"),
        (
            dict(lora=LoRASpec("nowhere")),
            "--mesh=auto does not plan adapters (TrainingJob.lora)",
        ),
        (dict(storage=StorageSpec("host")), "ModelConfig.scan_layers=False with<any>"),
    ):
        with refused(message):
            job_for_devices(make_job(SPARSE, **changes), V5E)
    with refused("no mesh of up to 8 devices of v5e runs this job<any>needs more memory<any>"):
        job_for_devices(JOB, small(V5E, 1000.0))
