# SPDX-License-Identifier: Apache-2.0
"""Chunks of stacked blocks: how a stage gets the ones that it runs, takes one and adds to one.

Narayanan et al. 2021 (arXiv:2104.04473), section 2.2: of v * P chunks, stage p runs p, P + p,
... In the order of the blocks, which is how parameters are stored, it has p v .. p v + v - 1.
Dims: P stages; v chunks of a stage
"""

import jax
import jax.numpy as jnp
import numpy as np


def chunk_moves(
    num_stages: int, num_chunks: int
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Plans how chunks get from the order of the blocks to the stages that run them.

    Every round sends one chunk from every stage and to every stage, so v rounds of one
    permutation each are enough (Koenig's theorem).

    Returns:
        Rounds of (stage that each stage sends to, chunk it sends, chunk it puts what it
        receives at); the way back swaps them.
    """
    P, v = num_stages, num_chunks
    left = [{j: (p * v + j) % P for j in range(v)} for p in range(P)]
    rounds = []
    for _ in range(v):
        giver: dict[int, tuple[int, int]] = {}

        def assign(p, seen, giver=giver):
            """Finds a stage for stage p to send to, moving others if need be (Kuhn)."""
            for j, to in left[p].items():
                if to not in seen:
                    seen.add(to)
                    if to not in giver or assign(giver[to][0], seen):
                        giver[to] = (p, j)
                        return True
            return False

        for p in range(P):
            assign(p, set())
        to_P, give_P, take_P = np.zeros((3, P), int)
        for to, (p, j) in giver.items():
            to_P[p], give_P[p], take_P[to] = to, j, (p * v + j) // P
            del left[p][j]
        rounds.append((to_P, give_P, take_P))
    return rounds


def moved_share(num_stages: int, num_chunks: int) -> float:
    """The share of a stage's chunks that `move_chunks` sends to another stage."""
    if num_chunks == 1:
        return 0.0
    rounds = chunk_moves(num_stages, num_chunks)
    sent = [np.any(to_P != np.arange(num_stages)) for to_P, _, _ in rounds]
    return sum(sent) / num_chunks


def move_chunks(x, num_stages: int, num_chunks: int, axis: str, *, is_back: bool = False):
    """Moves chunks `[v, ...]` from the order of the blocks to their stages, or back.

    It must be called inside of a `shard_map` over `axis`. It runs one `ppermute` for each chunk
    of a stage.
    """
    if num_chunks == 1:
        return x
    stage, moved = jax.lax.axis_index(axis), jnp.zeros_like(x)
    for to_P, give_P, take_P in chunk_moves(num_stages, num_chunks):
        pairs = [(p, int(to)) for p, to in enumerate(to_P)]
        if is_back:
            pairs, give_P, take_P = [(to, p) for p, to in pairs], take_P, give_P
        chunk = jax.lax.dynamic_index_in_dim(x, jnp.asarray(give_P)[stage])
        chunk = jax.lax.ppermute(chunk, axis, pairs)
        moved = jax.lax.dynamic_update_slice_in_dim(moved, chunk, jnp.asarray(take_P)[stage], 0)
    return moved


def chunk_of(blocks, chunk):
    """Takes one chunk of arrays `[v, ...]`."""
    return jax.tree.map(
        lambda x: (
            x[0] if x.shape[0] == 1 else jax.lax.dynamic_index_in_dim(x, chunk, keepdims=False)
        ),
        blocks,
    )


def add_to_chunk(total, new, chunk, is_active):
    """Adds `new` to one chunk of arrays `[v, ...]`, where `is_active`."""

    def add(total, x):
        x = chunk_of(total, chunk) + jnp.where(is_active, x, 0)
        if total.shape[0] == 1:
            return x[None]
        return jax.lax.dynamic_update_index_in_dim(total, x, chunk, 0)

    return jax.tree.map(add, total, new)
