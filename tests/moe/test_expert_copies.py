# SPDX-License-Identifier: Apache-2.0
"""Copies change where experts are computed, and no number: output and raw gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.moe import expert_copies
from switchx.moe.dispatchers import FUNCTIONS
from switchx.moe.expert_copies import gather_bank, plan_over_slots, with_copies
from switchx.partitioning.constrain import use_mesh
from switchx.partitioning.mesh import MeshSpec
from tests.cases import slow, slow_unless
from tests.moe.sharded import (
    HOMES,
    MOST_AXES,
    C,
    E,
    answer,
    answer_on,
    answerer,
    assert_same,
    largest_error,
    make_problem,
    name_of,
)

# Two copies of expert 2, three of expert 5, one of expert 0; nothing where it was.
TABLE = np.array([5, 2, 7, 0, 1, 5, 2, 3, 4, 6, 5, 0, 2, 5, 7, 1], np.int32)
CELLS = [("gather", MeshSpec(data=2, expert=4)), ("gather", MeshSpec()), *HOMES]
# Slots exchanged, and inside of the tensor-parallel group.
DEFAULT = [(name, MOST_AXES[name]) for name in ("all_to_all", "sliced")]


@pytest.mark.parametrize(
    ("name", "spec"), [slow_unless(cell in DEFAULT, *cell) for cell in CELLS], ids=name_of
)
def test_output_and_raw_gradients_are_those_without_copies(name, spec):
    """On every mesh: a weight's gradient is the sum of those of its copies, once."""
    problem = make_problem()
    run = answerer(with_copies(FUNCTIONS[name], TABLE))
    assert_same(answer_on(spec, name, problem, run), answer(FUNCTIONS["einsum"], problem))


def test_a_plan_over_slots_keeps_drops_and_divides_each_queue_evenly():
    plan = make_problem(capacity=3).plan
    got = plan_over_slots(plan, jnp.asarray(TABLE))
    np.testing.assert_array_equal(got.is_kept_GTS, plan.is_kept_GTS)
    np.testing.assert_array_equal(got.is_dropped_GTS, plan.is_dropped_GTS)
    table = np.append(TABLE, E)
    np.testing.assert_array_equal(table[got.expert_GTS], plan.expert_GTS)
    places = set()
    for g, t, s in np.argwhere(got.is_kept_GTS):
        place = (g, int(got.expert_GTS[g, t, s]), int(got.slot_GTS[g, t, s]))
        assert place not in places  # one choice a place
        places.add(place)
    for g in range(len(plan.expert_GTS)):
        for e in range(E):
            slots = np.flatnonzero(e == TABLE)
            used = [sum(1 for p in places if p[:2] == (g, slot)) for slot in slots]
            assert max(used) - min(used) <= 1
            for slot, count in zip(slots, used, strict=True):
                assert {p[2] for p in places if p[:2] == (g, slot)} == set(range(count))


def test_a_copy_whose_gradient_is_left_out_is_found(monkeypatch):
    """The mutation that raw gradients are compared for."""

    def without_last(experts, table, num_experts):
        bank = gather_bank(experts, table, num_experts)
        is_last = jnp.arange(len(TABLE)) == len(TABLE) - 3  # of expert 5
        return jax.tree.map(
            lambda w: jnp.where(
                is_last.reshape(-1, *[1] * (w.ndim - 1)), jax.lax.stop_gradient(w), w
            ),
            bank,
        )

    problem = make_problem()
    want = answer(FUNCTIONS["gather"], problem)
    monkeypatch.setattr(expert_copies, "gather_bank", without_last)
    got = answer(with_copies(FUNCTIONS["gather"], TABLE), problem)
    assert largest_error(got[0], want[0]) < 1e-6
    assert largest_error(got[1][2], want[1][2]) > 1e-2


def test_slots_that_do_not_divide_are_refused():
    spec, problem = MeshSpec(expert=4), make_problem(capacity=C)
    with (
        use_mesh(spec.build(), spec.rules),
        pytest.raises(ValueError, match="num_replicas=2 .*10 slots .*use num_replicas=0 or 4"),
    ):
        gather_bank(problem.bank, jnp.asarray(TABLE[:10]), E)


@pytest.mark.parametrize("platform", ["tpu", slow("cuda")])
def test_accelerators_send_rows_of_weights_and_their_gradients(platform):
    """Five arrays there and five gradients back; no device gathers all experts."""
    spec, problem = MeshSpec(expert=4), make_problem()

    def loss(bank):
        slots = gather_bank(bank, jnp.asarray(TABLE), E)
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(slots))

    with use_mesh(spec.build(), spec.rules):
        traced = jax.jit(jax.grad(loss)).trace(problem.bank)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert text.count("ragged_all_to_all") == 10
    assert "all_gather" not in text
