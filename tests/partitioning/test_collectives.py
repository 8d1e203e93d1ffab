# SPDX-License-Identifier: Apache-2.0
"""Exchanges between eight devices against NumPy, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from switchx.compiled.collectives import collectives
from switchx.partitioning.collectives import (
    all_to_all,
    hierarchical_all_to_all,
    ragged_all_to_all,
)
from switchx.partitioning.mesh import MeshSpec

AXES = ("node", "expert")
MESH = MeshSpec(data=1, node=2, expert=4).build()
P, R, D = 8, 5, 3


def on_devices(body, *arrays):
    """`body` on each device's part of arrays with a leading dimension P."""
    specs = tuple(PartitionSpec(AXES) for _ in arrays)
    mapped = jax.shard_map(
        lambda *parts: body(*(part[0] for part in parts))[None],
        mesh=MESH,
        in_specs=specs,
        out_specs=PartitionSpec(AXES),
    )
    return mapped(*arrays)


@pytest.mark.parametrize("exchange", [all_to_all, hierarchical_all_to_all])
def test_destinations_become_sources(exchange):
    rng = np.random.default_rng(0)
    x_PPD, dy_PPD = rng.normal(size=(2, P, P, D)).astype(np.float32)

    def run(x_PPD):
        return on_devices(lambda x_PD: exchange(x_PD, AXES), x_PPD)

    y_PPD, pull_back = jax.vjp(jax.jit(run), x_PPD)
    np.testing.assert_array_equal(y_PPD, x_PPD.swapaxes(0, 1))
    np.testing.assert_array_equal(pull_back(dy_PPD)[0], dy_PPD.swapaxes(0, 1))


def test_hierarchical_goes_inside_of_nodes_and_then_between_equal_ranks():
    """SE-MoE, Figure 8; and each message between nodes is 4 times as large as a flat one."""
    x_PPD = jnp.ones((P, P, D))
    hlo = {
        exchange: jax.jit(
            lambda x, exchange=exchange: on_devices(lambda x_PD: exchange(x_PD, AXES), x)
        )
        .lower(x_PPD)
        .compile()
        .as_text()
        for exchange in (all_to_all, hierarchical_all_to_all)
    }
    (flat,) = collectives(hlo[all_to_all])
    inside, between = collectives(hlo[hierarchical_all_to_all])
    assert flat.groups == (tuple(range(8)),)
    assert inside.groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert between.groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert flat.num_bytes == inside.num_bytes == between.num_bytes
    assert between.num_bytes // 2 == 4 * flat.num_bytes // 8


LOADS = {
    "random": np.random.default_rng(1).integers(0, 4, (P, P)),
    "all to one": np.eye(P, dtype=int)[[3] * P] * 20,
    "nothing": np.zeros((P, P), int),
    "from one": np.eye(P, dtype=int)[2][:, None] * np.arange(P)[None],
}


@pytest.mark.parametrize("name", LOADS)
def test_ragged_rows_arrive_in_the_order_of_their_sources(name):
    sizes_PP = LOADS[name]
    rows, received = 28, 160
    rng = np.random.default_rng(0)
    x_PRD = rng.normal(size=(P, rows, D)).astype(np.float32)
    dy_PRD = rng.normal(size=(P, received, D)).astype(np.float32)
    want, want_dx = np.zeros_like(dy_PRD), np.zeros_like(x_PRD)
    for here in range(P):
        place = 0
        for source in range(P):
            start, size = sizes_PP[source, :here].sum(), sizes_PP[source, here]
            want[here, place : place + size] = x_PRD[source, start : start + size]
            want_dx[source, start : start + size] = dy_PRD[here, place : place + size]
            place += size
    # What is not sent must not matter.
    for source in range(P):
        x_PRD[source, sizes_PP[source].sum() :] = np.nan

    def run(x_PRD):
        sizes = jnp.asarray(sizes_PP, jnp.int32)
        return on_devices(lambda x_RD: ragged_all_to_all(x_RD, sizes, AXES, received), x_PRD)

    y_PRD, pull_back = jax.vjp(jax.jit(run), x_PRD)
    np.testing.assert_array_equal(y_PRD, want)
    np.testing.assert_array_equal(pull_back(dy_PRD)[0], want_dx)
