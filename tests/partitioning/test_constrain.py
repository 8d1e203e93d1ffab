# SPDX-License-Identifier: Apache-2.0
"""Constraints happen under `use_mesh`, and leave arrays alone elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from switchx.compiled.collectives import collectives
from switchx.partitioning.constrain import constrain, constrain_named, open_axes, use_mesh
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.rules import Rules

MESH = MeshSpec(data=2, expert=4)


def regroup(x_BLD):
    """Rows split by batch become buffers split by expert: the tokens have to travel."""
    x_ERD = constrain(constrain(x_BLD, "BLD") * 2.0, "ERD")
    return x_ERD + 1.0


def rows():
    return jnp.asarray(np.arange(8 * 4 * 3, dtype=np.float32).reshape(8, 4, 3))


def test_constraints_shard_the_array_and_move_it_between_devices():
    with use_mesh(mesh := MESH.build(), Rules()):
        by_row = NamedSharding(mesh, PartitionSpec(("data", "expert")))
        x_BLD = jax.device_put(rows(), by_row)
        compiled = jax.jit(regroup).lower(x_BLD).compile()
        got = compiled(x_BLD)
    np.testing.assert_array_equal(got, rows() * 2.0 + 1.0)
    assert got.sharding.spec == PartitionSpec("expert", "data")
    assert {shard.data.shape for shard in got.addressable_shards} == {(2, 2, 3)}
    kinds = {each.kind for each in collectives(compiled.as_text())}
    assert kinds & {"all-to-all", "all-gather", "collective-permute"}


def test_a_constraint_alone_splits_what_was_whole():
    with use_mesh(MESH.build(), Rules()):
        got = jax.jit(lambda x: constrain(x * 2.0, "BLD"))(rows())
    assert {shard.data.shape for shard in got.addressable_shards} == {(1, 4, 3)}


def test_outside_of_use_mesh_arrays_are_left_alone():
    x_BLD = rows()
    assert constrain(x_BLD, "BLD") is x_BLD
    assert "sharding" not in str(jax.make_jaxpr(regroup)(x_BLD))
    with use_mesh(MESH.build(), Rules()):
        assert "sharding_constraint" in str(jax.make_jaxpr(regroup)(x_BLD))
    assert constrain(x_BLD, "BLD") is x_BLD


def test_one_device_needs_no_constraint():
    with use_mesh(MeshSpec().build(jax.devices()[:1]), Rules()):
        assert "sharding" not in str(jax.make_jaxpr(regroup)(rows()))


def test_an_error_under_the_mesh_leaves_no_mesh_behind():
    with pytest.raises(ZeroDivisionError), use_mesh(MESH.build(), Rules()):
        raise ZeroDivisionError
    assert jax.sharding.get_abstract_mesh().empty
    assert constrain(x := rows(), "BLD") is x


def test_the_innermost_rules_are_followed():
    whole = Rules(activations=())
    with use_mesh(MESH.build(), Rules()), use_mesh(MESH.build(), whole):
        got = jax.jit(lambda x: constrain(x * 2.0, "BLD"))(rows())
    assert {shard.data.shape for shard in got.addressable_shards} == {(8, 4, 3)}


def test_other_rules_are_another_program():
    """One function, one mesh: what was traced under the first rules is not used again."""
    split = jax.jit(lambda x: constrain(x * 2.0, "BLD"))
    for rules, shape in (
        (Rules(), (1, 4, 3)),
        (Rules(activations=(("L", ("expert",)),)), (8, 1, 3)),
    ):
        with use_mesh(MESH.build(), rules):
            got = split(rows())
        assert {shard.data.shape for shard in got.addressable_shards} == {shape}


def test_arrays_are_split_by_the_letters_in_their_names():
    with use_mesh(MESH.build(), Rules()):
        got = jax.jit(constrain_named)({"step": jnp.int32(1), "x_BLD": rows()})
    assert {shard.data.shape for shard in got["x_BLD"].addressable_shards} == {(1, 4, 3)}


def test_a_nested_shard_map_may_take_what_the_one_around_it_leaves():
    """As the layers of a pipeline do: the inner one sums over `model` in every stage."""

    def inner(x_BD):
        spec = PartitionSpec(None, "model")
        total = jax.shard_map(
            lambda x_BD: jax.lax.psum(x_BD, "model"),
            in_specs=spec,
            out_specs=PartitionSpec(),
            axis_names=open_axes(),
        )
        return total(x_BD)

    spec = PartitionSpec("pipe")
    with use_mesh(MeshSpec(pipe=2, data=2, model=2).build(), Rules()):
        assert "pipe" in open_axes()
        outer = jax.shard_map(
            inner, in_specs=spec, out_specs=spec, axis_names={"pipe"}, check_vma=False
        )
        got = jax.jit(outer)(jnp.arange(8.0).reshape(2, 4))
    np.testing.assert_array_equal(got, [[2.0, 4.0], [10.0, 12.0]])
