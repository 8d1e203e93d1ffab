# SPDX-License-Identifier: Apache-2.0
"""`grouped_matmul` as it is called: bias, gradients, poison, refusals, other back ends."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from pallas_kernels import grouped_matmul
from pallas_kernels.grouped_matmul import reference
from tests.kernels import loops
from tests.kernels.loops import GROUPS, E, R

D, F = 8, 12


def call(groups="uneven", **changes):
    x_RD, w_EDF, _ = loops.operands(GROUPS[groups], D, F, tail=0)
    sizes_E = jnp.array(GROUPS[groups], jnp.int32)
    operands = {"x_RD": jnp.array(x_RD), "w_EDF": jnp.array(w_EDF), "group_sizes_E": sizes_E}
    return grouped_matmul(**operands | changes)


@pytest.mark.parametrize(
    ("groups", "jit"),
    [*((groups, True) for groups in GROUPS), ("uneven", False), ("nothing", False)],
)
def test_with_bias_against_a_loop(groups, jit):
    x_RD, w_EDF, _ = loops.operands(GROUPS[groups], D, F)
    bias_EF = np.random.default_rng(5).normal(size=(E, F)).astype(np.float32)
    function = jax.jit(grouped_matmul) if jit else grouped_matmul
    y_RF = function(x_RD, w_EDF, jnp.array(GROUPS[groups]), bias_EF=bias_EF)
    expected_RF = loops.product(x_RD, w_EDF, GROUPS[groups])
    for r, e in enumerate(loops.expert_of_rows(GROUPS[groups], R)):
        expected_RF[r] += bias_EF[e]
    np.testing.assert_allclose(np.asarray(y_RF), expected_RF, rtol=1e-5, atol=1e-5)


@jax.jit
def output_and_gradients(x_RD, w_EDF, bias_EF, sizes_E, dy_RF):
    y_RF, pull_back = jax.vjp(
        lambda x_RD, w_EDF, bias_EF: grouped_matmul(x_RD, w_EDF, sizes_E, bias_EF=bias_EF),
        x_RD,
        w_EDF,
        bias_EF,
    )
    return y_RF, pull_back(dy_RF)


@pytest.mark.parametrize("groups", GROUPS)
def test_gradients_against_loops_with_poison_in_unused_rows(groups):
    """Poison in x, in w of empty groups, and in the incoming gradient of unused rows."""
    x_RD, w_EDF, dy_RF = loops.operands(GROUPS[groups], D, F)
    y_RF, (dx_RD, dw_EDF, dbias_EF) = output_and_gradients(
        x_RD, w_EDF, jnp.ones((E, F)), jnp.array(GROUPS[groups]), dy_RF
    )
    assert np.all(np.isfinite(np.asarray(y_RF)))
    w_EFD = np.swapaxes(w_EDF, 1, 2)
    expected = {
        "x": loops.product(dy_RF, w_EFD, GROUPS[groups]),
        "w": loops.weight_gradient(x_RD, dy_RF, GROUPS[groups]),
        "bias": loops.weight_gradient(np.ones((R, 1)), dy_RF, GROUPS[groups])[:, 0],
    }
    for gradient, name in ((dx_RD, "x"), (dw_EDF, "w"), (dbias_EF, "bias")):
        np.testing.assert_allclose(
            np.asarray(gradient), expected[name], rtol=1e-5, atol=1e-5, err_msg=name
        )


def test_gradients_against_finite_differences():
    x_RD, w_EDF, dy_RF = loops.operands(GROUPS["pruned_tail"], D, F, tail=0)
    sizes_E = jnp.array(GROUPS["pruned_tail"])
    rng = np.random.default_rng(7)

    def loss(x_RD, w_EDF):
        return jnp.sum(jnp.tanh(grouped_matmul(x_RD, w_EDF, sizes_E) / 4) * dy_RF)

    gradients = jax.grad(loss, argnums=(0, 1))(x_RD, w_EDF)
    for i, (value, gradient) in enumerate(zip((x_RD, w_EDF), gradients, strict=True)):
        direction = rng.normal(size=value.shape).astype(np.float32)
        moved = [[x_RD, w_EDF] for _ in range(2)]
        step = 1e-2
        moved[0][i], moved[1][i] = value + step * direction, value - step * direction
        slope = (loss(*moved[0]) - loss(*moved[1])) / (2 * step)
        assert float(slope) == pytest.approx(float(jnp.vdot(gradient, direction)), rel=5e-3)


def test_gradients_have_the_dtypes_of_what_they_are_of():
    x_RD, w_EDF, _ = loops.operands(GROUPS["uneven"], D, F)
    dx_RD, dw_EDF = jax.grad(
        lambda x_RD, w_EDF: jnp.sum(
            grouped_matmul(x_RD, w_EDF, jnp.array(GROUPS["uneven"])).astype(jnp.float32)
        ),
        argnums=(0, 1),
    )(jnp.array(x_RD, jnp.bfloat16), w_EDF)
    assert (dx_RD.dtype, dw_EDF.dtype) == (jnp.bfloat16, jnp.float32)


def test_weights_are_not_transposed_in_memory():
    """Neither pass has a temporary of the size of all weights."""
    many = 64
    specs = (
        jax.ShapeDtypeStruct((many, D), jnp.float32),
        jax.ShapeDtypeStruct((many, D, 256), jnp.float32),
        jax.ShapeDtypeStruct((many,), jnp.int32),
    )

    def loss(x_RD, w_EDF, sizes_E):
        return jnp.sum(jnp.square(grouped_matmul(x_RD, w_EDF, sizes_E)))

    compiled = jax.jit(jax.grad(loss, argnums=0)).lower(*specs).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * many * D * 256 // 2


def test_inside_shard_map_as_on_one_device():
    """Groups of their own on every device; gradients too."""
    mesh = jax.make_mesh((4,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(3)
    sizes_nE = np.array([[3, 2], [0, 4], [6, 0], [1, 1]], np.int32)
    x_RD = jnp.array(rng.normal(size=(4 * 6, D)), jnp.float32)
    w_EDF = jnp.array(rng.normal(size=(8, D, F)), jnp.float32)
    dy_RF = jnp.array(rng.normal(size=(4 * 6, F)), jnp.float32)

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=PartitionSpec("expert"),
        out_specs=PartitionSpec("expert"),
    )
    def sharded(x_RD, w_EDF, sizes_E, dy_RF):
        return jax.vjp(lambda *xw: grouped_matmul(*xw, sizes_E), x_RD, w_EDF)[1](dy_RF)

    dx_RD, dw_EDF = jax.jit(sharded)(x_RD, w_EDF, jnp.array(sizes_nE.reshape(-1)), dy_RF)
    for n in range(4):
        rows, experts = slice(6 * n, 6 * n + 6), slice(2 * n, 2 * n + 2)
        w_EFD = np.swapaxes(np.asarray(w_EDF[experts]), 1, 2)
        expected_RD = loops.product(np.asarray(dy_RF[rows]), w_EFD, sizes_nE[n])
        np.testing.assert_allclose(np.asarray(dx_RD[rows]), expected_RD, rtol=1e-5, atol=1e-5)
        expected_EDF = loops.weight_gradient(
            np.asarray(x_RD[rows]), np.asarray(dy_RF[rows]), sizes_nE[n]
        )
        np.testing.assert_allclose(
            np.asarray(dw_EDF[experts]), expected_EDF, rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_RD": jnp.ones((R, D + 1))}, r"9 columns, and the weights are E=5, D=8, F=12"),
        ({"x_RD": jnp.ones(D)}, r"x_RD has shape \(8,\)"),
        ({"x_RD": jnp.ones((R, D), jnp.int32)}, "dtype int32; use float32"),
        ({"x_RD": [[1.0]]}, "x_RD is a list"),
        ({"w_EDF": jnp.ones((D, F))}, "w_EDF has shape"),
        ({"w_EDF": jnp.ones((E, D, F), jnp.int8)}, "dtype int8"),
        ({"bias_EF": jnp.ones((E, F + 1))}, r"bias_EF has shape \(5, 13\); expected \(5, 12\)"),
        ({"group_sizes_E": jnp.ones(E)}, "dtype float32; use int32"),
        ({"group_sizes_E": jnp.ones(E + 1, jnp.int32)}, "6 elements; expected 5"),
        ({"group_sizes_E": jnp.full(E, 5, jnp.int32)}, "sum to 25, and x_RD has 23 rows"),
        ({"group_sizes_E": jnp.array([3, -1, 0, 0, 0])}, r"group_sizes_E\[1\]=-1"),
        ({"implementation": "cuda"}, "implementation='cuda'; use None or one of"),
        ({"implementation": "reference", "interpret": True}, "only kernels are interpreted"),
        ({"interpret": True}, "only kernels are interpreted"),
        ({"tiling": reference.Tiling(0, 1)}, "rows=0; use 1"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        call(**changes)


def test_sizes_are_checked_where_they_are_concrete_under_a_gradient():
    with pytest.raises(ValueError, match="sum to 30"):
        jax.grad(lambda x_RD: call(x_RD=x_RD, group_sizes_E=jnp.array([30, 0, 0, 0, 0])).sum())(
            jnp.ones((R, D))
        )


def test_a_kernel_gets_all_three_passes(monkeypatch):
    """What the back end is asked for, and with which options."""
    calls = []

    def recorded(name):
        def run(*operands, tiling=None, interpret=False, **options):
            calls.append((name, options.get("transpose_w", False), tiling, interpret))
            return getattr(reference, name)(*operands, **options)

        return run

    kernel = types.ModuleType("pallas_kernels.grouped_matmul.tpu")
    kernel.forward, kernel.weight_gradient = recorded("forward"), recorded("weight_gradient")
    kernel.refusal = lambda *operands: None
    monkeypatch.setattr("pallas_kernels.implementations._module", lambda op, name: kernel)
    x_RD, w_EDF, _ = loops.operands(GROUPS["uneven"], D, F)
    jax.grad(
        lambda x_RD: call(
            x_RD=x_RD, implementation="tpu", tiling="a tiling", interpret=True
        ).sum()
    )(jnp.array(x_RD))
    assert calls == [
        ("forward", False, "a tiling", True),
        ("forward", True, None, True),
        ("weight_gradient", False, None, True),
    ]
