# SPDX-License-Identifier: Apache-2.0
"""From dimension letters to partitions and placements, and what cannot be partitioned."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from switchx import tree
from switchx.partitioning.mesh import AXES, MeshSpec
from switchx.partitioning.placement import ONE_DEVICE, Placement
from switchx.partitioning.rules import (
    TABLES,
    Rules,
    param_sharding,
    param_shardings,
    param_spec,
)
from tests.data.refusals import refused

MESH = AbstractMesh((2, 4), ("data", "expert"))
RULES = Rules()


def spec(dims, *shape, table="activations", mesh=MESH, rules=RULES):
    return rules.spec(dims, shape, mesh, table=table)


@pytest.mark.parametrize(
    ("dims", "shape", "want"),
    [
        ("BLD", (16, 5, 3), PartitionSpec(("data", "expert"), None, None)),
        ("GTD", (8, 5, 3), PartitionSpec(("data", "expert"), None, None)),
        ("ERD", (8, 6, 3), PartitionSpec("expert", "data", None)),
        ("LD", (16, 8), PartitionSpec(None, None)),
        ("", (), PartitionSpec()),
    ],
)
def test_activations_split_rows_over_all_devices_and_buffers_by_expert(dims, shape, want):
    assert spec(dims, *shape) == want


EVERYTHING = AbstractMesh((1, 2, 2, 2, 2), ("data", "fsdp", "node", "expert", "model"))


@pytest.mark.parametrize(
    ("name", "shape", "want"),
    [
        ("w_in_EDF", (8, 4, 6), PartitionSpec(("node", "expert"), "fsdp", "model")),
        ("w_in_EDF/values", (8, 6, 4), PartitionSpec(("node", "expert"), "model", "fsdp")),
        ("w_in_EDF/scales_EFG", (8, 6, 1), PartitionSpec(("node", "expert"), "model", None)),
        ("w_in_EDF/scales_EFG", (8, 6, 2), PartitionSpec(("node", "expert"), "model", "fsdp")),
        ("w_out_EFD/values", (8, 4, 6), PartitionSpec(("node", "expert"), "fsdp", "model")),
        ("w_in_EDF", (3, 8, 4, 6), PartitionSpec(None, ("node", "expert"), "fsdp", "model")),
        ("b_out_ED", (8, 4), PartitionSpec(("node", "expert"), "fsdp")),
        # Of experts in attention: F comes first.
        (
            "w_query_out_EFHK",
            (8, 4, 2, 3),
            PartitionSpec(("node", "expert"), "model", None, None),
        ),
        ("v_col_EF", (8, 4), PartitionSpec(("node", "expert"), "model")),
        # The router has experts in it and belongs to none; so a bias an expert.
        ("w_router_DE", (4, 8), PartitionSpec("fsdp", None)),
        ("bias_E", (8,), PartitionSpec(None)),
        ("w_query_DHK", (4, 2, 3), PartitionSpec("fsdp", "model", None)),
        ("w_in_DF", (4, 6), PartitionSpec("fsdp", "model")),
        ("embedding_VD", (16, 8), PartitionSpec("model", "fsdp")),
        ("embedding_VD", (15, 8), PartitionSpec(None, "fsdp")),
        ("scale_D", (8,), PartitionSpec("fsdp")),
    ],
)
def test_parameters_follow_their_letters(name, shape, want):
    assert param_spec(RULES, EVERYTHING, f"layer/{name}", shape) == want


def test_pipeline_moe_has_whole_experts_on_the_tensor_parallel_group():
    rules = Rules(expert_params=(("E", ("model",)), ("D", ("fsdp",))))
    spec = param_spec(rules, EVERYTHING, "w_in_EDF", (8, 4, 6))
    assert spec == PartitionSpec("model", "fsdp", None)
    assert param_spec(rules, EVERYTHING, "w_in_DF", (4, 6)) == PartitionSpec("fsdp", "model")


def test_axes_of_a_dimension_are_those_of_more_than_one_device():
    assert RULES.axes("G", EVERYTHING, table="activations") == ("fsdp", "node", "expert")
    assert RULES.axes("E", MESH, table="expert_params") == ("expert",)
    assert RULES.axes("L", MESH, table="activations") == ()


def test_an_activation_that_does_not_divide_stays_whole():
    assert spec("BLD", 12, 5, 3) == PartitionSpec(None, None, None)
    assert spec("ERD", 6, 4, 3) == PartitionSpec(None, "data", None)


def test_axes_of_size_one_or_absent_from_the_mesh_are_left_out():
    narrow = AbstractMesh((8, 1), ("data", "expert"))
    assert spec("BD", 16, 3, mesh=narrow) == PartitionSpec("data", None)
    assert spec("EDF", 6, 3, 5, table="expert_params", mesh=narrow) == PartitionSpec(
        None, None, None
    )
    absent = AbstractMesh((4,), ("expert",))
    assert spec("ERD", 8, 6, 3, mesh=absent) == PartitionSpec("expert", None, None)


@pytest.mark.parametrize(("size", "choices"), [(6, "4 or 8"), (3, "4"), (13, "12 or 16")])
def test_a_parameter_that_does_not_divide_is_refused_with_the_way_out(size, choices):
    with refused(
        f"expert dimension E={size} is not divisible by mesh axis 'expert' of size 4<any>"
        f"use {choices}, or a mesh with an axis that divides {size}"
    ):
        spec("EDF", size, 3, 5, table="expert_params")


def test_a_parameter_over_two_axes_is_refused_by_their_product():
    rules = Rules(params=(("V", ("data", "expert")),), may_stay_whole=())
    assert spec("VD", 16, 3, table="params", rules=rules) == PartitionSpec(
        ("data", "expert"), None
    )
    with refused("vocab dimension V=12 is not divisible by mesh axis 'data*expert' of size 8"):
        spec("VD", 12, 3, table="params", rules=rules)


def test_two_dimensions_cannot_share_a_mesh_axis():
    with refused("dimensions G and E of GTE both claim mesh axis 'expert'"):
        spec("GTE", 8, 5, 8)
    rules = Rules(expert_params=(("E", ("expert",)), ("F", ("expert",))))
    with refused("dimensions E and F of EDF both claim mesh axis 'expert'"):
        spec("EDF", 8, 3, 8, table="expert_params", rules=rules)


@pytest.mark.parametrize("table", TABLES)
def test_rules_name_known_letters_once(table):
    with refused(f"Rules.{table} names E, E"):
        Rules(**{table: (("E", ("expert",)), ("E", ("data",)))})
    with refused(f"Rules.{table} names X"):
        Rules(**{table: (("X", ("expert",)),)})


def test_a_tree_of_parameters_is_sharded_by_its_names():
    mesh = jax.make_mesh((2, 4), ("data", "expert"))
    shapes = {
        "ffn": {"w_in_EDF": (8, 3, 5), "v_row_ED": (8, 3)},
        "blocks": {"w_out_EFD": (2, 8, 5, 3)},  # stacked by scan
        "scale_D": (8,),
    }
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, np.float32),
        shapes,
        is_leaf=lambda leaf: isinstance(leaf, tuple),
    )
    shardings = tree.named_leaves(param_shardings(RULES, mesh, params))
    assert {name: sharding.spec for name, sharding in shardings.items()} == {
        "ffn/w_in_EDF": PartitionSpec("expert", None, None),
        "ffn/v_row_ED": PartitionSpec("expert", None),
        "blocks/w_out_EFD": PartitionSpec(None, "expert", None, None),
        "scale_D": PartitionSpec(None),
    }
    assert all(sharding.mesh == mesh for sharding in shardings.values())


def test_a_parameter_without_letters_is_refused():
    mesh = jax.make_mesh((8,), ("expert",))
    with pytest.raises(ValueError, match="parameter 'weights' has 2 dimensions but its name"):
        param_sharding(RULES, mesh, "ffn/weights", np.zeros((8, 8)))


def test_a_vocabulary_on_devices_of_other_tokens_is_split_or_refused():
    rules = Rules(params=(("V", ("data",)),), may_stay_whole=())
    mesh = MeshSpec(data=8).build()
    assert param_spec(rules, mesh, "embedding_VD", (32, 4)) == PartitionSpec("data", None)
    with refused("vocab dimension V=33 is not divisible by mesh axis 'data' of size 8"):
        param_spec(rules, mesh, "embedding_VD", (33, 4))
    with refused(
        "Rules.params splits V over data to save memory, but V is in "
        "Rules.may_stay_whole: a vocabulary that does not divide would be whole on "
        "every device"
    ):
        Rules(params=(("V", ("data",)),))
    with refused(
        "Rules.params splits V over data, model, of which model has the same "
        "tokens everywhere and data has not"
    ):
        Rules(params=(("V", ("data", "model")),), may_stay_whole=())
    with refused("Rules.vocab_room=0.0"):
        Rules(vocab_room=0.0)


PIPELINE_MOE = Rules(expert_params=(("E", ("model",)), ("D", ("fsdp",))))


@pytest.mark.parametrize(
    ("sizes", "rules", "batch", "experts", "parts", "gathered", "summed"),
    [
        ((1, 8, 1, 1, 1, 1), Rules(), ("data",), (), (), (), ()),
        ((1, 2, 1, 1, 4, 1), Rules(), ("data", "expert"), ("expert",), (), (), ()),
        (
            (1, 1, 2, 2, 2, 2),
            Rules(),
            ("fsdp", "node", "expert"),
            ("node", "expert"),
            ("model",),
            ("fsdp",),
            ("model",),
        ),
        (
            (1, 2, 2, 1, 1, 2),
            PIPELINE_MOE,
            ("data", "fsdp"),
            ("model",),
            (),
            ("fsdp",),
            ("model",),
        ),
    ],
)
def test_follows_the_rules(sizes, rules, batch, experts, parts, gathered, summed):
    place = Placement.on(AbstractMesh(sizes, AXES), rules)
    assert (place.batch, place.experts, place.parts) == (batch, experts, parts)
    assert (place.gathered, place.summed) == (gathered, summed)
    assert set(place.varying) == {a for a, n in zip(AXES, sizes, strict=True) if n > 1}
    assert place.size(place.varying) == 2 * 2 * 2 * (2 if sizes[2] == 2 == sizes[3] else 1)


def test_one_device_has_everything():
    assert ONE_DEVICE.size(ONE_DEVICE.experts) == 1 and ONE_DEVICE.varying == ()
