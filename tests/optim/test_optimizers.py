# SPDX-License-Identifier: Apache-2.0
"""AdamW, any optimizer of Optax, weight decay, norms, and which axes Adafactor factors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from switchx import tree
from switchx.compiled.workload import state_arrays
from switchx.fields import describe, differences
from switchx.optim.adafactor import Adafactor, factoring_of
from switchx.optim.adamw import AdamW
from switchx.optim.protocol import Optax, decay_mask, is_decayed
from switchx.optim.schedules import Constant, WarmupCosine
from switchx.optim.updates import clip_scale, global_norm
from switchx.partitioning.mesh import MeshSpec
from switchx.training.programs import compiled_program
from tests.compare import assert_close
from tests.data.refusals import refused
from tests.training.adafactor_oracle import donating_step
from tests.training.jobs import make_job


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_as_optax_with_a_mask():
    params = {
        "w_in_DF": normal(0, 4, 6),
        "scale_D": normal(1, 4),
        "embedding_VD": normal(2, 5, 4),
    }
    schedule = WarmupCosine(0.1, 2, 5)
    ours = AdamW(beta1=0.8, beta2=0.9, epsilon=1e-4, weight_decay=0.3).build(schedule)
    theirs = optax.adamw(
        schedule, b1=0.8, b2=0.9, eps=1e-4, weight_decay=0.3,
        mask={"w_in_DF": True, "scale_D": False, "embedding_VD": False},
    )  # fmt: skip
    state, their_state, their_params = ours.init(params), theirs.init(params), params
    for step in range(4):
        gradient = jax.tree.map(lambda w, step=step: normal(step + 3, *w.shape), params)
        updates, state = jax.jit(ours.update)(gradient, state, params)
        expected, their_state = theirs.update(gradient, their_state, their_params)
        params = optax.apply_updates(params, updates)
        their_params = optax.apply_updates(their_params, expected)
        assert_close(params, their_params, rtol=1e-5, atol=1e-7)


def test_bfloat16_parameters_have_float32_moments_and_updates():
    params = {"w_in_DF": jnp.ones((4, 6), jnp.bfloat16)}
    transformation = AdamW().build(Constant(0.01))
    state = transformation.init(params)
    updates, state = transformation.update(params, state, params)
    assert updates["w_in_DF"].dtype == jnp.float32
    moments = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim == 2]
    assert [leaf.dtype for leaf in moments] == [jnp.float32] * 2
    assert optax.apply_updates(params, updates)["w_in_DF"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "optimizer", [AdamW(epsilon=1.0), Adafactor(min_dim_size_to_factor=2, epsilon1=1e-3)]
)
def test_a_gradient_scale_is_as_scaled_gradients(optimizer):
    params = {"w_in_EDF": normal(0, 2, 4, 6), "scale_D": normal(1, 4)}
    built = optimizer.build(Constant(0.01))
    scaled = jax.tree.map(lambda w: normal(2, *w.shape), params)
    large = jax.tree.map(lambda g: g * np.float32(2**15), scaled)
    update, state = jax.jit(built.update), built.init(params)
    ours = update(large, state, params, gradient_scale=np.float32(2**-15))
    assert_close(ours, update(scaled, state, params), rtol=1e-5)


def test_donated_update_is_in_place():
    params = {"w_in_EDF": jnp.ones((4, 128, 256))}
    transformation = AdamW().build(Constant(0.01))
    state = transformation.init(params)
    lowered = donating_step(transformation).lower(params, state, params, True)
    memory = lowered.compile().memory_analysis()
    assert memory.temp_size_in_bytes < params["w_in_EDF"].nbytes / 4
    assert memory.alias_size_in_bytes >= 3 * params["w_in_EDF"].nbytes


@pytest.mark.parametrize("optimizer", [AdamW(), Adafactor()])
def test_bad_call(optimizer):
    with pytest.raises(ValueError, match="schedule=0.1 is not a schedule"):
        optimizer.build(0.1)
    transformation = optimizer.build(Constant(0.1))
    params = {"scale_D": jnp.ones(3)}
    with pytest.raises(ValueError, match="params=None; pass the parameters"):
        transformation.update(params, transformation.init(params))


def no_optimizer(learning_rate):
    return 0.5


def two_steps(transformation, params):
    """Updates of two steps on made-up gradients, and the last state."""
    state, updates = transformation.init(params), None
    for step in range(2):
        rng = np.random.default_rng(step)
        gradients = jax.tree.map(lambda w, r=rng: r.normal(size=w.shape), params)
        updates, state = transformation.update(gradients, state, params)
    return updates, state


def test_an_optimizer_of_optax_is_optaxs_own():
    params = {"w_in_DF": jnp.full((4, 6), 0.5), "scale_D": jnp.ones(4)}
    schedule = WarmupCosine(0.1, 2, 5)
    ours = Optax(optax.lion, {"b1": 0.8, "weight_decay": 0.1}).build(schedule)
    got, _ = two_steps(ours, params)
    want, _ = two_steps(optax.lion(schedule, b1=0.8, weight_decay=0.1), params)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    ours = Optax(optax.sgd).build(Constant(0.5))
    updates, _ = ours.update(params, ours.init(params), params, gradient_scale=0.25)
    np.testing.assert_array_equal(updates["scale_D"], np.full(4, -0.125))
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
    ours = Optax(optax.adam).build(Constant(0.1))
    updates, state = ours.update(half, ours.init(half), half)
    assert {leaf.dtype for leaf in jax.tree.leaves((updates, state)) if leaf.ndim} == {
        jnp.dtype("float32")
    }


def test_an_optimizer_of_optax_is_described_by_name_or_refused():
    lion = Optax(optax.lion, {"b1": 0.8})
    assert describe(lion) == {
        "type": "Optax", "make": "optax._src.alias.lion", "arguments": {"b1": 0.8}
    }  # fmt: skip
    assert list(differences(describe(lion), Optax(optax.lion), "resume", "optimizer")) == [
        "optimizer.arguments: {'b1': 0.8} there, {} here"
    ]
    nameless = [lambda learning_rate: optax.sgd(0.1), optax.inject_hyperparams(optax.adam)]
    for make in nameless:
        with refused("job.optimizer.make=<any> cannot be written into a run folder"):
            describe(make_job(optimizer=Optax(make)), "job")
    with refused("Optax.make=lion with learning_rate and the arguments ['beta']: <any>'beta'"):
        Optax(optax.lion, {"beta": 0.8})
    with refused("Optax.make=no_optimizer gave a float"):
        Optax(no_optimizer).build(Constant(0.1))


@pytest.mark.parametrize(
    "make", [optax.lion, optax.adafactor, optax.adagrad, optax.contrib.schedule_free_adamw]
)
def test_moments_that_mirror_a_parameter_are_split_as_it_is(make):
    """Adafactor's rows and columns, and whatever else has another shape, are whole."""
    mesh = MeshSpec(data=1, expert=2, model=2, fsdp=2)
    job = make_job(mesh=mesh, optimizer=Optax(make), schedule=Constant(0.1))
    program = compiled_program(job)
    params = tree.named_leaves(program.abstract_state.params)
    specs = tree.named_leaves(program.shardings.params)
    state, shardings = program.abstract_state.opt_state, program.shardings.opt_state
    num_mirrored = 0
    for name, leaf in tree.named_leaves(state).items():
        of = [path for path in params if f"/{name}".endswith(f"/{path}")]
        spec = tree.named_leaves(shardings)[name].spec
        if of and params[of[0]].shape == leaf.shape:
            num_mirrored += 1
            assert spec == specs[of[0]].spec, name
        else:
            assert not any(spec), name
    assert num_mirrored >= len(params) * (make is not optax.adafactor)
    # The planner counts them alike.
    dims = {array.name: array.dims for array in state_arrays(job) if array.kind == "optimizer"}
    assert {bool(letters) for letters in dims.values()} == {True} | (
        {False} if make is optax.adafactor else set()
    )


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("w_in_DF w_in_NDF w_out_EFD w_out_NEFD w_query_DHK w_router_DE w_logits_DV", True),
        (
            "embedding_VD positions_LD bias_UH bias_NUH scale_D scale_ND b_in_EF b_query_HK",
            False,
        ),
        ("temperature_", False),
    ],
)
def test_only_matrices_of_layers_decay(names, expected):
    """Those of layers that are stacked, N, too; a name does not say so."""
    for name, dims in (each.rsplit("_", 1) for each in names.split()):
        name = f"{name}_{dims.removeprefix('N')}".removesuffix("_")
        params = {"decoder": {name: jnp.zeros((2,) * len(dims))}}
        assert is_decayed(f"decoder/{name}", params["decoder"][name]) is expected, name
        assert decay_mask(params) == {"decoder": {name: expected}}, name


def test_norm_by_hand():
    # 1 + 4 + 4 + 16 = 25.
    gradients = {"scale_D": jnp.array([1.0, 2.0]), "w_in_DF": jnp.array([[2.0, 4.0]])}
    assert global_norm(gradients) == 5
    half = jax.tree.map(lambda g: g.astype(jnp.bfloat16), gradients)
    assert global_norm(half) == 5
    assert global_norm(half).dtype == jnp.float32


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_norm_shows_what_is_not_finite(bad):
    x = jnp.ones((2, 3, 4)).at[1, 0, 0].set(bad)
    assert not jnp.isfinite(global_norm({"w_in_EDF": x}))


def test_clip_scale_as_optax(key):
    gradients = {"scale_D": jax.random.normal(key, (8,))}
    norm = global_norm(gradients)
    for max_norm in (0.1, 100.0):
        clip = optax.clip_by_global_norm(max_norm)
        expected, _ = clip.update(gradients, clip.init(gradients))
        scaled = gradients["scale_D"] * clip_scale(norm, max_norm)
        np.testing.assert_allclose(scaled, expected["scale_D"], rtol=1e-6)
    assert clip_scale(jnp.float32(5), 2.0) == jnp.float32(0.4)
    assert clip_scale(jnp.float32(0), 2.0) == 1


@pytest.mark.parametrize(
    ("name", "shape", "batch", "rows", "columns"),
    [
        ("w_in_DF", (8, 16), (), (0,), (1,)),
        ("encoder/layer_1/ffn/w_in_EDF", (2, 8, 16), (0,), (1,), (2,)),
        ("w_in_EDF", (3, 2, 8, 16), (0, 1), (2,), (3,)),
        ("w_query_DHK", (8, 2, 4), (), (0,), (1, 2)),
        ("w_out_HKD", (3, 2, 4, 8), (0,), (1, 2), (3,)),
        ("embedding_VD", (32, 8), (), (0,), (1,)),
        ("w_router_DE", (8, 8), (), (0,), (1,)),
        # Not matrices.
        ("scale_D", (8,), (), (), ()),
        ("scale_D", (3, 8), (0,), (), ()),
        ("b_in_EF", (2, 16), (0,), (), ()),
        ("b_in_EF", (3, 2, 16), (0, 1), (), ()),
        ("b_query_HK", (2, 8), (), (), ()),
        ("b_query_HK", (3, 2, 8), (0,), (), ()),
        ("bias_E", (8,), (), (), ()),  # a vector over experts, not E scalars
        ("bias_E", (3, 8), (0,), (), ()),
        ("w_stages_PDF", (2, 8, 16), (0,), (1,), (2,)),
        ("temperature", (), (), (), ()),
        ("temperature", (3,), (0,), (), ()),
        # Too small: rows and columns, heads and head size together, and E of the router.
        ("w_in_EDF", (64, 7, 16), (0,), (), ()),
        ("w_out_HKD", (2, 3, 8), (), (), ()),
        ("w_router_DE", (3, 8, 4), (0,), (), ()),
    ],
)
def test_axes(name, shape, batch, rows, columns):
    factoring = factoring_of(name, shape, 8)
    assert (factoring.batch, factoring.rows, factoring.columns) == (batch, rows, columns)
    assert factoring.is_factored == bool(rows)
    assert factoring.within == tuple(range(len(batch), len(shape)))


def test_statistics_are_named_by_their_dimensions():
    assert factoring_of("temperature", (3,), 8).state_name("v") == "v"
    # A name may say N itself; others are in `test_state_keeps_what_is_needed_and_nothing_else`.
    assert factoring_of("scale_ND", (3, 8), 8).state_name("v") == "v_ND"
