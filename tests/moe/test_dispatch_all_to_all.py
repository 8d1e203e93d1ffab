# SPDX-License-Identifier: Apache-2.0
"""The flat, the hierarchical and the ragged exchange: what travels, and how much of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.compiled.collectives import collectives
from switchx.moe import all_to_all
from switchx.moe.all_to_all import all_to_all_dispatch
from switchx.partitioning.constrain import use_mesh
from switchx.partitioning.mesh import MeshSpec
from tests.moe.sharded import D, G, S, T, answer_on, compiled_hlo, make_problem


def test_there_is_one_all_to_all_there_and_one_back_and_nothing_else_forward():
    forward = next(compiled_hlo(MeshSpec(data=1, expert=8), "all_to_all", make_problem()))
    assert [c.kind for c in collectives(forward)] == ["all-to-all"] * 2


@pytest.mark.parametrize(
    ("data", "node", "expert", "model"),
    [(1, 2, 2, 2), (1, 2, 4, 1), (1, 4, 2, 1), (2, 2, 2, 1)],
)
@pytest.mark.slow  # up to rounding: test_expert_parallel.py
def test_the_hierarchical_exchange_gives_the_flat_one_bit_for_bit(data, node, expert, model):
    spec = MeshSpec(data=data, node=node, expert=expert, model=model)
    flat, two = (
        answer_on(spec, name, make_problem()) for name in ("all_to_all", "hierarchical")
    )
    jax.tree.map(np.testing.assert_array_equal, two, flat)


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
    spec, (x_GTD, plan, bank, _) = MeshSpec(expert=4), make_problem(capacity=capacity).arguments
    with use_mesh(spec.build(), spec.rules):
        jax.eval_shape(all_to_all.ragged_dispatch, x_GTD, plan, bank)
    assert seen == [((T * S, D), received), ((received, D), T * S)]


@pytest.mark.parametrize("dispatch", [all_to_all_dispatch, all_to_all.ragged_dispatch])
def test_one_device_exchanges_nothing(dispatch):
    x_GTD, plan, bank, _ = make_problem().arguments
    program = jax.make_jaxpr(dispatch)(x_GTD, plan, bank)
    assert not any(word in str(program) for word in ("all_to_all", "all_gather", "shard_map"))
    assert jnp.shape(program.out_avals[0]) == (G, T, D)
