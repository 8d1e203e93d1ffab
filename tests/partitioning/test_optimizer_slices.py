# SPDX-License-Identifier: Apache-2.0
"""Slices of what an optimizer keeps: which dimension, and sums that arrive in slices."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from switchx.compiled.collectives import executed_collectives
from switchx.partitioning.constrain import use_mesh
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.optimizer_slices import (
    OptimizerSlice,
    into_slices,
    optimizer_slice,
    with_slice,
)
from switchx.partitioning.replicas import run_on_replicas
from switchx.partitioning.rules import Rules, param_spec
from tests.data.refusals import refused

ZERO1 = Rules(optimizer_slices=("data",))


def mesh(**sizes):
    axes = ("pipe", "data", "fsdp", "node", "expert", "model")
    return types.SimpleNamespace(shape={axis: sizes.get(axis, 1) for axis in axes})


@pytest.mark.parametrize(
    ("dims", "shape", "sizes", "letter"),
    [
        ("DF", (16, 32), {"data": 4}, "D"),
        # The first one that no other axis splits.
        ("DF", (16, 32), {"data": 4, "fsdp": 2}, "F"),
        ("EDF", (8, 16, 32), {"data": 4}, "E"),
        ("EDF", (8, 16, 32), {"data": 4, "expert": 2}, "D"),
        # All are split: the first whose parts divide, 6 / 2 by 4 does not.
        ("DF", (6, 32), {"data": 4, "fsdp": 2, "model": 2}, "F"),
        # Never a stack of layers, though it divides.
        ("NDF", (8, 3, 16), {"data": 4}, "F"),
        ("ND", (8, 3), {"data": 4}, None),
        ("DF", (6, 7), {"data": 4}, None),
        ("D", (16,), {"data": 1, "expert": 4}, None),
    ],
)
def test_the_dimension_that_is_cut(dims, shape, sizes, letter):
    found = optimizer_slice(ZERO1, mesh(**sizes), dims, shape)
    assert found == (None if letter is None else OptimizerSlice(letter, ("data",)))


def test_axes_that_a_parameter_has_are_not_taken_again():
    rules = Rules(optimizer_slices=("expert", "data"))
    both = mesh(data=2, expert=4)
    assert optimizer_slice(rules, both, "DF", (16, 32)) == OptimizerSlice(
        "D", ("data", "expert")
    )
    assert optimizer_slice(rules, both, "EDF", (8, 16, 32)) == OptimizerSlice("D", ("data",))


def test_statistics_are_cut_along_their_parameters_letter():
    own = OptimizerSlice("D", ("data",))
    spec = PartitionSpec("expert", "fsdp", "model")
    cut = PartitionSpec("expert", ("fsdp", "data"), "model")
    assert with_slice(spec, "EDF", own) == cut
    assert with_slice(PartitionSpec("expert", None), "ED", own) == PartitionSpec(
        "expert", "data"
    )
    of_columns = PartitionSpec("expert", "model")
    assert with_slice(of_columns, "EF", own) == of_columns == with_slice(of_columns, "EF", None)


@pytest.mark.parametrize("axes", [("model",), ("data", "data"), ("pipe",)])
def test_axes_that_gradients_are_not_summed_over_are_refused(axes):
    with refused(f"Rules.optimizer_slices={axes!r}"):
        Rules(optimizer_slices=axes)


def test_without_axes_the_slices_are_gone():
    rules = Rules(optimizer_slices=("data", "fsdp"))
    assert rules.without(("data",)).optimizer_slices == ("fsdp",)


def test_replicas_reduce_to_slices_within_the_parts_of_other_axes():
    """As NumPy sums; one reduce-scatter of the device's part and nothing else of its size."""
    spec = MeshSpec(data=2, fsdp=2, model=2, rules=ZERO1)
    built = spec.build()
    x_BD = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    y_BF = np.random.default_rng(1).normal(size=(8, 32)).astype(np.float32)
    of_layer_N = np.array([1, -2, 3], np.float32)

    def function(rows, others):
        x_BD, y_BF = rows
        sums = {"w_in_DF": x_BD.T @ y_BF, "scale_D": x_BD.sum(0), "bias_V": y_BF[:, :3].sum(0)}
        # Whose slices are no neighbours: 3 layers of 16 / 8 of D, 128 / 2 of F.
        sums["w_NDF"] = jnp.tile(of_layer_N[:, None, None] * sums["w_in_DF"][None], (1, 1, 4))
        return sums, {"rows": x_BD.sum()}

    def compute(rows):
        sums, measured = run_on_replicas(function, ("data",), rows, ())
        return into_slices(sums), measured

    with use_mesh(built, spec.rules):
        compiled = jax.jit(compute).lower((x_BD, y_BF)).compile()
        sums, measured = compiled((x_BD, y_BF))
    # All dimensions are split already: D, the first, once more.
    assert sums["w_in_DF"].sharding.spec == PartitionSpec(("fsdp", "data"), "model")
    assert param_spec(spec.rules, built, "w_in_DF", (16, 32)) == PartitionSpec("fsdp", "model")
    np.testing.assert_allclose(sums["w_in_DF"], x_BD.T @ y_BF, atol=1e-5)
    np.testing.assert_allclose(sums["scale_D"], x_BD.sum(0), atol=1e-5)
    assert sums["w_NDF"].sharding.spec == PartitionSpec(None, ("fsdp", "data"), "model")
    expected_NDF = np.tile(of_layer_N[:, None, None] * (x_BD.T @ y_BF), (1, 1, 4))
    np.testing.assert_allclose(sums["w_NDF"], expected_NDF, atol=3e-5)
    np.testing.assert_allclose(sums["bias_V"], y_BF[:, :3].sum(0), atol=1e-5)  # 3 / 2: whole
    np.testing.assert_allclose(measured["rows"], x_BD.sum(), atol=1e-4)
    executed = executed_collectives(compiled.as_text())
    scattered = [one.num_bytes for one in executed if one.kind == "reduce-scatter"]
    parts = [16 // 2, 16 // 2 * 32 // 2, 3 * 16 // 2 * 128 // 2]
    assert sorted(scattered) == [4 * each for each in parts]
    summed = [one.num_bytes for one in executed if one.kind == "all-reduce"]
    assert sum(summed) < min(scattered)


def test_outside_of_slices_nothing_changes():
    function = functools.partial(into_slices, {"w_DF": 1})
    assert function() == {"w_DF": 1}
    with use_mesh(MeshSpec().build(), Rules()):
        assert function() == {"w_DF": 1}
