# SPDX-License-Identifier: Apache-2.0
"""Chunks of blocks come to the stages that run them, and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from switchx.partitioning.chunks import (
    add_to_chunk,
    chunk_moves,
    chunk_of,
    move_chunks,
)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 8])
def test_chunk_moves_bring_every_chunk_to_its_stage(stages, chunks):
    held = [[p * chunks + j for j in range(chunks)] for p in range(stages)]
    moved = [[None] * chunks for _ in range(stages)]
    rounds = chunk_moves(stages, chunks)
    assert len(rounds) == chunks
    for to_P, give_P, take_P in rounds:
        assert sorted(to_P) == list(range(stages))
        for p, to in enumerate(to_P):
            moved[to][take_P[to]] = held[p][give_P[p]]
    assert moved == [[c * stages + p for c in range(chunks)] for p in range(stages)]


def test_moved_chunks_come_back():
    """Over four stages of two chunks each, of which a row says which one it is."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("pipe",))
    spec = PartitionSpec("pipe")

    def move(x):
        moved = move_chunks(x, 4, 2, "pipe")
        return moved, move_chunks(moved, 4, 2, "pipe", is_back=True)

    run = jax.shard_map(move, mesh=mesh, in_specs=spec, out_specs=(spec, spec), check_vma=False)
    there, back = jax.jit(run)(jnp.arange(8))
    np.testing.assert_array_equal(there, [0, 4, 1, 5, 2, 6, 3, 7])
    np.testing.assert_array_equal(back, np.arange(8))


def test_one_chunk_is_taken_and_added_to():
    total = {"w": jnp.zeros((3, 2))}
    added = add_to_chunk(total, {"w": jnp.ones(2)}, jnp.asarray(1), jnp.asarray(True))
    np.testing.assert_array_equal(added["w"], [[0, 0], [1, 1], [0, 0]])
    np.testing.assert_array_equal(chunk_of(added, jnp.asarray(1))["w"], [1, 1])
    same = add_to_chunk(added, {"w": jnp.ones(2)}, jnp.asarray(2), jnp.asarray(False))
    np.testing.assert_array_equal(same["w"], added["w"])
