# SPDX-License-Identifier: Apache-2.0
"""Experts by tier: the paper's formulas, real arrays and records, traffic worked by hand."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from switchx import tree
from switchx.checkpoint.run_folder import RunFolder
from switchx.compiled.workload import workload_of
from switchx.hardware.spec import load_hardware
from switchx.inference.offload.copy_times import streaming, touched_experts
from switchx.models.stored_experts import storage_refusal
from switchx.optim.adafactor import Adafactor
from switchx.optim.adamw import AdamW
from switchx.optim.schedules import Constant
from switchx.partitioning.mesh import AXES, MeshSpec
from switchx.planner.layout import Layout
from switchx.planner.memory import memory_use
from switchx.planner.search import DOES_NOT_FIT, predict, search
from switchx.planner.step_time import step_time
from switchx.planner.storage_tiers import (
    Storage,
    expert_bytes,
    paper_bytes,
    paper_bytes_of,
    storage_use,
    touched_share,
)
from switchx.training.offload.disk_program import LayeredProgram
from switchx.training.offload.lazy_update import LazyUpdate
from switchx.training.offload.storage_spec import StorageSpec
from switchx.training.programs import compiled_program
from tests.compilation import on_devices
from tests.planner.workloads import DENSE, SPARSE, make_workload
from tests.training.jobs import make_job

H200 = load_hardware("h200")
ONE = Layout(dispatcher="gather")
# Of SPARSE: two Switch layers of 8 experts, each of two matrices of 64 x 128, in float32.
RUN = 8 * 2 * 64 * 128 * 4
PARAMS = 2 * RUN


def adamw(model=SPARSE, **changes):
    return make_job(model, **(dict(optimizer=AdamW(), batch_size=16) | changes))


def test_the_papers_formulas_on_its_own_model():
    """Table 1's first row, a GPU of 8, worked by hand: 12 layers, all sparse, an expert a GPU.

    D = 12 * 4 * 4096^2 + 50304 * 4096 = 1,011,351,552; an expert has 8 * 4096^2 weights, so
    S of a GPU = 12 * 134,217,728 = 1,610,612,736; 8 S + D is the table's 13.9 billion.
    """
    dense, sparse = 1_011_351_552, 1_610_612_736
    assert round((8 * sparse + dense) / 1e9, 1) == 13.9
    found = paper_bytes(dense, sparse, layers=12, devices=8, touched=1.0)
    assert found.device == 2_022_703_104 + 536_870_912
    assert found.host == 25_769_803_776
    assert found.disk == 19_327_352_832
    # A quarter of the experts touched: what is not alpha's stays.
    quarter = paper_bytes(dense, sparse, layers=12, devices=8, touched=0.25)
    assert quarter.device == 2_022_703_104 + 134_217_728
    assert (quarter.host, quarter.disk) == (found.host / 4, found.disk)


def test_the_papers_formulas_of_a_workload():
    workload = make_workload()
    weights = PARAMS // 4
    others = sum(
        math.prod(a.shape) for a in workload.state if a.kind == "params" and a.table == "params"
    )
    layout = Layout(data=2, expert=4, dispatcher="all_to_all")
    found = paper_bytes_of(workload, layout, Storage(touched=0.5))
    assert found == paper_bytes(others, weights / 4, 2, 8, 0.5)


def test_bytes_are_those_of_the_training_state():
    """Of shape structs with shardings: two parts of experts, whole statistics beside them."""
    job = adamw(mesh=MeshSpec(data=2, expert=4))
    program = compiled_program(job, jax.devices()[:8])
    state, total = program.abstract_state, 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if "experts" in jax.tree_util.keystr(path) and leaf.shape:
            total += math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    layout = Layout(data=2, expert=4, dispatcher="all_to_all")
    kinds = [expert_bytes(workload_of(job), layout, kind) for kind in ("params", "optimizer")]
    assert sum(kinds) == total == PARAMS / 4 * 3  # weights, momentum, variance


def test_records_have_the_bytes_of_the_disk(tmp_path):
    job = adamw(mesh=MeshSpec(data=1), storage=StorageSpec("disk"))
    layout = LayeredProgram(job, RunFolder(tmp_path), jax.devices()[:1]).experts.layout
    use = storage_use(workload_of(job), ONE, Storage("disk"), H200)
    assert use.bytes.disk == layout.num_keys * layout.record_bytes == 3 * PARAMS
    assert use.bytes.host == use.bytes.disk + use.touched * PARAMS
    assert use.bytes.device == 2 * RUN + RUN


def test_experts_in_host_memory_leave_the_device():
    workload = workload_of(adamw(dataclasses.replace(SPARSE, remat="full")))
    memory, plan = memory_use(workload, ONE), predict(workload, ONE, H200, Storage("host"))
    # Runs are computed again whatever the model says of it.
    assert plan == predict(workload_of(adamw()), ONE, H200, Storage("host"))
    # Weights, gradients, two statistics on the host. On the device two slots with their
    # gradients (4 runs), or in the update five arrays of a run, the most of which counts.
    assert plan.storage.bytes.host == 4 * PARAMS
    assert plan.memory.slots == 4 * RUN
    assert plan.memory.total == memory.total - 4 * PARAMS + 4 * RUN
    more = predict(workload, ONE, H200, Storage("host", slots=1)).memory.slots
    assert more == 4 * RUN  # one slot's would be 2: the update's new weights, old ones, two
    # Forward and backward read the weights; the update reads four arrays and writes three.
    assert plan.storage.to_device == 2 * PARAMS + 4 * PARAMS
    assert plan.storage.from_device == PARAMS + 3 * PARAMS
    link = 64e9 * 0.8
    assert plan.storage.layers_s == pytest.approx(2 * PARAMS / link)
    time = step_time(workload, ONE, H200)
    waits = max(0, 2 * PARAMS / link - time.compute_s) + 4 * PARAMS / link - time.update_s
    assert plan.time.step_s == pytest.approx(time.step_s + waits)


def test_microbatches_stream_again_and_a_disk_is_swept_three_times():
    workload = workload_of(adamw())
    twice = dataclasses.replace(ONE, num_microbatches=2)
    use = storage_use(workload, twice, Storage("host"), H200)
    assert use.to_device == (2 * 2 + 1 + 4) * PARAMS and use.from_device == (2 + 3) * PARAMS
    workload = workload_of(adamw())
    records = 3 * PARAMS
    half = Storage("disk", host_bytes=records // 2, touched=0.75, checkpoint_every=10)
    use = storage_use(workload, ONE, half, H200)
    # Half of all is cached, two thirds of what is touched: a third of the requests miss.
    assert use.disk_read == pytest.approx(3 * records / 4)
    assert use.disk_written == pytest.approx(records / 4 + records / 10)
    assert use.bytes.host == records / 2 + 0.75 * PARAMS
    assert use.to_device == 2 * 0.75 * PARAMS and use.from_device == 0.75 * PARAMS
    assert use.day_written(2.0) == use.disk_written * 43_200


def test_an_update_on_the_host_moves_what_its_program_does():
    """Bytes of the compiled update of an expert, for AdamW; Adafactor's means read more."""
    params = {
        "w_in_EDF": jax.ShapeDtypeStruct((1, 64, 128), "float32"),
        "w_out_EFD": jax.ShapeDtypeStruct((1, 128, 64), "float32"),
    }
    accessed = {}
    for optimizer in (AdamW(), Adafactor()):
        lazy = LazyUpdate(optimizer, Constant(1e-3))
        form = lazy.form(params)
        zeros = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in params.items()}
        record = lazy.first_record(form, zeros)
        state, numbers = form.state(record), (np.int32(1), np.bool_(True), np.float32(1))
        with jax.set_mesh(lazy._mesh):
            program = lazy._advance.lower(state, tree.nested(zeros), *numbers).compile()
        size = sum(array.nbytes for array in record.arrays.values())
        gradient = sum(array.nbytes for array in zeros.values())
        bytes_accessed = program.cost_analysis()["bytes accessed"]
        accessed[optimizer] = bytes_accessed / (4 * size + 4 * gradient)
    assert accessed[AdamW()] == pytest.approx(1, rel=0.1)
    assert 1 < accessed[Adafactor()] < 1.8


def test_a_step_with_a_disk_waits_for_the_hosts_memory():
    use = storage_use(workload_of(adamw()), ONE, Storage("disk", touched=1.0), H200)
    memory = H200.host.memory_bytes_per_s * H200.host.efficiency
    # Records and gradients four times each; banks and gradients, in and out, nine times.
    assert use.update_s == pytest.approx((4 * 3 + 4) * PARAMS / memory)
    assert use.layers_s == pytest.approx(
        max(2 * PARAMS / H200.host.achieved_bytes_per_s, (4 + 2 + 3) * PARAMS / memory)
    )


@pytest.mark.parametrize(
    "axes, part",
    [
        (dict(data=8), 1),  # eight replicas of one host, which stores each expert once
        (dict(expert=8), 1),
        (dict(expert=4, model=2), 1),
        (dict(data=2, expert=8), 1),  # two hosts with all experts
        (dict(fsdp=16), 1),  # with slices of all: each stores them whole
        (dict(expert=8, model=2), 1 / 2),  # two hosts with four of the eight parts each
        (dict(node=2, expert=4, model=2), 1 / 2),  # experts over hosts first
    ],
)
def test_a_host_stores_each_of_its_experts_once(axes, part):
    """Of hosts with eight devices that are neighbours on the mesh."""
    layout = Layout(**axes, dispatcher="gather")
    workload = workload_of(adamw())
    use = storage_use(workload, layout, Storage("disk", touched=0.5), H200)
    assert H200.host.devices == 8
    assert 8 * use.bytes.disk == pytest.approx(part * 3 * PARAMS)
    assert 8 * use.from_device == pytest.approx(part * 0.5 * PARAMS)
    # What a device gets are its slices.
    assert use.to_device == pytest.approx(2 * 0.5 * expert_bytes(workload, layout, "params"))
    least = math.ceil(part * 3 * PARAMS / 2)
    with pytest.raises(ValueError, match=f"use StorageSpec.host_bytes={least} or more"):
        storage_use(workload, layout, Storage("disk", host_bytes=least - 1), H200)
    half = storage_use(workload, layout, Storage("disk", host_bytes=least, touched=1.0), H200)
    assert 8 * half.bytes.host == pytest.approx(least + part * PARAMS)


@settings(max_examples=30)
@given(
    st.floats(0.05, 1.0), st.floats(0.5, 1.0), st.floats(0.5, 1.0), st.sampled_from([1, 2, 4])
)
def test_more_memory_never_costs_time(touched, first, second, microbatches):
    workload = make_workload()
    layout = dataclasses.replace(ONE, num_microbatches=microbatches)
    records = sum(expert_bytes(workload, layout, kind) for kind in ("params", "optimizer"))
    less, more = sorted((first, second))
    uses = [
        storage_use(
            workload, layout, Storage("disk", host_bytes=int(part * records) + 1,
                                      touched=touched), H200
        )
        for part in (less, more)
    ]  # fmt: skip
    assert uses[1].disk_read <= uses[0].disk_read
    assert uses[1].disk_written <= uses[0].disk_written
    assert uses[1].layers_s <= uses[0].layers_s and uses[1].update_s <= uses[0].update_s
    assert uses[0].disk_read >= 3 * (uses[0].disk_written - records / 1000) * 0.999


def test_uniform_tokens_touch_what_counting_says():
    """All 3^2 pairs of choices of 3 experts: 3 pairs touch one, 6 touch two."""
    assert touched_experts(3, 2) == pytest.approx((3 * 1 + 6 * 2) / 9)
    # 16 rows of 16 tokens, 8 experts.
    assert touched_share(make_workload(), Storage()) == pytest.approx(1 - (7 / 8) ** 256)


NAMED = dataclasses.replace(
    SPARSE, scan_layers=False,
    switch=dataclasses.replace(SPARSE.switch, encoder_layers=(), decoder_layers=(1,)),
)  # fmt: skip
REFUSED = [
    (DENSE, "host", {}, {}, "a dense model with StorageSpec.experts='host'"),
    (dataclasses.replace(SPARSE, scan_layers=False), "disk", {}, {}, "use scan_layers=True"),
    (NAMED, "host", {}, {}, "sparse blocks that are named with StorageSpec.experts='host'"),
    (SPARSE, "host", {}, {"bucket_bytes": 7}, "StepConfig.bucket_bytes=7 with"),
    (SPARSE, "host", {"slots": 3}, {}, "slots=3, but the decoder has 2 periods"),
    (
        SPARSE,
        "disk",
        {"slots": 3},
        {},
        "slots=3, but the model has 2 periods of blocks (decoder)",
    ),
    (SPARSE, "disk", {"pipe": 2}, {}, "mesh axis 'pipe' of size 2 with"),
    (SPARSE, "host", {"pipe": 2}, {}, "mesh axis 'pipe' of size 2 with"),
]


@pytest.mark.parametrize("model, tier, sizes, more, words", REFUSED)
def test_refusals(model, tier, sizes, more, words):
    axes = {name: size for name, size in sizes.items() if name != "slots"}
    settings = sizes.get("slots", 2), axes
    assert words in storage_refusal(model, tier, *settings, **more)
    assert storage_refusal(model, "device", *settings, **more) is None


def test_training_refuses_with_the_planners_words(tmp_path):
    job = adamw(mesh=MeshSpec(data=1, pipe=2), storage=StorageSpec("disk"))
    with on_devices(2), pytest.raises(ValueError, match="StorageSpec.experts") as error:
        LayeredProgram(job, RunFolder(tmp_path))
    sizes = dict.fromkeys(AXES, 1) | {"pipe": 2}
    assert str(error.value) == storage_refusal(SPARSE, "disk", 2, sizes)


def test_hardware_without_tiers():
    for tier in ("host", "disk"):
        bare = dataclasses.replace(H200, **{tier: None})
        with pytest.raises(ValueError, match=rf"h200 has no \[{tier}\].*specs/h200.toml"):
            storage_use(make_workload(), ONE, Storage(tier), bare)


def test_the_search_finds_the_tier_that_fits():
    # Of one row: there are no microbatches to make room with.
    workload = workload_of(adamw(batch_size=1))
    least = {
        tier: min(p.memory.total for p in search(workload, H200, 1, Storage(tier)).plans)
        for tier in ("device", "host")
    }
    assert least["host"] < least["device"]
    between = sum(least.values()) / 2
    memory = dataclasses.replace(H200.memory, num_bytes=between, usable=1.0)
    small = dataclasses.replace(H200, memory=memory)
    assert set(search(workload, small, 1).refused) == {DOES_NOT_FIT}
    plans = search(workload, small, 1, Storage("host")).plans
    assert plans and all(plan.time.storage_s > 0 for plan in plans)
    host = dataclasses.replace(H200.host, num_bytes=PARAMS)
    crowded = dataclasses.replace(small, host=host)
    refused = search(workload, crowded, 1, Storage("host")).refused
    assert "needs more memory than a host has" in refused


def test_tokens_that_hide_a_copy():
    """Megatron-LM's issue 6491: 989 TFLOP/s over 450 GB/s hides bfloat16 from 2,198 tokens an
    expert on; int4 from a quarter of that."""
    compute = dataclasses.replace(H200.compute, peak_flops_per_s=989e12, efficiency=1.0)
    host = dataclasses.replace(H200.host, bytes_per_s=450e9, efficiency=1.0)
    hardware = dataclasses.replace(H200, compute=compute, host=host)
    weights = 2 * 64 * 128
    least = [
        streaming(SPARSE, hardware, "decoder", 1, weights * size).least_tokens
        for size in (2, 0.5)
    ]
    assert least == pytest.approx([2197.8, 549.4], abs=0.1)
    few = streaming(SPARSE, hardware, "decoder", 4, weights * 2, hits=0.5)
    assert few.mode == "chosen" and few.tokens_per_expert == 0.5
    assert few.chosen_bytes == pytest.approx(2 * touched_experts(8, 4) * 0.5 * weights * 2)
    assert few.moved_s == few.chosen_bytes / 450e9
    many = streaming(SPARSE, hardware, "decoder", 8 * 2198, weights * 2)
    assert many.mode == "ring" and many.moved_s == 2 * 8 * weights * 2 / 450e9
    assert "17,584 tokens: 2,198.00 an expert reach the 2,198" in str(many)
    with pytest.raises(ValueError, match="the encoder has no Switch layers"):
        streaming(SPARSE, hardware, "encoder", 4, 1)
