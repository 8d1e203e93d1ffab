# SPDX-License-Identifier: Apache-2.0

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from switchx.compiled.collectives import collectives
from switchx.optim.adafactor import Adafactor
from switchx.optim.schedules import Constant, InverseSquareRoot
from switchx.partitioning.rules import Rules, param_shardings
from tests.cases import slow
from tests.compare import assert_close
from tests.training.adafactor_oracle import MatrixAdafactor, donating_step

RATE = 0.01


def normal(seed, *shape, scale=1.0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) * scale


def run(optimizer, params, gradients, **options):
    """Parameters, states and updates after each of some steps."""
    transformation = optimizer.build(Constant(RATE))

    @jax.jit
    def step(gradient, state, params):
        updates, state = transformation.update(gradient, state, params, **options)
        return updates, state, optax.apply_updates(params, updates)

    state, history = transformation.init(params), []
    for gradient in gradients:
        history.append(step(gradient, state, params))
        _, state, params = history[-1]
    return history


# What Optax calls by another name.
RENAMED = {"beta1": "momentum", "epsilon1": "eps"}
DECAYED = {"w_in_DF": True, "w_router_DE": True, "scale_D": False}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"min_dim_size_to_factor": 8},
        slow({"min_dim_size_to_factor": 13}),
        {"min_dim_size_to_factor": 8, "beta1": 0.9},
        {"min_dim_size_to_factor": 8, "weight_decay_rate": 0.003},
        {
            "min_dim_size_to_factor": 8,
            "clipping_threshold": 0.3,
            "decay_rate": 0.6,
            "multiply_by_parameter_scale": False,
            "epsilon1": 1e-3,
        },
        slow({"clipping_threshold": None, "min_dim_size_to_factor": 8}),
    ],
)
def test_matrices_and_vectors_as_optax(settings):
    theirs = {RENAMED.get(name, name): value for name, value in settings.items()}
    if "weight_decay_rate" in settings:
        theirs["weight_decay_mask"] = DECAYED
    params = {
        "w_in_DF": normal(0, 12, 16),
        "w_router_DE": normal(1, 12, 4, scale=1e-5),  # below the smallest parameter scale
        "scale_D": normal(2, 12),
    }
    gradients = [
        jax.tree.map(lambda w, step=step: normal(step, *w.shape, scale=10.0**step), params)
        for step in range(4)
    ]
    history = run(Adafactor(**settings), params, gradients)
    optax_adafactor = optax.adafactor(RATE, **theirs)
    optax_state, theirs_of = optax_adafactor.init(params), jax.jit(optax_adafactor.update)
    for gradient, (updates, _, new) in zip(gradients, history, strict=True):
        expected, optax_state = theirs_of(gradient, optax_state, params)
        params = optax.apply_updates(params, expected)
        for name in params:
            np.testing.assert_allclose(updates[name], expected[name], rtol=2e-5, atol=1e-9)
            np.testing.assert_allclose(new[name], params[name], rtol=2e-5, atol=1e-9)


# Parameters, and the matrix or vector that each of their parts is.
MATRICES = [
    ("w_in_EDF", (3, 5, 7), (5, 7)),
    ("w_out_EFD", (3, 7, 5), (7, 5)),
    ("w_in_EDF", (2, 3, 5, 7), (5, 7)),  # stacked: NEDF
    ("w_query_DHK", (6, 2, 4), (6, 8)),  # one matrix of D by (H K)
    ("w_out_HKD", (2, 3, 4, 6), (12, 6)),  # stacked: NHKD
    ("b_in_EF", (3, 7), (7,)),
    ("b_in_EF", (2, 3, 7), (7,)),
    ("scale_D", (4, 5), (5,)),  # stacked: ND
    ("w_router_DE", (2, 5, 3), (5, 3)),  # E < 4: not factored; stacked: NDE
    ("bias_UH", (6, 3), (6, 3)),
    ("b_query_HK", (2, 4), (2, 4)),
]


def test_each_matrix_alone_as_a_numpy_loop():
    names = [f"{i}/{name}" for i, (name, _, _) in enumerate(MATRICES)]
    params, gradients, loops = {}, [{} for _ in range(3)], {}
    for name, (_, shape, matrix) in zip(names, MATRICES, strict=True):
        w = normal(0, *shape)
        # Matrices of very different sizes: whatever is shared between them shows.
        params[name] = w * np.exp(normal(1, *shape[: w.ndim - 1], 1)[..., :1] * 3)
        for step, gradient in enumerate(gradients):
            gradient[name] = normal(step + 2, *shape, scale=0.1 + step)
        is_factored = len(matrix) == 2 and min(matrix) >= 4 and "/b_" not in name
        loops[name] = [
            MatrixAdafactor(matrix, is_factored=is_factored)
            for _ in range(w.size // np.prod(matrix))
        ]
    history = run(Adafactor(min_dim_size_to_factor=4), params, gradients)
    for gradient, (updates, _, new) in zip(gradients, history, strict=True):
        for name, (_, shape, matrix) in zip(names, MATRICES, strict=True):
            parts = zip(
                loops[name],
                params[name].reshape(-1, *matrix),
                gradient[name].reshape(-1, *matrix),
                strict=True,
            )
            expected = np.stack([loop.update(w, g) for loop, w, g in parts]).reshape(shape)
            np.testing.assert_allclose(updates[name], expected, rtol=1e-5, err_msg=name)
        params = jax.device_get(new)


@pytest.mark.parametrize("beta1", [slow(None), 0.9])
def test_stacked_layers_as_unstacked(beta1):
    def layer(seed, scale):
        return {
            "norm": {"scale_D": normal(seed, 6, scale=scale)},
            "w_router_DE": normal(seed + 1, 6, 3, scale=scale),
            "w_query_DHK": normal(seed + 2, 6, 2, 4, scale=scale),
            "experts": {
                "w_in_EDF": normal(seed + 3, 3, 6, 8, scale=scale),
                "b_in_EF": normal(seed + 4, 3, 8, scale=scale),
            },
            "temperature": np.float32(scale),
        }

    def stack(*layers):
        return jax.tree.map(lambda *leaves: np.stack(leaves), *layers)

    optimizer = Adafactor(min_dim_size_to_factor=4, beta1=beta1, weight_decay_rate=0.01)
    layers = [layer(0, 1.0), layer(10, 30.0)]
    gradients = [[layer(20 + s, 0.1), layer(30 + s, 100.0)] for s in range(3)]
    apart = [run(optimizer, layers[n], [step[n] for step in gradients])[-1] for n in range(2)]
    stacked = run(optimizer, stack(*layers), [stack(*step) for step in gradients])[-1]
    for part in (0, 2):
        assert_close(stacked[part], stack(apart[0][part], apart[1][part]), rtol=1e-6)
    # The same names too: a checkpoint of one turns into the other by stacking.
    statistics = [each[1].statistics for each in apart]
    assert_close(stacked[1].statistics, stack(*statistics), rtol=1e-6)


def test_state_keeps_what_is_needed_and_nothing_else():
    params = {
        "w_in_EDF": jnp.zeros((2, 128, 256)),
        "w_query_DHK": jnp.zeros((128, 4, 32)),
        "w_router_DE": jnp.zeros((128, 64)),
        "scale_D": jnp.zeros((3, 128)),
    }
    state = Adafactor().build(Constant(RATE)).init(params)
    assert jax.tree.map(jnp.shape, state.statistics) == {
        "w_in_EDF": {"v_row_ED": (2, 128), "v_col_EF": (2, 256)},
        "w_query_DHK": {"v_row_D": (128,), "v_col_HK": (4, 32)},
        "w_router_DE": {"v_DE": (128, 64)},
        "scale_D": {"v_D": (3, 128)},
    }
    with_momentum = Adafactor(beta1=0.9).build(Constant(RATE)).init(params)
    assert with_momentum.statistics["w_in_EDF"].keys() == {
        "v_row_ED", "v_col_EF", "momentum_EDF",
    }  # fmt: skip


def test_without_a_gradient_an_expert_and_a_vector_stay():
    params = {"w_in_EDF": normal(0, 2, 4, 6), "scale_D": np.zeros(4, np.float32)}
    gradient = {"w_in_EDF": normal(1, 2, 4, 6), "scale_D": np.zeros(4, np.float32)}
    gradient["w_in_EDF"][0] = 0
    for updates, state, new in run(Adafactor(min_dim_size_to_factor=2), params, [gradient] * 3):
        assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(state))
        assert not np.any(updates["w_in_EDF"][0]) and not np.any(updates["scale_D"])
        assert np.all(updates["w_in_EDF"][1])
        np.testing.assert_array_equal(new["w_in_EDF"][0], params["w_in_EDF"][0])


def test_bfloat16_parameters_have_float32_statistics_and_updates():
    w, g = normal(0, 2, 4, 6), normal(1, 2, 4, 6)
    half = {"w_in_EDF": jnp.asarray(w, jnp.bfloat16)}
    gradient = {"w_in_EDF": jnp.asarray(g, jnp.bfloat16)}
    optimizer = Adafactor(min_dim_size_to_factor=2, beta1=0.9, weight_decay_rate=0.1)
    ((updates, state, new),) = run(optimizer, half, [gradient])
    assert new["w_in_EDF"].dtype == jnp.bfloat16
    assert updates["w_in_EDF"].dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(state.statistics)} == {np.dtype("float32")}
    full = jax.tree.map(lambda x: x.astype(jnp.float32), (half, gradient))
    ((expected, _, _),) = run(optimizer, full[0], [full[1]])
    np.testing.assert_allclose(updates["w_in_EDF"], expected["w_in_EDF"], rtol=1e-6)


def test_learning_rate_follows_the_count_of_updates():
    transformation = Adafactor(multiply_by_parameter_scale=False).build(
        InverseSquareRoot(base=1.0, warmup_steps=1)
    )
    params, gradient = {"scale_D": jnp.ones(4)}, {"scale_D": jnp.ones(4)}
    state = transformation.init(params)
    for step in range(4):
        updates, state = transformation.update(gradient, state, params)
        np.testing.assert_allclose(updates["scale_D"], -1 / np.sqrt(max(step, 1)), rtol=1e-6)
    assert state.count == 4


def test_donated_update_is_in_place():
    params = {"w_in_EDF": jnp.asarray(normal(0, 4, 128, 256)), "scale_D": jnp.ones(128)}
    gradient = jax.tree.map(jnp.ones_like, params)
    transformation = Adafactor().build(Constant(RATE))

    state = transformation.init(params)
    lowered = donating_step(transformation).lower(params, state, gradient, True)
    compiled = lowered.compile()
    # One array of squares; parameters and state are updated where they are.
    assert compiled.memory_analysis().temp_size_in_bytes < 1.1 * params["w_in_EDF"].nbytes
    kept = jax.tree.map(np.array, params)  # a copy: a view would keep the buffers from donation
    old, (params, state) = params, compiled(params, state, gradient, False)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
    jax.tree.map(np.testing.assert_array_equal, params, kept)
    params, state = compiled(params, state, gradient, True)
    assert state.count == 1
    assert np.all(params["w_in_EDF"] < kept["w_in_EDF"])


def test_experts_over_eight_devices_as_on_one():
    params = {
        "w_in_EDF": jnp.asarray(normal(0, 16, 128, 128)),
        "w_router_DE": jnp.ones((128, 16)),
    }
    gradient = {
        "w_in_EDF": jnp.asarray(normal(1, 16, 128, 128)),
        "w_router_DE": jnp.asarray(normal(3, 128, 16)),
    }
    transformation = Adafactor(weight_decay_rate=0.01).build(Constant(RATE))

    def step(params, state, gradient):
        updates, state = transformation.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    state = transformation.init(params)
    expected = jax.jit(step)(params, state, gradient)
    mesh = jax.make_mesh((8,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    shardings = [param_shardings(Rules(), mesh, tree) for tree in (params, state)]
    assert shardings[1].statistics["w_in_EDF"]["v_row_ED"].spec == PartitionSpec("expert", None)
    with jax.set_mesh(mesh):
        sharded = jax.jit(
            step, in_shardings=(*shardings, shardings[0]), out_shardings=tuple(shardings)
        )
        text = sharded.lower(params, state, gradient).compile().as_text()
        new = sharded(params, state, gradient)
    # Experts are on their own, and the router is whole everywhere: nothing is sent.
    assert collectives(text) == []
    assert_close(new, expected, rtol=1e-6, atol=1e-7)


def test_bad_call():
    transformation = Adafactor().build(Constant(RATE))
    with pytest.raises(ValueError, match="'kernel' has 2 dimensions"):
        transformation.init({"kernel": jnp.ones((3, 3))})
