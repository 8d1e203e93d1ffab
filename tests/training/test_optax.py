# SPDX-License-Identifier: Apache-2.0
"""Any optimizer of Optax: Optax's own updates, its description, its state on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from switchx import tree
from switchx.fields import describe, differences
from switchx.optim.protocol import Optax
from switchx.optim.schedules import Constant, WarmupCosine
from switchx.partitioning.mesh import MeshSpec
from switchx.training.program import TrainingProgram, state_arrays
from tests.data.refusals import refused
from tests.training.jobs import make_job


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
    with refused("Optax.make=no_optimizer gave a float; expected an optax.GradientTrans<any>"):
        Optax(no_optimizer).build(Constant(0.1))


@pytest.mark.parametrize(
    "make", [optax.lion, optax.adafactor, optax.adagrad, optax.contrib.schedule_free_adamw]
)
def test_moments_that_mirror_a_parameter_are_split_as_it_is(make):
    """Adafactor's rows and columns, and whatever else has another shape, are whole."""
    mesh = MeshSpec(data=1, expert=2, model=2, fsdp=2)
    job = make_job(mesh=mesh, optimizer=Optax(make), schedule=Constant(0.1))
    program = TrainingProgram(job)
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
