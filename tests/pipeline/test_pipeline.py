# SPDX-License-Identifier: Apache-2.0
"""The runner of schedules: chunks reach their stages, gradients are a plain stack's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from switchx.partitioning.constrain import use_mesh
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.rules import Rules
from switchx.pipeline.chunks import chunk_moves
from switchx.pipeline.schedule import ScheduleSpec
from switchx.pipeline.staged import run_pipeline
from switchx.pipeline.ticks import IF_LAST, Lane, Objective, run_if
from tests.cases import slow


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


LAYERS, ROWS, WIDTH = 8, 4, 8


def layers(w_NDF, x_BD):
    return jax.lax.scan(lambda x_BD, w_DF: (jnp.tanh(x_BD @ w_DF), None), x_BD, w_NDF)[0]


def lane(*, is_first: bool, is_last: bool) -> Lane:
    """Tanh layers; inputs and a table are added where a stack begins, squares at the end."""

    def forward(blocks, shared, inputs, message, op):
        x_BD = inputs["x_MBD"][op.microbatch] + shared["table_D"][None]
        # The very first chunk's message is whatever has gone round the ring.
        x_BD = x_BD if is_first else x_BD + message["x_BD"]
        x_BD = jnp.where(op.is_first, x_BD, message["x_BD"])
        return {"x_BD": layers(blocks["w_NDF"], x_BD)}

    def objective(blocks, shared, inputs, message, op):
        message = forward(blocks, shared, inputs, message, op)
        value = jnp.zeros(())
        if is_last:
            square = functools.partial(_square, inputs=inputs, op=op)
            value = run_if(IF_LAST, op.any_last, square, value, message["x_BD"])
        measured = jnp.sum(blocks["w_NDF"] ** 2, axis=(1, 2))
        return Objective(message, value, measured, value)

    return Lane(forward, objective, {"x_BD": jax.ShapeDtypeStruct((ROWS, WIDTH), np.float32)})


def _square(x_BD, *, inputs, op):
    return jnp.where(op.is_last, jnp.sum((x_BD - inputs["y_MBD"][op.microbatch]) ** 2), 0.0)


def whole(stacks, shared, inputs):
    """The same sum without any pipeline."""

    def one(x_BD, y_BD):
        h_BD = jnp.zeros_like(x_BD)
        for stack in stacks:
            h_BD = layers(stack["w_NDF"], x_BD + shared["table_D"][None] + h_BD)
        return jnp.sum((h_BD - y_BD) ** 2)

    return sum(map(one, inputs["x_MBD"], inputs["y_MBD"]))


@pytest.mark.parametrize(
    ("kind", "chunks", "stages", "num_stacks"),
    [
        slow("gpipe", 1, 4, 1),
        ("1f1b", 1, 4, 2),
        ("interleaved", 2, 4, 2),
        slow("interleaved", 4, 2, 1),
    ],
)
def test_gradients_are_those_of_the_whole(kind, chunks, stages, num_stacks):
    rng = np.random.default_rng(0)
    M, scale = 4, 3.0
    inputs = {
        name: rng.normal(size=(M, ROWS, WIDTH)).astype("f") for name in ("x_MBD", "y_MBD")
    }
    stacks = tuple(
        {"w_NDF": rng.normal(size=(LAYERS, WIDTH, WIDTH)).astype("f") * 0.4}
        for _ in range(num_stacks)
    )
    shared = {"table_D": rng.normal(size=WIDTH).astype("f")}
    value, want = jax.value_and_grad(whole, argnums=(0, 1))(stacks, shared, inputs)
    mesh = MeshSpec(pipe=stages).build()
    schedule = ScheduleSpec(kind, chunks).build(stages, M, num_stacks)
    last = num_stacks - 1
    lanes = [lane(is_first=s == 0, is_last=s == last) for s in range(num_stacks)]
    with use_mesh(mesh, Rules()):
        blocks = jax.device_put(stacks, NamedSharding(mesh, PartitionSpec("pipe")))
        run = functools.partial(run_pipeline, schedule, lanes, lambda message: message)
        got = jax.jit(functools.partial(run, scale=scale))(blocks, shared, inputs)
    np.testing.assert_allclose(got.total, value, rtol=1e-5)
    for mine, right in zip(
        jax.tree.leaves((got.blocks, got.shared)), jax.tree.leaves(want), strict=True
    ):
        np.testing.assert_allclose(mine / scale, right, rtol=1e-4, atol=1e-5)
    # In the order of the blocks, whichever stage measured it.
    for stack, measured in zip(stacks, got.measured, strict=True):
        squares = (stack["w_NDF"] ** 2).sum((1, 2))
        np.testing.assert_allclose(measured, M * squares, rtol=1e-5)
    # A stage has its own blocks' gradients and no others.
    (gradient, *_) = jax.tree.leaves(got.blocks)
    assert {shard.data.shape[0] for shard in gradient.addressable_shards} == {LAYERS // stages}
