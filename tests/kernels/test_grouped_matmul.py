# SPDX-License-Identifier: Apache-2.0
"""`grouped_matmul` and its reference: against loops, gradients, NaN, refusals, tilings."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_matmul, quantize, quantized_grouped_matmul
from pallas_kernels.grouped_matmul import reference
from pallas_kernels.grouped_matmul.reference import Tiling
from tests.cases import slow
from tests.compare import assert_close
from tests.kernels import loops
from tests.kernels.loops import GROUPS, E, R

D, F = 8, 12
# Compiled once for all sizes of groups: they are operands.
forward = jax.jit(reference.forward, static_argnames=("transpose_w", "tiling"))
weight_gradient = jax.jit(reference.weight_gradient, static_argnames=("out_dtype", "tiling"))
forward_by_ragged_dot = jax.jit(reference.forward_by_ragged_dot, static_argnums=3)
weight_gradient_by_ragged_dot = jax.jit(
    reference.weight_gradient_by_ragged_dot, static_argnums=3
)
TILINGS = [Tiling(5, 4), Tiling(1, 4), Tiling(16, 1)]


def call(groups="uneven", **changes):
    x_RD, w_EDF, _ = loops.operands(GROUPS[groups], D, F, tail=0)
    sizes_E = jnp.array(GROUPS[groups], jnp.int32)
    operands = {"x_RD": jnp.array(x_RD), "w_EDF": jnp.array(w_EDF), "group_sizes_E": sizes_E}
    return grouped_matmul(**operands | changes)


BIAS_EF = np.random.default_rng(5).normal(size=(E, F)).astype(np.float32)


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
def test_output_and_gradients_against_loops_with_nan_in_unused_rows(groups):
    """NaN in x, in w of empty groups, and in the incoming gradient of unused rows."""
    x_RD, w_EDF, dy_RF = loops.operands(GROUPS[groups], D, F)
    y_RF, (dx_RD, dw_EDF, dbias_EF) = output_and_gradients(
        x_RD, w_EDF, BIAS_EF, jnp.array(GROUPS[groups]), dy_RF
    )
    expert_R = loops.expert_of_rows(GROUPS[groups], R)
    want_RF = loops.product(x_RD, w_EDF, GROUPS[groups])
    want_RF[: len(expert_R)] += BIAS_EF[expert_R]
    np.testing.assert_allclose(y_RF, want_RF, rtol=1e-5, atol=1e-5)
    want = (
        loops.product(dy_RF, np.swapaxes(w_EDF, 1, 2), GROUPS[groups]),
        loops.weight_gradient(x_RD, dy_RF, GROUPS[groups]),
        loops.weight_gradient(np.ones((R, 1)), dy_RF, GROUPS[groups])[:, 0],
    )
    assert_close((dx_RD, dw_EDF, dbias_EF), want, rtol=1e-5, atol=1e-5)


def test_float32_results_of_bfloat16_rows_are_not_rounded():
    sizes_E = GROUPS["uneven"]
    x_RD, w_EDF, _ = loops.operands(sizes_E, D, F)
    x_RD, w_EDF = jnp.asarray(x_RD, jnp.bfloat16), jnp.asarray(w_EDF, jnp.bfloat16)
    run = functools.partial(grouped_matmul, x_RD, w_EDF, jnp.array(sizes_E))
    y_RF = run(preferred_element_type=jnp.float32)
    assert y_RF.dtype == jnp.float32
    wanted = loops.product(np.asarray(x_RD), np.asarray(w_EDF), sizes_E)
    np.testing.assert_allclose(y_RF, wanted, rtol=1e-5, atol=1e-5)
    half = run(preferred_element_type="float16")
    assert half.dtype == jnp.float16
    np.testing.assert_array_equal(half, y_RF.astype(jnp.float16))
    with pytest.raises(ValueError, match="preferred_element_type=int8; expected float32, bfl"):
        run(preferred_element_type=jnp.int8)


@functools.cache
def offset_run():
    def run(x_RD, w_EDF, bias_EF, gate_R, sizes_E, offset, dy_RF):
        def product(x_RD, w_EDF, gate_R):
            return grouped_matmul(
                x_RD, w_EDF, sizes_E, bias_EF=bias_EF, activation="relu", gate_R=gate_R,
                group_offset=offset,
            )  # fmt: skip

        y_RF, pull_back = jax.vjp(product, x_RD, w_EDF, gate_R)
        return y_RF, *pull_back(dy_RF)

    return jax.jit(run)


@pytest.mark.parametrize("groups", ["uneven", "pruned_tail", "too_many"])
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_a_part_of_the_experts_by_an_offset(groups, offset):
    """Two experts of five; NaN in the rows of the others must not be read."""
    sizes_E = GROUPS[groups]
    x_RD, w_EDF, dy_RF = loops.operands(sizes_E, D, F, tail=0)
    expert_R = loops.expert_of_rows(sizes_E, R)
    is_here_R = np.zeros(R, bool)
    is_here_R[: len(expert_R)] = (expert_R >= offset) & (expert_R < offset + 2)
    x_RD[~is_here_R] = np.nan
    gate_R = np.where(is_here_R, np.linspace(0.2, 1, R), np.nan).astype(np.float32)
    bias_EF = BIAS_EF[:2]
    here = w_EDF[offset : offset + 2]
    y_RF, dx_RD, dw_EDF, dgate_R = offset_run()(
        x_RD, here, bias_EF, gate_R, jnp.array(sizes_E, jnp.uint32), offset, dy_RF
    )
    wanted = np.zeros((R, F))
    wanted_dx, wanted_dw, wanted_dgate = np.zeros((R, D)), np.zeros((2, D, F)), np.zeros(R)
    for r in np.flatnonzero(is_here_R):
        e = expert_R[r] - offset
        z_F = x_RD[r] @ here[e].astype(np.float64) + bias_EF[e]
        wanted[r] = gate_R[r] * np.maximum(z_F, 0)
        dz_F = gate_R[r] * dy_RF[r] * (z_F > 0)
        wanted_dx[r], wanted_dgate[r] = here[e] @ dz_F, np.maximum(z_F, 0) @ dy_RF[r]
        wanted_dw[e] += np.outer(x_RD[r], dz_F)
    for one, other in (
        (y_RF, wanted), (dx_RD, wanted_dx), (dw_EDF, wanted_dw), (dgate_R, wanted_dgate)
    ):  # fmt: skip
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


# Every activation, with and without the second matrix, a bias and gates.
PARTS = {
    "relu": ("relu", ("bias_EF",)),
    "geglu": ("gelu", ("w_gate_EDF", "bias_EF", "gate_R")),
    "swiglu": ("silu", ("w_gate_EDF",)),
    "gelu_exact": ("gelu_exact", ("gate_R",)),
    "gates alone": (None, ("bias_EF", "gate_R")),
    "gated relu": ("relu", ("gate_R",)),
}


def parts_of(names, sizes_E, dtype=np.float32) -> dict[str, np.ndarray]:
    """x, w and the named parts; NaN where nothing is to be read."""
    rng = np.random.default_rng(4)
    x_RD, w_EDF, _ = loops.operands(sizes_E, D, F)
    _, w_gate_EDF, _ = loops.operands(sizes_E, D, F, seed=1)
    bias_EF, gate_R = rng.normal(size=(E, F)), rng.uniform(0.2, 1, R)
    gate_R[sum(sizes_E) :] = np.nan
    every = {"w_gate_EDF": w_gate_EDF, "bias_EF": bias_EF, "gate_R": gate_R}
    chosen = {"x_RD": x_RD, "w_EDF": w_EDF} | {name: every[name] for name in names}
    return {name: array.astype(dtype) for name, array in chosen.items()}


def by_einsum(x_RD, w_EDF, w_gate_EDF, bias_EF, gate_R, is_of_RE, activation):
    """The same by one-hot rows and plain einsums, which JAX differentiates by itself."""
    z_RF = jnp.einsum("RE,RD,EDF->RF", is_of_RE, x_RD, w_EDF)
    if bias_EF is not None:
        z_RF = z_RF + jnp.einsum("RE,EF->RF", is_of_RE, bias_EF)
    act = {None: lambda z: z, "relu": jax.nn.relu, "gelu": jax.nn.gelu, "silu": jax.nn.silu}
    act["gelu_exact"] = lambda z: jax.nn.gelu(z, approximate=False)
    y_RF = act[activation](z_RF)
    if w_gate_EDF is not None:
        y_RF = y_RF * jnp.einsum("RE,RD,EDF->RF", is_of_RE, x_RD, w_gate_EDF)
    return y_RF if gate_R is None else y_RF * gate_R[:, None]


@functools.cache
def pulled_back(activation, **options):
    """`(parts, sizes, dy) -> (y, gradients)`, compiled once for all sizes."""

    @jax.jit
    def run(parts, sizes_E, dy_RF):
        def product(parts):
            named = {name: parts[name] for name in parts.keys() - {"x_RD", "w_EDF"}}
            return grouped_matmul(
                parts["x_RD"], parts["w_EDF"], sizes_E, activation=activation, **named,
                **options,
            )  # fmt: skip

        y_RF, pull_back = jax.vjp(product, parts)
        return y_RF, pull_back(dy_RF)[0]

    return run


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("groups", ["pruned_tail", "too_many"])
def test_epilogue_and_its_gradients_against_a_plain_einsum(name, groups):
    """NaN in unused rows, their gates and gradients, and in matrices of empty groups."""
    activation, names = PARTS[name]
    sizes_E = GROUPS[groups]
    parts = parts_of(names, sizes_E)
    _, _, dy_RF = loops.operands(sizes_E, D, F)
    y_RF, gradients = pulled_back(activation)(parts, jnp.array(sizes_E), dy_RF)
    is_of_RE = np.zeros((R, E), np.float32)
    expert_R = loops.expert_of_rows(sizes_E, R)
    is_of_RE[np.arange(len(expert_R)), expert_R] = 1
    clean = {key: np.nan_to_num(array) for key, array in parts.items()}
    order = ("x_RD", "w_EDF", "w_gate_EDF", "bias_EF", "gate_R")

    def plain(clean):
        return by_einsum(*map(clean.get, order), is_of_RE, activation)

    want_RF, pull_back = jax.vjp(plain, clean)
    np.testing.assert_allclose(y_RF, want_RF, rtol=1e-4, atol=1e-4)
    want = pull_back(jnp.nan_to_num(dy_RF))[0]
    assert gradients.keys() == want.keys() == parts.keys()
    for key, got in gradients.items():
        np.testing.assert_allclose(got, want[key], rtol=1e-4, atol=2e-4, err_msg=key)


@pytest.mark.parametrize("activation", [None, "silu", "gelu"])
def test_gradients_of_float16_are_numbers_where_results_are(activation):
    """A row whose gate is 0, products that float16 has not, and gates that bring them back."""
    gate_R, sizes_E = jnp.array([0.0, 1e-3], jnp.float16), jnp.array([2], jnp.int32)
    w_EDF = jnp.full((1, 64, 64), 20.0, jnp.float16)

    def product(x_RD, gate_R):
        return grouped_matmul(x_RD, w_EDF, sizes_E, gate_R=gate_R, activation=activation)

    _, back = jax.vjp(product, jnp.full((2, 64), 100.0, jnp.float16), gate_R)
    for each in back(jnp.full((2, 64), 60.0, jnp.float16)):
        assert not np.isnan(np.asarray(each, np.float32)).any()
    x_RD, _ = back(jnp.full((2, 64), 60.0, jnp.float16))
    np.testing.assert_allclose(x_RD[:, 0], [0.0, 64 * 20 * 60e-3], rtol=2e-2)


@pytest.mark.parametrize("implementation", ["reference", "triton", slow("gpu")])
def test_one_row_beyond_float16_is_no_row_of_another_expert(implementation):
    """silu(-90,000) is 0 and has the gradient 0, also where float16 keeps its argument."""
    x_RD, w_EDF = np.zeros((2, 64, 64), np.float16), np.zeros((2, 64, 64), np.float16)
    x_RD, sizes_E = x_RD[0, :16], jnp.array([7, 6], jnp.int32)
    x_RD[0, 0], w_EDF[:, 0] = 300, -300
    named = {} if implementation == "reference" else {"interpret": True}

    def product(x_RD, w_EDF, bias_EF):
        options = {"bias_EF": bias_EF, "activation": "silu", "implementation": implementation}
        return grouped_matmul(x_RD, w_EDF, sizes_E, **options, **named)

    y_RF, back = jax.vjp(product, x_RD, w_EDF, jnp.zeros((2, 64)))
    dx_RD, dw_EDF, dbias_EF = back(jnp.ones_like(y_RF))
    assert not np.isnan(np.asarray(dx_RD, np.float32)).any() and not dw_EDF.any()
    np.testing.assert_allclose(dbias_EF, np.outer([3.0, 3.0], np.ones(64)))
    *_, dbias_EF = back(jnp.ones_like(y_RF).at[0].set(jnp.inf))
    assert np.isfinite(dbias_EF).all(axis=1).tolist() == [False, True]


def test_no_experts_have_gradients():
    x_RD, w_EDF, sizes_E = jnp.ones((3, D)), jnp.ones((0, D, F)), jnp.ones(0, jnp.int32)
    gradient = jax.grad(lambda x: grouped_matmul(x, w_EDF, sizes_E).sum())(x_RD)
    assert not gradient.any()


def test_transposed_matrices_give_the_same():
    activation, names = PARTS["geglu"]
    sizes_E, turned = GROUPS["pruned_tail"], ("w_EDF", "w_gate_EDF")
    parts, (_, _, dy_RF) = parts_of(names, sizes_E), loops.operands(sizes_E, D, F)
    want = pulled_back(activation)(parts, jnp.array(sizes_E), dy_RF)
    parts |= {name: parts[name].swapaxes(1, 2) for name in turned}
    run = pulled_back(activation, transpose_w=True)
    y_RF, gradients = run(parts, jnp.array(sizes_E), dy_RF)
    gradients |= {name: gradients[name].swapaxes(1, 2) for name in turned}
    assert_close((y_RF, gradients), want, rtol=1e-5, atol=1e-5)


def test_float32_parameters_have_gradients_that_were_never_rounded():
    """Rows in bfloat16: the sum over a group's rows is that of float32 products of them."""
    sizes_E = GROUPS["uneven"]
    parts = parts_of(("w_gate_EDF",), sizes_E)
    parts["x_RD"] = jnp.array(parts["x_RD"], jnp.bfloat16)
    dy_RF = jnp.array(loops.operands(sizes_E, D, F)[2], jnp.bfloat16)
    _, gradients = pulled_back(None)(parts, jnp.array(sizes_E), dy_RF)
    assert gradients["w_EDF"].dtype == gradients["w_gate_EDF"].dtype == jnp.float32
    assert gradients["x_RD"].dtype == jnp.bfloat16
    rounded_EDF = gradients["w_EDF"].astype(jnp.bfloat16).astype(jnp.float32)
    assert np.mean(np.asarray(rounded_EDF != gradients["w_EDF"])) > 0.9
    x_RD, b_RF = np.float64(parts["x_RD"]), parts["w_gate_EDF"].astype(jnp.bfloat16)
    b_RF = loops.product(x_RD, np.float64(b_RF), sizes_E)
    want_EDF = loops.weight_gradient(x_RD, np.float64(dy_RF) * b_RF, sizes_E)
    error = np.abs(gradients["w_EDF"] - want_EDF).max()
    assert error <= 8e-3 * np.abs(want_EDF).max()  # of the residual, in bfloat16


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_RD": jnp.ones(D)}, r"x_RD has shape \(8,\)"),
        ({"w_EDF": jnp.ones((D, F))}, "w_EDF has shape"),
        ({"w_EDF": jnp.ones((E, D, F), jnp.int8)}, "dtype int8"),
        ({"implementation": "cuda"}, "implementation='cuda'; use None or one of"),
        ({"implementation": "reference", "interpret": True}, "only kernels are interpreted"),
        ({"interpret": True}, "only kernels are interpreted"),
        ({"tiling": reference.Tiling(0, 1)}, "rows=0; use 1"),
        ({"tiling": (8, 8)}, r"tiling is \(8, 8\); expected a pallas_kernels.grouped"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    """Operands of both operations: test_operands.py."""
    with pytest.raises(ValueError, match=message):
        call(**changes)


def test_sizes_are_checked_where_they_are_concrete_under_a_gradient():
    with pytest.raises(ValueError, match="sum to 30"):
        jax.grad(lambda x_RD: call(x_RD=x_RD, group_sizes_E=jnp.array([30, 0, 0, 0, 0])).sum())(
            jnp.ones((R, D))
        )


def sizes_of(groups):
    return jnp.array(GROUPS[groups], jnp.int32)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize(
    "tiling", [TILINGS[0], *(slow(t) for t in TILINGS[1:])],
    ids=str,
)  # fmt: skip
def test_every_pass_on_cpu_against_loops(groups, tiling):
    x_RD, w_EDF, dy_RF = operands = loops.operands(GROUPS[groups], D, F)
    sizes_E = sizes_of(groups)
    found = (
        forward(x_RD, w_EDF, sizes_E, tiling=tiling),
        forward(dy_RF, w_EDF, sizes_E, transpose_w=True, tiling=tiling),
        weight_gradient(x_RD, dy_RF, sizes_E, out_dtype=jnp.float32, tiling=tiling),
    )
    assert_close(found, passes_by_loops(*operands, GROUPS[groups]), rtol=1e-5, atol=1e-5)


def passes_by_loops(x_RD, w_EDF, dy_RF, sizes_E):
    """The product, and its gradients of rows and weights."""
    return (
        loops.product(x_RD, w_EDF, sizes_E),
        loops.product(dy_RF, np.swapaxes(w_EDF, 1, 2), sizes_E),
        loops.weight_gradient(x_RD, dy_RF, sizes_E),
    )


@pytest.mark.parametrize("implementation", ["reference", "tpu", "triton"])
def test_64_bits_of_jax_change_nothing(implementation):
    x_RD, w_EDF, _ = loops.operands(GROUPS["uneven"], D, F)
    sizes_E = np.array(GROUPS["uneven"])  # int64
    named = {"implementation": implementation}
    named |= {"interpret": True} if implementation != "reference" else {}

    def loss(x_RD, w_EDF):
        return jnp.sum(grouped_matmul(x_RD, w_EDF, sizes_E, activation="silu", **named))

    gradient = jax.grad(loss, (0, 1))
    want = jax.make_jaxpr(gradient)(x_RD, w_EDF)
    with jax.enable_x64(True):
        assert jax.make_jaxpr(gradient)(x_RD, w_EDF).out_avals == want.out_avals
        q = quantize(w_EDF, 4)
        q.check()
        product = functools.partial(quantized_grouped_matmul, **named)
        assert jax.eval_shape(product, x_RD, q, sizes_E).dtype == jnp.float32
        if implementation == "reference":
            found = jax.jit(gradient)(x_RD, w_EDF)
            assert_close(found, gradient(x_RD, w_EDF), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_ragged_dot_does_not_round_float32(dtype):
    operands = loops.operands(GROUPS["uneven"], D, F)
    x_RD, w_EDF, dy_RF = (jnp.array(each, dtype) for each in operands)
    sizes_E = sizes_of("uneven")
    precision = "HIGHEST" if dtype == jnp.float32 else "DEFAULT"
    for product in (
        lambda: reference.forward(x_RD, w_EDF, sizes_E),
        lambda: reference.weight_gradient(x_RD, dy_RF, sizes_E, out_dtype=dtype),
    ):
        for platform in ("tpu", "cuda"):
            text = jax.jit(product).trace().lower(lowering_platforms=(platform,)).as_text()
            [line] = [each for each in text.splitlines() if '"chlo.ragged_dot"' in each]
            assert line.count(f"<precision {precision}>") == 2


@pytest.mark.parametrize("groups", GROUPS)
def test_every_pass_by_ragged_dot_against_loops(groups):
    """What accelerators run. On CPU it reads all matrices: those of empty groups are finite."""
    sizes_E = sizes_of(groups)
    x_RD, w_EDF, dy_RF = loops.operands(GROUPS[groups], D, F)
    w_EDF = np.nan_to_num(w_EDF)
    found = (
        forward_by_ragged_dot(x_RD, w_EDF, sizes_E, False),
        forward_by_ragged_dot(dy_RF, w_EDF, sizes_E, True),
        weight_gradient_by_ragged_dot(x_RD, dy_RF, sizes_E, jnp.float32),
    )
    want = passes_by_loops(x_RD, w_EDF, dy_RF, GROUPS[groups])
    assert_close(found, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("groups", ["uneven", "pruned_tail"])
def test_half_precision_is_rounded_once(groups, dtype):
    """Sums are float32: one rounding away from the sum in float64 of the same inputs."""
    x_RD, w_EDF, dy_RF = (
        jnp.array(array, dtype) for array in loops.operands(GROUPS[groups], 96, F)
    )
    bound = {"rtol": 1.01 * float(jnp.finfo(dtype).eps) / 2, "atol": 1e-4}
    for product, expected in (
        (
            reference.forward(x_RD, w_EDF, sizes_of(groups), tiling=Tiling(4, 8)),
            loops.product(np.asarray(x_RD), np.asarray(w_EDF), GROUPS[groups]),
        ),
        (
            reference.weight_gradient(x_RD, dy_RF, sizes_of(groups), out_dtype=dtype),
            loops.weight_gradient(np.asarray(x_RD), np.asarray(dy_RF), GROUPS[groups]),
        ),
    ):
        assert product.dtype == dtype
        np.testing.assert_allclose(np.asarray(product, np.float64), expected, **bound)


def test_experts_may_be_many_and_rows_few():
    sizes_E = np.zeros(64, np.int32)
    sizes_E[[3, 40, 41]] = 1, 2, 1
    rng = np.random.default_rng(1)
    x_RD, w_EDF = rng.normal(size=(4, 8)), rng.normal(size=(64, 8, 6))
    x_RD, w_EDF = x_RD.astype(np.float32), w_EDF.astype(np.float32)
    y_RF = reference.forward(x_RD, w_EDF, jnp.array(sizes_E))
    np.testing.assert_allclose(
        np.asarray(y_RF), loops.product(x_RD, w_EDF, sizes_E), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(("num_rows", "E"), [(0, 3), (4, 0)])
def test_nothing_at_all(num_rows, E):
    x_RD, w_EDF = jnp.ones((num_rows, 8)), jnp.ones((E, 8, 6))
    sizes_E = jnp.zeros(E, jnp.int32)
    assert reference.forward(x_RD, w_EDF, sizes_E).shape == (num_rows, 6)
    dw_EDF = reference.weight_gradient(
        x_RD, jnp.ones((num_rows, 6)), sizes_E, out_dtype=jnp.float32
    )
    assert dw_EDF.shape == (E, 8, 6)


@pytest.mark.parametrize(("D", "F"), [(0, 6), (8, 0)])
def test_sums_of_nothing_have_a_bias_and_gradients(D, F):
    x_RD, w_EDF, bias_EF = jnp.ones((4, D)), jnp.ones((2, D, F)), jnp.full((2, F), 3.0)

    def product(x_RD, w_EDF, bias_EF):
        return grouped_matmul(x_RD, w_EDF, jnp.array([1, 2]), bias_EF=bias_EF)

    y_RF, pull_back = jax.vjp(product, x_RD, w_EDF, bias_EF)
    np.testing.assert_array_equal(y_RF, np.full((4, F), 3) * np.array([[1], [1], [1], [0]]))
    dx_RD, dw_EDF, dbias_EF = pull_back(y_RF)
    assert (dx_RD.shape, dw_EDF.shape) == (x_RD.shape, w_EDF.shape)
    np.testing.assert_array_equal(dbias_EF, np.full((2, F), 3) * np.array([[1], [2]]))


def test_work_and_memory_follow_the_rows():
    """No E times the work, no copy of the weights: temporaries of blocks, not of experts."""
    E = 16
    specs = (
        jax.ShapeDtypeStruct((64, 256), jnp.float32),
        jax.ShapeDtypeStruct((E, 256, 512), jnp.float32),
        jax.ShapeDtypeStruct((E,), jnp.int32),
    )
    compiled = jax.jit(lambda *operands: reference.forward(*operands)).lower(*specs).compile()
    one_expert = 4 * 256 * 512
    assert compiled.memory_analysis().temp_size_in_bytes < 2.5 * one_expert
    text = compiled.as_text()
    assert "f32[16,64," not in text  # what ragged_dot would make of it


@pytest.mark.parametrize(
    ("R", "E", "rows"),
    [
        (1, 8, 1), (8, 8, 1), (9, 8, 2), (32, 8, 4), (33, 8, 8), (384, 8, 48),
        (8 * 512, 8, 256), (8 * 300, 8, 152), (3, 1, 3),
    ],
)  # fmt: skip
def test_default_tiles_have_an_experts_average_of_rows(R, E, rows):
    assert reference.default_tiling(R, 64, 32, E).rows == rows


def test_default_blocks_fit_the_cache_and_divide():
    for leading, columns in ((1024, 4096), (4096, 1024), (768, 3072), (4096, 14336), (7, 9)):
        for transpose_w in (False, True):
            tiling = reference.default_tiling(64, leading, columns, 8, transpose_w=transpose_w)
            tiling.check(leading)
            assert 4 * columns * tiling.weight_rows <= 2**22
    # Blocks of a prime number of rows would be single rows.
    assert reference.default_tiling(64, 4099, 4096, 8).weight_rows == 4099


@pytest.mark.parametrize("transpose_w", [False, True])
def test_candidates_begin_with_the_default_and_fit(transpose_w):
    tilings = reference.candidates(48, 1024, 4096, 8, transpose_w=transpose_w)
    assert tilings[0] == reference.default_tiling(48, 1024, 4096, 8, transpose_w=transpose_w)
    assert len(set(tilings)) == len(tilings) > 4
    for tiling in tilings:
        tiling.check(1024)


@pytest.mark.parametrize(
    ("tiling", "message"),
    [
        (Tiling(0, 4), "rows=0; use 1 or more"),
        (Tiling(4, 5), "weight_rows=5; use a divisor of 8"),
        (Tiling(4, 0), "weight_rows=0; use a divisor of 8"),
    ],
)
def test_a_tiling_of_the_reference_that_does_not_fit_is_refused(tiling, message):
    x_RD, w_EDF, dy_RF = loops.operands(GROUPS["uneven"], D, F)
    with pytest.raises(ValueError, match=message):
        reference.forward(x_RD, w_EDF, sizes_of("uneven"), tiling=tiling)
    with pytest.raises(ValueError, match=message):
        reference.weight_gradient(
            x_RD, dy_RF, sizes_of("uneven"), out_dtype=jnp.float32, tiling=tiling
        )
