# SPDX-License-Identifier: Apache-2.0
"""Tables with rows on devices that have different tokens, against replicated ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from switchx.compiled.collectives import collectives
from switchx.layers.embedding import project, take_rows
from switchx.partitioning.constrain import use_mesh
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.rules import Rules, param_sharding
from tests.cases import slow, slow_unless

V, D, B, L = 48, 8, 16, 6
RNG = np.random.default_rng(0)
TABLE_VD = RNG.normal(size=(V, D)).astype(np.float32)
TOKENS_BL = RNG.integers(0, V, (B, L)).astype(np.int32)
# Whole numbers: their sums are exact in any order.
DX_BLD = RNG.integers(-8, 9, (B, L, D)).astype(np.float32)


def mesh_of(axes=("data",), slices=(), **sizes) -> MeshSpec:
    rules = Rules(params=(("V", axes), ("D", slices)), may_stay_whole=())
    return MeshSpec(**sizes, rules=rules)


MESHES = {
    "data": mesh_of(),
    "replicas": mesh_of(fsdp=2, expert=2),
    "rows and slices": mesh_of(slices=("fsdp",), fsdp=4),
    "all that split the batch": mesh_of(("data", "fsdp", "node", "expert"), fsdp=2, node=2),
    "beside model": mesh_of(model=2),
}


def on(spec: MeshSpec, function, named: dict):
    """`function` jitted over a mesh, its table (the first) as the rules say, all else by B."""
    mesh = spec.build()
    rows = NamedSharding(mesh, PartitionSpec(spec.rules.axes("B", mesh, table="activations")))
    (name, array), *others = named.items()
    table = param_sharding(spec.rules, mesh, name, array)
    with use_mesh(mesh, spec.rules):
        jitted = jax.jit(
            function, in_shardings=(table, *[rows for _ in others]), out_shardings=(rows, table)
        )
        compiled = jitted.lower(*named.values()).compile()
        return compiled(*named.values()), compiled.as_text()


def taken(table_VD, tokens_BL, dx_BLD):
    x_BLD, pull_back = jax.vjp(lambda table_VD: take_rows(table_VD, tokens_BL), table_VD)
    return x_BLD, pull_back(dx_BLD)[0]


BY_DEFAULT = "all that split the batch"


@pytest.mark.parametrize("name", [slow_unless(name == BY_DEFAULT, name) for name in MESHES])
def test_rows_and_raw_gradients_are_those_of_one_device(name):
    (x_BLD, dtable_VD), _ = on(
        MESHES[name], taken, {"a_VD": TABLE_VD, "tokens": TOKENS_BL, "dx": DX_BLD}
    )
    np.testing.assert_array_equal(x_BLD, TABLE_VD[TOKENS_BL])
    expected = np.zeros((V, D), np.float32)
    np.add.at(expected, TOKENS_BL, DX_BLD)
    np.testing.assert_array_equal(dtable_VD, expected)


@pytest.mark.parametrize("dims", ["VD", "DV"])
@pytest.mark.parametrize("name", [slow_unless(name == BY_DEFAULT, name) for name in MESHES])
def test_logits_and_raw_gradients_are_those_of_one_device(name, dims):
    # Whole numbers again: the bits have to be equal.
    weight = RNG.integers(-8, 9, (V, D) if dims == "VD" else (D, V)).astype(np.float32)
    x_BLD = RNG.integers(-8, 9, (B, L, D)).astype(np.float32)
    dy_BLV = RNG.integers(-8, 9, (B, L, V)).astype(np.float32)

    def run(weight, x_BLD, dy_BLV):
        y_BLV, pull_back = jax.vjp(functools.partial(project, dims=dims), x_BLD, weight)
        dx_BLD, dweight = pull_back(dy_BLV)
        return (y_BLV, dx_BLD), dweight

    named = {f"a_{dims}": weight, "x": x_BLD, "dy": dy_BLV}
    ((y_BLV, dx_BLD), dweight), _ = on(MESHES[name], run, named)
    w_VD = weight if dims == "VD" else weight.T
    dw_VD = np.einsum("BLV,BLD->VD", dy_BLV, x_BLD)
    np.testing.assert_array_equal(y_BLV, x_BLD @ w_VD.T)
    np.testing.assert_array_equal(dx_BLD, dy_BLV @ w_VD)
    np.testing.assert_array_equal(dweight, dw_VD if dims == "VD" else dw_VD.T)


def test_rows_and_their_gradients_travel_by_all_to_all_alone():
    """An all-reduce finds out whether a buffer is too small: one number."""
    named = {"a_VD": TABLE_VD, "tokens": TOKENS_BL, "dx": DX_BLD}
    _, hlo = on(MESHES["data"], taken, named)
    found = collectives(hlo)
    assert {each.kind for each in found} == {"all-to-all", "all-reduce"}
    assert [each.num_bytes for each in found if each.kind == "all-reduce"] == [4]


def test_logits_gather_a_split_weight_once_and_scatter_its_gradient():
    def run(w_VD, x_BLD):
        y_BLV, pull_back = jax.vjp(functools.partial(project, dims="VD"), x_BLD, w_VD)
        return (y_BLV, pull_back(y_BLV)[0]), pull_back(y_BLV)[1]

    _, hlo = on(MESHES["data"], run, {"a_VD": TABLE_VD, "x": DX_BLD})
    found = {each.kind: each.num_bytes for each in collectives(hlo)}
    assert found == {"all-gather": TABLE_VD.nbytes, "reduce-scatter": TABLE_VD.nbytes}


@pytest.mark.parametrize(
    "spec", [MESHES["data"], slow(MeshSpec(data=2, fsdp=4))], ids=["rows", "fsdp"]
)
def test_a_batch_that_the_devices_do_not_divide_is_left_to_the_compiler(spec):
    """As in decoding: such rows are on every device, and so is what they look up."""
    mesh = spec.build()
    table = param_sharding(spec.rules, mesh, "a_VD", TABLE_VD)
    with use_mesh(mesh, spec.rules):
        tokens_BL = TOKENS_BL[:3]
        x_BLD = jax.jit(take_rows, in_shardings=(table, None))(TABLE_VD, tokens_BL)
        y_BLV = jax.jit(
            lambda w_VD, x_BLD: project(x_BLD, w_VD, "VD"), in_shardings=(table, None)
        )(TABLE_VD, x_BLD)
    np.testing.assert_array_equal(x_BLD, TABLE_VD[tokens_BL])
    np.testing.assert_allclose(y_BLV, x_BLD @ TABLE_VD.T, rtol=1e-5, atol=1e-5)


# Without rows of the table on devices that have other tokens: columns, rows, or neither.
OTHERS = {
    "replicas": MeshSpec(),
    "columns": MeshSpec(fsdp=4),
    "columns beside experts": MeshSpec(data=1, fsdp=2, expert=4),
    "rows": MeshSpec(model=4),
    "both": MeshSpec(fsdp=2, model=2),
}


@pytest.mark.parametrize("name", [slow_unless(name == "both", name) for name in OTHERS])
def test_own_rows_and_columns_are_looked_up_where_they_are(name):
    spec = OTHERS[name]
    named = {"a_VD": TABLE_VD, "tokens": TOKENS_BL, "dx": DX_BLD}
    (x_BLD, dtable_VD), hlo = on(spec, taken, named)
    np.testing.assert_array_equal(x_BLD, TABLE_VD[TOKENS_BL])
    expected = np.zeros((V, D), np.float32)
    np.add.at(expected, TOKENS_BL, DX_BLD)
    np.testing.assert_array_equal(dtable_VD, expected)
    # Neither the table nor all devices' gradients of what was looked up are anywhere whole.
    sizes = [each.num_bytes for each in collectives(hlo) if each.kind == "all-gather"]
    assert max(sizes, default=0) < min(TABLE_VD.nbytes, DX_BLD.nbytes) / 2


def test_ids_outside_of_the_table_give_nan_also_where_rows_are_split():
    spec, tokens_BL = OTHERS["rows"], np.full_like(TOKENS_BL, V)
    named = {"a_VD": TABLE_VD, "tokens": tokens_BL, "dx": DX_BLD}
    (x_BLD, _), _ = on(spec, taken, named)
    assert np.all(np.isnan(x_BLD))


def test_one_device_and_other_rules_take_and_multiply():
    assert "shard_map" not in str(jax.make_jaxpr(take_rows)(TABLE_VD, TOKENS_BL))
    spec = MeshSpec(model=2)  # V over devices that share their tokens
    with use_mesh(spec.build(), spec.rules):
        x_BLD = jnp.asarray(DX_BLD)
        jaxpr = jax.make_jaxpr(lambda x, w: project(x, w, "VD"))(x_BLD, TABLE_VD)
        assert "shard_map" not in str(jaxpr)
