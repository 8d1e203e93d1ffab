# SPDX-License-Identifier: Apache-2.0
"""The flat exchange: where slots are between the two all-to-alls."""

import jax
import jax.numpy as jnp
import numpy as np

from switchx.moe.all_to_all import all_to_all_dispatch, run_slots
from switchx.partitioning.hlo_collectives import collectives
from switchx.partitioning.mesh import MeshSpec
from tests.moe.banks import dispatch_loop
from tests.moe.sharded import C, D, E, G, T, answer_on, compiled_hlo, make_problem


def test_equals_a_loop_over_tokens():
    problem = make_problem()
    y_GTD, _ = answer_on(MeshSpec(expert=4), "all_to_all", problem)
    want_GTD = dispatch_loop(problem.x_GTD, problem.plan, problem.numbers)
    np.testing.assert_allclose(y_GTD, want_GTD, rtol=1e-5, atol=1e-5)


def test_experts_get_the_rows_of_each_source_together():
    """On one device, an exchange that tells where a row came from."""
    problem, seen = make_problem(), []
    x_GTD, plan, _, _ = problem.arguments

    def exchange(x_PERD):
        seen.append(x_PERD.shape)
        return x_PERD

    def experts(x_ERD):
        seen.append(x_ERD.shape)
        return x_ERD

    y_GTD = run_slots(x_GTD, plan, experts, exchange, 1)
    assert seen == [(1, E, G * C, D), (E, G * C, D), (1, E, G * C, D)]
    gate_GT = np.sum(np.where(plan.is_kept_GTS, plan.gate_GTS, 0), axis=-1)
    np.testing.assert_allclose(y_GTD, gate_GT[..., None] * problem.x_GTD, rtol=1e-5, atol=1e-6)


def test_there_is_one_all_to_all_there_and_one_back_and_nothing_else_forward():
    forward, _ = compiled_hlo(MeshSpec(data=1, expert=8), "all_to_all", make_problem())
    assert [c.kind for c in collectives(forward)] == ["all-to-all"] * 2


def test_one_device_exchanges_nothing():
    x_GTD, plan, bank, _ = make_problem().arguments
    program = jax.make_jaxpr(all_to_all_dispatch)(x_GTD, plan, bank)
    assert "all_to_all" not in str(program) and "shard_map" not in str(program)
    assert jnp.shape(program.out_avals[0]) == (G, T, D)
