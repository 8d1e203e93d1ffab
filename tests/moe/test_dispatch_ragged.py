# SPDX-License-Identifier: Apache-2.0
"""The ragged exchange: rows of any load arrive, slots without a token do not travel."""

import jax
import numpy as np
import pytest

from switchx.moe import all_to_all
from switchx.partitioning.mesh import MeshSpec
from tests.moe.banks import dispatch_loop
from tests.moe.sharded import D, E, G, S, T, answer_on, make_problem

SPEC = MeshSpec(expert=4)


@pytest.mark.parametrize("capacity", [2, T])
def test_equals_a_loop_over_tokens(capacity):
    problem = make_problem(capacity=capacity)
    y_GTD, _ = answer_on(SPEC, "ragged_all_to_all", problem)
    want_GTD = dispatch_loop(problem.x_GTD, problem.plan, problem.numbers)
    np.testing.assert_allclose(y_GTD, want_GTD, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("capacity", "received"),
    [
        # One group a device: a capacity of all tokens lets all choices of four devices in.
        (T, 4 * T * S),
        # Else the slots of two experts for the groups of four devices are enough.
        (2, 4 * 2 * 2),
    ],
)
def test_no_more_room_than_can_be_received(monkeypatch, capacity, received):
    seen = []
    exchange = all_to_all.ragged_all_to_all

    def watched(x_RD, size_PP, axes, rows):
        seen.append((x_RD.shape, rows))
        return exchange(x_RD, size_PP, axes, rows)

    monkeypatch.setattr(all_to_all, "ragged_all_to_all", watched)
    answer_on(SPEC, "ragged_all_to_all", make_problem(capacity=capacity))
    there, back = seen[:2]
    assert there == ((T * S, D), received)
    assert back == ((received, D), T * S)


def test_one_device_sends_nothing():
    x_GTD, plan, bank, _ = make_problem().arguments
    program = jax.make_jaxpr(all_to_all.ragged_dispatch)(x_GTD, plan, bank)
    assert "all_gather" not in str(program) and plan.num_experts == E and x_GTD.shape[0] == G
