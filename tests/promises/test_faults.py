# SPDX-License-Identifier: Apache-2.0
"""Broken promises are detected: wrong bits, order, bytes, sums and batches."""

import collections
import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from switchx.checkpoint.run_folder import RunFolder
from switchx.compiled.collectives import HloCollective, executed_collectives
from switchx.partitioning.constrain import use_mesh
from switchx.partitioning.mesh import MeshSpec
from switchx.storage.cache import BACKWARD, FORWARD
from switchx.storage.trace import trace_of_steps
from switchx.training import pipelined_program
from switchx.training.evaluate import eval_step
from tests.promises import elastic, loss_parity, pipelines, saves, storage, storage_order
from tests.promises.gradient_bytes import bytes_across_experts, crossed_axes, mesh_names
from tests.promises.planned_bytes import bytes_error
from tests.promises.step_cases import IN_BFLOAT16, ON_TPU, tpu_cases
from tests.promises.storage_order import Event, expected, violations


def values_of(rows, name: str) -> list:
    return [value for found, _, value in rows if found == name]


# Cases.


def test_meshes_are_of_every_kind():
    axes = {"pipe", "fsdp", "node", "expert", "model"}
    used = {axis for axis in axes for case in loss_parity.CASES if getattr(case.mesh, axis) > 1}
    assert used == axes
    schedules = {case.schedule.kind for case in loss_parity.CASES if case.mesh.pipe > 1}
    assert schedules == {"gpipe", "1f1b", "interleaved"}


def test_cases_for_a_tpu_are_cases():
    assert {case.name for case, _ in tpu_cases()} == {*ON_TPU, *IN_BFLOAT16}


# Bytes of collectives.


def test_kinds_do_not_make_up_for_each_other():
    """The same number of bytes of another kind counts as wrong twice."""
    one, other = (collections.Counter({kind: 100}) for kind in ("all-reduce", "all-gather"))
    assert bytes_error(one, other) == 2.0
    assert bytes_error(one, collections.Counter({"all-reduce": 90})) == 0.1


SIZES = {"pipe": 2, "data": 2, "model": 2}


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        (((0, 1), (2, 3), (4, 5), (6, 7)), {"model"}),
        (((0, 2), (1, 3), (4, 6), (5, 7)), {"data"}),
        # A permute to the next stage.
        (((0, 4), (1, 5)), {"pipe"}),
        ((tuple(range(8)),), {"pipe", "data", "model"}),
    ],
)
def test_axes_are_those_along_which_a_group_differs(groups, axes):
    assert crossed_axes(HloCollective("all-reduce", (), groups, 4), SIZES) == axes


def test_every_mesh_with_replicas_is_measured():
    names = mesh_names(jax.devices()[:8])
    assert {"data", "fsdp", "all_to_all", "pipeline", "pipeline_moe_stages", "pod"} <= set(
        names
    )
    assert {"data_expert", "expert_model_data", "hierarchical", "zero1"} <= set(names)
    # V is split over data there, and model.gin has no replicas.
    assert not {"vocab_rows", "model", "one_device"} & set(names)


@pytest.mark.parametrize(("axis", "is_found"), [("expert", True), ("data", False)])
@pytest.mark.parametrize("kind", ["all-reduce", "reduce-scatter"])
def test_a_sum_over_experts_is_found(axis, kind, is_found):
    """Tries a program that makes the mistake, and one that sums over replicas."""
    E, D, F = 8, 16, 96
    spec = MeshSpec(data=2, expert=2, model=2)

    def summed(w_EDF):
        if kind == "all-reduce":
            return jax.lax.psum(w_EDF, axis)
        return jax.lax.psum_scatter(w_EDF, axis, scatter_dimension=1, tiled=True)

    whole = PartitionSpec("expert", None, "model")
    out = whole if kind == "all-reduce" else PartitionSpec("expert", axis, "model")
    if axis == "expert":
        out = PartitionSpec(None, None if kind == "all-reduce" else axis, "model")
    with use_mesh(spec.build(), spec.rules):
        program = jax.shard_map(summed, in_specs=whole, out_specs=out, check_vma=False)
        text = jax.jit(program).lower(jnp.ones((E, D, F))).compile().as_text()
    sizes, executed = spec.build().shape, executed_collectives(text)
    assert {one.kind for one in executed} == {kind}
    found = bytes_across_experts(executed, sizes, ("expert",), F)
    assert found == (E // 2 * D * F // 2 * 4 if is_found else 0)
    # A router's gradient has to be summed.
    assert not bytes_across_experts(executed, sizes, ("expert",), 9 * F)


@pytest.mark.slow
def test_an_evaluation_that_gathers_the_blocks_is_found(monkeypatch):
    """What the compiler makes of stacked blocks that are split over `pipe`."""

    def whole(model, schedule, *given):
        return eval_step(model, *given)

    monkeypatch.setattr(pipelined_program, "pipelined_eval_step", whole)
    models = {"both": pipelines.DEEP["decoder-only"]}
    rows = list(pipelines.programs_of_stages(models))
    assert sum(values_of(rows, "pipeline_program_holds_whole_model")) == 1


# Runs that lose devices; saves.


def test_a_batch_of_another_step_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(elastic, "PARTS", ((1, 1), (1, 2)))
    for step, differs in ((1, False), (2, True)):
        with contextlib.closing(elastic.loader(elastic.make_job())) as loader:
            for _ in range(step):
                next(loader)
            state = loader.state()
        monkeypatch.setattr(elastic, "read_data_states", lambda path, state=state: [state])
        found = elastic.token_ids_differing(elastic.make_job(), RunFolder(tmp_path))
        assert (found > 0) == differs


def test_a_process_that_hashes_for_others_or_reads_again_is_seen():
    one = {"saved_bytes": 1000, "hashed_bytes": 250, "read_bytes": 9000}
    last = {"hashed_bytes": 300, "read_bytes": saves.CHUNK_BYTES + 9000}
    rows = list(saves.shares([one, one, one, one | last]))
    assert values_of(rows, "checkpoint_hashed_bytes_vs_share") == [1.2]
    assert values_of(rows, "checkpoint_bytes_read_back") == [saves.CHUNK_BYTES]
    with pytest.raises(RuntimeError, match="less was hashed than saved"):
        list(saves.shares([one]))


# Experts on a disk.


def test_bits_are_counted():
    one = {"a": np.array([1.0, 2.0], np.float32), "b": np.zeros(3, np.int8)}
    other = {name: array.copy() for name, array in one.items()}
    assert storage.differing_bits(one, other) == 0
    other["a"].view(np.int32)[1] ^= 5
    other["b"][0] = -1
    assert storage.differing_bits(one, other) == 2 + 8
    with pytest.raises(ValueError, match="cannot be compared"):
        storage.differing_bits(one, {"a": one["a"]})


def test_a_step_in_order_has_no_violation():
    for num_periods, slots in ((4, 2), (5, 3)):
        assert violations(expected(num_periods, slots), num_periods, slots) == []
    again = expected(4, 2)
    at = again.index(Event("compute", FORWARD, 2))
    again[at + 1 : at + 1] = [Event("compute", FORWARD, 1), Event("compute", FORWARD, 2)]
    assert violations(again, 4, 2) == []


@pytest.mark.parametrize("sweep", [FORWARD, BACKWARD])
@pytest.mark.parametrize("what", ["read", "compute", "keep"])
def test_what_is_out_of_order_is_named(what, sweep):
    events = expected(4, 2)
    found = [n for n, e in enumerate(events) if (e.what, e.sweep) == (what, sweep)]
    if not found:  # forward keeps nothing
        return
    without = events[: found[1]] + events[found[1] + 1 :]
    late = [*without[: found[1] + 1], events[found[1]], *without[found[1] + 1 :]]
    assert violations(without, 4, 2) and violations(late, 4, 2)
    events[found[1]] = events[found[1]]._replace(banks=2)
    assert violations(events, 4, 2)


@pytest.mark.slow  # compiles a program of ten layers
def test_a_program_with_more_slots_than_it_says_is_seen(monkeypatch):
    class OneMore(storage_order.WatchedGradients):
        def __init__(self, job, banks):
            storage = dataclasses.replace(job.storage, slots=job.storage.slots + 1)
            super().__init__(dataclasses.replace(job, storage=storage), banks)

    monkeypatch.setattr(storage_order, "WatchedGradients", OneMore)
    rows = storage_order.order_of_steps((2,), num_steps=1)
    assert max(values_of(rows, "order_violations")) > 0


@pytest.mark.slow  # compiles a model twice
def test_gradients_of_another_step_are_far(monkeypatch):
    class OneMicrobatch(storage.LayeredGradients):
        def __init__(self, config, loss, num_microbatches, slots):
            super().__init__(config, loss, 1, slots)

    monkeypatch.setattr(storage, "LayeredGradients", OneMicrobatch)
    model = dataclasses.replace(storage.MODEL, num_decoder_layers=2)
    assert storage.gradient_error(model) > 1e-3


def test_the_closed_formula_of_bytes_is_what_a_cache_does():
    layers, experts, steps = 5, 3, 4
    used = [[np.arange(experts)] * layers] * steps
    trace = trace_of_steps(used, [f"decoder {n}" for n in range(layers)], experts, 1, sweeps=3)
    found = storage_order.simulated(trace, experts, "lru")
    assert found == (steps * experts * (3 * layers - 2), steps * experts * layers)
