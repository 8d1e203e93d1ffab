# SPDX-License-Identifier: Apache-2.0
"""One sparse layer's problem, and a dispatcher's answer to it on any mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from switchx.bench.equivalence import largest_errors
from switchx.moe.dispatchers import FUNCTIONS, refusal
from switchx.moe.routing_plan import RoutingPlan
from switchx.moe.sharded_dispatch import expert_specs
from switchx.partitioning.constrain import use_mesh
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.placement import Placement
from switchx.partitioning.rules import Rules
from tests.moe.banks import ffn_bank, ffn_numbers

G, T, S, E, C, D, F = 8, 12, 2, 8, 4, 8, 16
PIPELINE_MOE = Rules(expert_params=(("E", ("model",)), ("D", ("fsdp",))))

# Where each dispatcher that says its own communication is at home, on eight devices.
HOMES = [
    ("dropless", MeshSpec()),
    ("dropless", MeshSpec(fsdp=2, model=2)),
    ("all_to_all", MeshSpec(expert=4)),
    ("all_to_all", MeshSpec(data=1, fsdp=2, expert=2, model=2)),
    ("all_to_all", MeshSpec(node=2, expert=2)),
    ("hierarchical", MeshSpec(node=2, expert=2)),
    ("hierarchical", MeshSpec(data=1, node=2, expert=2, model=2)),
    ("ragged_all_to_all", MeshSpec(expert=4)),
    ("ragged_all_to_all", MeshSpec(data=1, fsdp=2, expert=2, model=2)),
    ("sliced", MeshSpec(model=4, rules=PIPELINE_MOE)),
    ("sliced", MeshSpec(fsdp=2, model=2, rules=PIPELINE_MOE)),
    ("sliced", MeshSpec(data=1, model=8, rules=PIPELINE_MOE)),
    ("sliced_scatter", MeshSpec(model=4, rules=PIPELINE_MOE)),
    ("sliced_scatter", MeshSpec(fsdp=2, model=2, rules=PIPELINE_MOE)),
]
# Of each dispatcher the mesh of most axes: what the default suite runs.
MOST_AXES = {
    "dropless": MeshSpec(fsdp=2, model=2),
    "all_to_all": MeshSpec(data=1, fsdp=2, expert=2, model=2),
    "hierarchical": MeshSpec(data=1, node=2, expert=2, model=2),
    "ragged_all_to_all": MeshSpec(data=1, fsdp=2, expert=2, model=2),
    "sliced": MeshSpec(fsdp=2, model=2, rules=PIPELINE_MOE),
    "sliced_scatter": MeshSpec(fsdp=2, model=2, rules=PIPELINE_MOE),
}


def name_of(value) -> str:
    """A test's name for a row of `HOMES`."""
    if not isinstance(value, MeshSpec):
        return str(value)
    axes = ("fsdp", "node", "expert", "model")
    return ",".join(f"{a}={n}" for a in axes if (n := getattr(value, a)) > 1) or "data=8"


def make_plan(expert_GTS, capacity: int, seed: int = 0, num_experts: int = E) -> RoutingPlan:
    """A plan that gives slots in order; `num_experts` where a choice is none."""
    expert_GTS = np.asarray(expert_GTS, np.int32)
    G, T, S = expert_GTS.shape
    slot_GTS, count_GE = np.zeros_like(expert_GTS), np.zeros((G, num_experts), np.int32)
    for g, s, t in np.ndindex(G, S, T):
        if (e := expert_GTS[g, t, s]) < num_experts:
            slot_GTS[g, t, s] = count_GE[g, e]
            count_GE[g, e] += 1
    gate_GTS = np.random.default_rng(seed).uniform(0.1, 1.0, expert_GTS.shape)
    arrays = expert_GTS, gate_GTS.astype(np.float32), slot_GTS, count_GE
    return RoutingPlan(*map(jnp.asarray, arrays), num_experts, capacity)


def random_choices(seed: int = 0, num_choices: int = S):
    """Different experts for each token; the last token of a group is padding."""
    rng = np.random.default_rng(seed)
    expert_GTS = np.array(
        [[rng.permutation(E)[:num_choices] for _ in range(T)] for _ in range(G)]
    )
    expert_GTS[:, -1] = E
    return expert_GTS


@dataclasses.dataclass
class Problem:
    """What a dispatcher is given, and the gradient that its output gets."""

    x_GTD: np.ndarray
    plan: RoutingPlan
    numbers: dict
    dy_GTD: np.ndarray

    @property
    def bank(self):
        return ffn_bank(self.numbers)

    @property
    def arguments(self):
        """For an `answerer`."""
        return jnp.asarray(self.x_GTD), self.plan, self.bank, jnp.asarray(self.dy_GTD)


def make_problem(expert_GTS=None, capacity: int = C, seed: int = 0) -> Problem:
    expert_GTS = random_choices() if expert_GTS is None else np.asarray(expert_GTS)
    rng = np.random.default_rng(seed + 1)
    x_GTD, dy_GTD = rng.normal(size=(2, *expert_GTS.shape[:2], D)).astype(np.float32)
    return Problem(x_GTD, make_plan(expert_GTS, capacity), ffn_numbers(E, D, F), dy_GTD)


def answerer(dispatch):
    """A jitted `(x_GTD, plan, bank, dy_GTD) -> output, gradients` of a dispatcher.

    Gradients are by activations, gates and every weight of the bank.
    """

    @jax.jit
    def run(x_GTD, plan, bank, dy_GTD):
        def forward(x_GTD, gate_GTS, bank):
            return dispatch(x_GTD, dataclasses.replace(plan, gate_GTS=gate_GTS), bank)

        y_GTD, pull_back = jax.vjp(forward, x_GTD, plan.gate_GTS, bank)
        return y_GTD, pull_back(dy_GTD)

    return run


def answer(dispatch, problem: Problem):
    """A dispatcher's output and gradients, in the ambient mesh."""
    return answerer(dispatch)(*problem.arguments)


@functools.cache
def compiled(name: str, spec: MeshSpec | None = None):
    """The `answerer` of a dispatcher, compiled once for all tests of a mesh.

    Not for dispatchers that are broken on purpose, which need an `answerer` of their own.
    """
    del spec  # rules are read while tracing, and no part of a jitted function's key
    return answerer(FUNCTIONS[name])


def answer_on(spec: MeshSpec, name: str, problem: Problem, run=None):
    """The same on eight devices, by the dispatcher of this name or by a given `answerer`."""
    mesh = spec.build()
    G, T, _ = problem.plan.expert_GTS.shape
    reason = refusal(name, mesh, spec.rules, num_groups=G, tokens_per_group=T)
    assert reason is None, reason
    with use_mesh(mesh, spec.rules):
        return (run or compiled(name, spec))(*problem.arguments)


# Sums of float32 in another order: some units in the last place of the largest number.
TOLERANCE = 2e-6


def assert_same(got, want):
    """Output and every raw gradient are the same numbers, but for rounding."""
    assert largest_error(got, want) < TOLERANCE


def largest_error(got, want) -> float:
    """Over all arrays, the largest difference relative to the array's largest number."""

    return largest_errors({"all": got}, {"all": want})["all"]


def compiled_hlo(spec: MeshSpec, name: str, problem: Problem, dtype=jnp.float32, devices=None):
    """HLO of one layer on eight devices, those here or given ones: forward, with backward.

    Inputs and results are where the layer has them, so that nothing else moves; the
    gradient of the output is the output, as it cannot be there before it.
    """
    mesh, rules, dispatch = spec.build(devices), spec.rules, FUNCTIONS[name]
    place = Placement.on(mesh, rules)

    def on(spec):
        return NamedSharding(mesh, spec)

    is_split = name == "sliced_scatter"
    tokens = on(
        PartitionSpec(place.batch, place.summed) if is_split else PartitionSpec(place.batch)
    )
    groups = on(PartitionSpec(place.batch))
    weights = jax.tree.map(on, expert_specs(rules, mesh, problem.bank))
    plans = jax.tree.map(lambda _: groups, problem.plan)

    def forward_and_back(x_GTD, plan, bank):
        def run(x_GTD, gate_GTS, bank):
            return dispatch(x_GTD, dataclasses.replace(plan, gate_GTS=gate_GTS), bank)

        y_GTD, pull_back = jax.vjp(run, x_GTD, plan.gate_GTS, bank)
        return y_GTD, pull_back(y_GTD)

    # Shapes alone: the devices may be of a machine that is not here.
    x_GTD = jax.ShapeDtypeStruct(problem.x_GTD.shape, dtype)
    plan, bank = jax.eval_shape(lambda: (problem.plan, problem.bank))
    arguments = x_GTD, plan, bank
    for function, results in (
        (dispatch, tokens),
        (forward_and_back, (tokens, (tokens, groups, weights))),
    ):
        with use_mesh(mesh, rules):
            jitted = jax.jit(
                function, in_shardings=(tokens, plans, weights), out_shardings=results
            )
            yield jitted.lower(*arguments).compile().as_text()
