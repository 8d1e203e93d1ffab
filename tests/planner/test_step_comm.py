# SPDX-License-Identifier: Apache-2.0
"""Collectives of whole steps, worked by hand; tests/promises compares them with HLO."""

import dataclasses
import math

import pytest

from switchx.hardware.spec import load_hardware
from switchx.models.config import Precision
from switchx.pipeline.schedule import ScheduleSpec
from switchx.planner.layout import Layout, StateArray, local_shape
from switchx.planner.step_comm import rows_on_device, step_collectives
from tests.data.refusals import refused
from tests.planner.workloads import DENSE, SPARSE, SWITCH, make_workload
from tests.promises.planned_bytes import compiled_on_cpu

TPU = load_hardware("v5e").compute
ROWS, LENGTH, D, F, V, E = 16, 16, 64, 128, 96, 8
FLAT = dataclasses.replace(DENSE, scan_layers=False)


def by_what(planned) -> dict[str, tuple]:
    return {each.what: (each.kind, each.num_bytes, each.count) for each in planned}


def total(planned, part: str) -> float:
    return sum(each.total_bytes for each in planned if each.part == part)


def test_data_parallelism_sums_gradients_once_and_microbatches_are_more():
    workload = make_workload(FLAT)
    planned = step_collectives(workload, Layout(data=8))
    elements = sum(math.prod(each.shape) for each in workload.state if each.kind == "params")
    bias = 4 * 8 * LENGTH**2 * 4  # its gradient is summed layer by layer, before the buckets
    assert {each.kind for each in planned} == {"all-reduce"}
    assert total(planned, "weights") == elements * 4 + bias
    one = step_collectives(make_workload(FLAT), Layout(model=4))
    two = step_collectives(make_workload(FLAT), Layout(model=4, num_microbatches=2))
    assert total(one, "layers") == total(two, "layers")
    assert by_what(two)["FFN outputs"][2] == 2 * by_what(one)["FFN outputs"][2]


def test_tensor_parallelism_has_two_sums_a_sublayer():
    # Megatron-LM, section 3: forward one, backward one; of attention and of the FFN.
    planned = by_what(step_collectives(make_workload(FLAT), Layout(model=8)))
    own = ROWS * LENGTH * D * 4
    for what in ("attention outputs", "FFN outputs", "gradients of FFN inputs"):
        assert planned[what] == ("all-reduce", own, 4)
    assert planned["gradients of attention inputs"] == ("all-reduce", own, 4)
    assert planned["looked up rows"] == ("all-reduce", own, 1)
    layout = Layout(model=8)
    planned = compiled_on_cpu(step_collectives(make_workload(FLAT), layout), layout)
    assert by_what(planned)["gradients of attention inputs"][2] == 3 * 4


def test_full_remat_communicates_again_what_it_computes_again():
    model = dataclasses.replace(FLAT, remat="full")
    planned = by_what(step_collectives(make_workload(model), Layout(model=8)))
    assert planned["attention outputs"][2] == 8
    # The FFN's output only goes into a sum that is kept.
    assert planned["FFN outputs"][2] == 4


def test_slices_are_gathered_and_their_gradients_scattered():
    layout = Layout(fsdp=8)
    planned = [
        each
        for each in step_collectives(make_workload(FLAT), layout)
        if each.what.endswith("w_in_DF")
    ]
    assert [(e.kind, e.num_bytes, e.count) for e in planned] == [
        ("all-gather", D * F * 4, 1),
        ("reduce-scatter", D * F * 4, 1),
    ] * 4
    on_cpu = compiled_on_cpu(planned, layout)
    assert {each.kind for each in on_cpu} == {"all-gather", "all-reduce"}


def test_a_tpu_sends_operands_of_products_as_bfloat16():
    """Of a float32 model. Gradients, scales and the router's weights stay float32."""
    layout = Layout(fsdp=2, expert=4, dispatcher="all_to_all")
    workload = make_workload(dataclasses.replace(SPARSE, scan_layers=False))
    found = {
        (each.kind, each.what): (each.num_bytes, on_tpu.num_bytes)
        for each, on_tpu in zip(
            step_collectives(workload, layout),
            step_collectives(workload, layout, TPU),
            strict=True,
        )
    }
    halved = {name for name, (own, on_tpu) in found.items() if on_tpu == own / 2}
    assert {own for own, on_tpu in found.values()} >= {D * F * 4, E // 4 * D * F * 4}
    weights = {"w_in_DF", "w_out_FD", "w_query_DHK", "w_key_DHK", "w_value_DHK", "w_out_HKD",
               "embedding_VD", "w_EDF", "w_EFD"}  # fmt: skip
    assert halved == {("all-gather", name) for name in weights} | {
        ("all-to-all", "tokens to experts"),
        ("all-to-all", "gradients of results"),
    }
    same = found.keys() - halved
    assert all(found[name][0] == found[name][1] for name in same)
    assert {("all-gather", "w_router_DE"), ("all-to-all", "results to tokens")} <= same


def test_kernels_read_what_the_model_computes_in():
    for compute, itemsize in (("float32", 4), ("bfloat16", 2)):
        model = dataclasses.replace(SPARSE, precision=Precision(compute=compute))
        layout = Layout(fsdp=8, dispatcher="dropless")
        planned = step_collectives(make_workload(model), layout, TPU)
        [gathered] = (e for e in planned if (e.kind, e.what) == ("all-gather", "w_EDF"))
        assert gathered.num_bytes == E * D * F * itemsize


def test_sums_of_products_are_of_their_dtype():
    """A sum of all microbatches is of gradients, which are of the parameters' dtype."""
    model = dataclasses.replace(FLAT, precision=Precision(compute="bfloat16"))
    for microbatches, itemsize in ((1, 2), (2, 4)):
        layout = Layout(data=8, num_microbatches=microbatches)
        planned = by_what(step_collectives(make_workload(model), layout))
        assert planned["gradient of w_in_DF"] == ("all-reduce", D * F * itemsize, 1)
        assert planned["gradient of embedding_VD"] == ("all-reduce", V * D * 4, 1)


def test_a_tpu_moves_sums_behind_a_loop_over_microbatches():
    """Not the token table's, nor those of blocks in a loop of their own."""
    layout = Layout(expert=8, dispatcher="all_to_all", num_microbatches=2)
    for is_scanned, compute, times in ((False, TPU, 1), (True, TPU, 2), (False, None, 2)):
        workload = make_workload(dataclasses.replace(SPARSE, scan_layers=is_scanned))
        target = () if compute is None else (compute,)
        planned = step_collectives(workload, layout, *target)
        sums = {e.what: e.total_bytes for e in planned if e.kind == "all-reduce"}
        per_array = 2 if is_scanned else 1  # two dense FFNs in one array of stacked blocks
        assert sums["gradient of w_in_DF"] == per_array * times * D * F * 4
        assert sums["gradient of embedding_VD"] == 2 * V * D * 4


def test_a_pipeline_sums_lookups_and_logits_apart():
    """The first stage's conditional has one, the last one's the other."""
    layout = Layout(pipe=2, expert=4, num_microbatches=4, dispatcher="all_to_all")
    planned = step_collectives(make_workload(), layout)
    sums = [e for e in planned if e.what == "gradient of embedding_VD" and "expert" in e.axes]
    assert [(e.num_bytes, e.count, e.terms) for e in sums] == [(V * D * 4, 2 * 4, 1)]


@pytest.mark.parametrize("microbatches", [1, 4])
def test_slices_of_the_optimizers_state_are_scattered_and_gathered_once(microbatches):
    """As an all-reduce is two passes of a ring, in any number of microbatches."""
    layout = Layout(data=4, num_microbatches=microbatches, has_optimizer_slices=True)
    workload = make_workload(FLAT)
    planned = step_collectives(workload, layout)
    elements = sum(math.prod(each.shape) for each in workload.state if each.kind == "params")
    for kind in ("reduce-scatter", "all-gather"):
        assert sum(each.total_bytes for each in planned if each.kind == kind) == elements * 4
    assert {each.kind for each in compiled_on_cpu(planned, layout)} == {
        "reduce-scatter",
        "all-gather",
    }


def test_what_is_no_experts_is_summed_over_experts_and_scattered_over_replicas():
    layout = Layout(data=2, expert=4, dispatcher="all_to_all", has_optimizer_slices=True)
    planned = step_collectives(make_workload(), layout)
    dense = [each for each in planned if each.what == "gradient of w_in_DF"]
    assert [(e.kind, e.axes, e.num_bytes, e.count) for e in dense] == [
        ("all-reduce", ("expert",), D * F * 4, 2),
        ("reduce-scatter", ("data",), D * F * 4, 2),
    ]
    experts = [each for each in planned if each.what == "gradient of w_EDF"]
    assert [(e.kind, e.axes, e.num_bytes, e.count) for e in experts] == [
        ("reduce-scatter", ("data",), E // 4 * D * F * 4, 2)
    ]


def test_experts_exchange_their_slots_four_times_a_layer():
    layout = Layout(expert=8, dispatcher="all_to_all")
    planned = step_collectives(make_workload(), layout)
    # A group of 16 tokens a pair of rows and device: 8 experts of 2 slots, two groups.
    slots = 2 * E * 2 * D * 4
    exchange = [each for each in planned if each.part == "exchange"]
    assert [(e.kind, e.num_bytes, e.count) for e in exchange] == [("all-to-all", slots, 2)] * 4
    experts = [each for each in planned if "w_EDF" in each.what]
    assert experts == []  # each device has its own and no other gradients


def test_pipelines_send_activations_and_sum_in_every_round():
    layout = Layout(pipe=4, data=2, num_microbatches=4)
    planned = by_what(step_collectives(make_workload(DENSE), layout))
    values = ROWS // 4 // 2 * LENGTH * D * 4
    # In each of 4 + 2 (4 - 1) ticks, whatever a stage has in it.
    assert planned["activations to the next stage"] == ("collective-permute", values, 10)
    assert planned["gradient of embedding_VD"] == ("all-reduce", V * D * 4, 1)
    # Four layers on four stages, gradients added up before they are summed.
    assert planned["gradient of w_in_DF"] == ("all-reduce", D * F * 4, 1)
    # 2 stages, 4 microbatches: 5 rounds of a period of 2 layers; `expert` has no replicas.
    layout = Layout(pipe=2, expert=4, num_microbatches=4, dispatcher="all_to_all")
    planned = by_what(step_collectives(make_workload(), layout))
    assert planned["gradient of w_out_HKD"] == ("all-reduce", 8 * 8 * D * 4, 5)
    # Forward, again before backward, and backward.
    assert planned["tokens to experts"][2] == 1 * 5 * 2
    assert planned["gradients of tokens"][2] == 1 * 5


def test_chunks_of_blocks_go_to_their_stages_and_gradients_back():
    """2 stages of 2 chunks: chunks 0 and 3 of 0 to 3 are where they belong."""
    schedule = ScheduleSpec("interleaved", 2)
    layout = Layout(pipe=2, num_microbatches=4, schedule=schedule)
    workload = make_workload(DENSE)
    planned = by_what(step_collectives(workload, layout))
    blocks = sum(
        math.prod(each.shape) * each.itemsize
        for each in workload.state
        if each.kind == "params" and each.is_in_blocks
    )
    for what in ("chunks of blocks to their stages", "gradients of chunks back"):
        assert planned[what] == ("collective-permute", blocks / 2 / 2, 1)
    # 4 x 2 + 1 rounds of half a stage.
    assert layout.rounds == 4.5


def test_rows_and_shapes_on_a_device():
    workload = make_workload()
    assert rows_on_device(workload, Layout(data=4, num_microbatches=2)) == 2
    array = StateArray("x/w_in_EDF", "EDF", (8, 64, 128), 4, "params")
    assert local_shape(array, Layout(expert=4, model=2)) == ((2, 64, 64), ("expert", "model"))
    sliced = Layout(model=2, dispatcher="sliced")
    assert local_shape(array, sliced) == ((4, 64, 128), ("model",))
    array = StateArray("x/w_in_EDF", "EDF", (6, 64, 128), 4, "params")
    with pytest.raises(ValueError, match="E=6 is not divisible"):
        local_shape(array, Layout(expert=4))


def test_experts_in_attention_have_no_formula():
    switch = dataclasses.replace(SWITCH, sublayers="both")
    workload = make_workload(dataclasses.replace(SPARSE, switch=switch))
    with refused("SwitchConfig.sublayers='both': <any>; plan sublayers='ffn'"):
        step_collectives(workload, Layout(data=8, dispatcher="gather"))
