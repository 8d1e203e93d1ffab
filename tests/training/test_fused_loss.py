# SPDX-License-Identifier: Apache-2.0
"""Parameters gathered by buckets: gradients of one device, as few collectives as buckets."""

import dataclasses
from collections import Counter

import jax
import numpy as np
import pytest

from switchx import tree
from switchx.compiled.collectives import collectives
from switchx.models.config import RouterConfig
from switchx.optim.adamw import AdamW
from switchx.optim.updates import global_norm, sliced_global_norm
from switchx.partitioning.buckets import Slicing
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.rules import Rules
from switchx.training.programs import compiled_program
from switchx.training.step import StepConfig
from tests.bucket_counts import count_buckets
from tests.compare import assert_close_to_largest
from tests.data.refusals import refused
from tests.training.jobs import (
    DENSE,
    ENCODER_DECODER,
    LENGTH,
    SPARSE,
    WEIGHTY,
    make_batch,
    make_job,
    with_padded_rows,
    with_switch,
)
from tests.training.steps import raw_gradients

# Two runs of two blocks, dense and sparse.
SCANNED = dataclasses.replace(SPARSE, num_decoder_layers=4, scan_layers=True, remat="minimal")
UNROLLED = dataclasses.replace(ENCODER_DECODER, remat="full")
ONE_BUCKET = 2**30
ROWS = 16


def make_program(model, mesh, bucket_bytes=None, devices=None, num_microbatches=1):
    step = StepConfig(num_microbatches=num_microbatches, bucket_bytes=bucket_bytes)
    length = LENGTH if model.is_encoder_decoder else LENGTH // 2
    lengths = dict(inputs_length=length, targets_length=length)
    job = make_job(
        model, mesh=mesh, optimizer=AdamW(), loss=WEIGHTY, batch_size=ROWS, step=step, **lengths
    )
    return compiled_program(job, devices)


def gradients_of(program) -> dict:
    """Gradients, their norm, the loss, token sums and routing statistics, by name."""
    job = program.job
    # The first three rows hold nothing: a device has no group there.
    batch = with_padded_rows(make_batch(job.model, ROWS), 0, 1, 2)
    grads, *rest = raw_gradients(program, batch)
    with program.scope():
        norm = global_norm if job.step.bucket_bytes is None else sliced_global_norm
        found = {"grads": grads, "norm": jax.jit(norm)(grads), "rest": rest}
    return tree.named_leaves(jax.device_get(found))


@pytest.fixture(scope="module")
def want():
    """On one device."""
    return gradients_of(make_program(SCANNED, MeshSpec(), devices=jax.devices()[:1]))


@pytest.fixture(scope="module")
def one_bucket():
    """On eight devices, all slices of a block in one bucket."""
    return gradients_of(make_program(SCANNED, MeshSpec(fsdp=8), ONE_BUCKET))


def assert_close(got, want):
    assert_close_to_largest(got, want, 1e-5, least=1e-6)
    for name, leaf in want.items():
        assert not name.startswith("grads") or np.max(np.abs(leaf)) > 1e-4, name


def test_raw_gradients_are_those_of_one_device(want, one_bucket):
    """Losses too, which are means over groups and over tokens that devices have unevenly."""
    assert_close(one_bucket, want)


@pytest.mark.parametrize(("fsdp", "parts"), [(4, 1), (2, 2)])
@pytest.mark.slow
def test_raw_gradients_with_replicas_and_microbatches(fsdp, parts):
    alone = make_program(UNROLLED, MeshSpec(), None, jax.devices()[:1], num_microbatches=parts)
    program = make_program(UNROLLED, MeshSpec(fsdp=fsdp), ONE_BUCKET, num_microbatches=parts)
    assert_close(gradients_of(program), gradients_of(alone))


def compiled_step(program):
    with program.scope():
        batch = program.place(make_batch(program.job.model, ROWS))
        return program.train_step.lower(program.abstract_state, batch).compile()


def step_collectives(program) -> Counter:
    """How many collectives of each kind a whole training step has, its loops read once."""
    return Counter(each.kind for each in collectives(compiled_step(program).as_text()))


@pytest.mark.slow  # by default: tests/partitioning/test_buckets.py
@pytest.mark.parametrize(("bucket_bytes", "buckets"), [(ONE_BUCKET, (1, 2)), (8192, (2, 4))])
def test_a_step_has_as_many_collectives_as_buckets(bucket_bytes, buckets):
    """Scattered once, gathered once; those of blocks again in the backward pass."""
    program = make_program(SCANNED, MeshSpec(fsdp=8), bucket_bytes)
    found = step_collectives(program)
    slicing = Slicing.on(program.mesh, program.job.mesh.rules, bucket_bytes)
    assert count_buckets(program.abstract_state.params, slicing) == buckets
    outside, blocks = buckets
    assert found["reduce-scatter"] == outside + blocks
    assert found["all-gather"] == outside + 2 * blocks
    # Counts of tokens and groups, all measurements, the gradient norm, and gradients of what
    # has no slices; as many for any number of parameters.
    assert found["all-reduce"] <= 6
    assert found.keys() == {"reduce-scatter", "all-gather", "all-reduce"}


def test_gathered_parameters_are_freed():
    """Temporaries of 16 layers are less than half of these layers' parameters."""
    model = dataclasses.replace(
        DENSE, d_model=64, d_ff=256, num_decoder_layers=16, scan_layers=True, remat="full"
    )
    program = make_program(model, MeshSpec(fsdp=8), ONE_BUCKET)
    memory = compiled_step(program).memory_analysis()
    blocks = tree.num_bytes(program.abstract_state.params["decoder"]["blocks"])
    assert memory.temp_size_in_bytes < blocks / 2


REFUSED = {
    "no slices": (
        dict(mesh=MeshSpec()),
        "StepConfig.bucket_bytes=9 on a mesh where no axis slices D: nothing is gathered",
    ),
    "experts elsewhere": (
        dict(mesh=MeshSpec(fsdp=2, expert=2)),
        "StepConfig.bucket_bytes=9 with mesh axis 'expert' of size 2: buckets are "
        "gathered by devices that compute whole layers on their own tokens",
    ),
    "tensor parallel": (
        dict(mesh=MeshSpec(fsdp=2, model=2)),
        "StepConfig.bucket_bytes=9 with mesh axis 'model' of size 2: ",
    ),
    "rows elsewhere": (
        dict(
            mesh=MeshSpec(
                fsdp=2,
                rules=Rules(params=(("D", ("fsdp",)), ("V", ("data",))), may_stay_whole=()),
            )
        ),
        "StepConfig.bucket_bytes=9 with rules that slice other dimensions than D "
        "over data or fsdp",
    ),
    "kept": (
        dict(model=dataclasses.replace(SCANNED, remat="none")),
        "StepConfig.bucket_bytes=9 with ModelConfig.remat='none': all gathered "
        "parameters would be kept for the backward pass",
    ),
    "loads of all": (
        dict(router=RouterConfig(balance_scope="batch")),
        "StepConfig.bucket_bytes=9 with RouterConfig.balance_scope='batch': every "
        "device would need the load of all",
    ),
    "groups over devices": (
        dict(group_size=8 * LENGTH),
        "StepConfig.bucket_bytes=9 with routing groups of 64 tokens: each of 8 "
        "devices has 16 tokens, and groups have to stay whole",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_gathered_so_is_refused(name):
    changes, message = REFUSED[name]
    changes = {"mesh": MeshSpec(fsdp=8), "model": SCANNED} | changes
    switch = {key: changes.pop(key) for key in ("router", "group_size") if key in changes}
    with refused(message):
        make_program(with_switch(changes["model"], **switch), changes["mesh"], 9)


def test_a_bucket_of_nothing_is_refused():
    with refused("bucket_bytes=0"):
        StepConfig(bucket_bytes=0)
