# SPDX-License-Identifier: Apache-2.0
"""`switchx check equivalence`: every router, dispatcher and mesh gives the same numbers.

One Switch layer, from one set of weights, on one device with the one-hot einsum (the oracle)
and on eight devices with each dispatcher, for every way to write eight as a product of mesh
axes. It compares outputs, auxiliary losses and raw gradients, of the inputs and of every
parameter, and their global norm: Adam and Adafactor hide gradients that are a whole number of
times too large. Dims: B rows of a batch, L tokens of a row, D model
"""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from switchx.models.adapters import LoRASpec, abstract_adapters, with_adapters
from switchx.models.config import ModelConfig, RouterConfig, SwitchConfig
from switchx.models.params import params_of, with_params
from switchx.moe.config import DISPATCHERS
from switchx.moe.dispatchers import refusal
from switchx.moe.experts import CopiedWeight
from switchx.moe.layer import SwitchFFN
from switchx.moe.replay import UNSET
from switchx.optim.updates import global_norm
from switchx.partitioning.constrain import use_mesh
from switchx.partitioning.mesh import AXES, MeshSpec, named_axes
from switchx.partitioning.rules import SLICED_RULES, Rules, param_shardings
from switchx.results import Check, Report

NUM_DEVICES = 8
ROWS, LENGTH, NUM_EXPERTS, D_MODEL, D_FF = 8, 16, 8, 8, 16

SHARED = "top 2, gated shared expert"
SIGMOID = dict(num_selected=2, score="sigmoid", gate="normalized", gate_scale=2.5)
ROUTERS = {
    "top 1": RouterConfig(),
    "top 1, loads of the batch": RouterConfig(balance_scope="batch"),
    "top 1, sampled": RouterConfig(exploration="sample"),
    "top 1, surest first": RouterConfig(priority="gate"),
    "top 1, biased": RouterConfig(bias_update_rate=0.001),
    "top 1, rerouted": RouterConfig(overflow="reroute"),
    "top 1, dropless": RouterConfig(overflow="dropless"),
    "top 2": RouterConfig(num_selected=2),
    "top 2, normalized": RouterConfig(num_selected=2, gate="normalized"),
    "top 8": RouterConfig(num_selected=NUM_EXPERTS),
    "top 2, replayed": RouterConfig(
        num_selected=2, bias_update_rate=0.001, replay=True, replay_drops=True
    ),
    "top 2, sigmoid": RouterConfig(
        **SIGMOID, bias_update_rate=0.001, bias_rule="sign_centered"
    ),
    "top 2, sqrt-softplus": RouterConfig(num_selected=2, score="sqrt_softplus", gate="score"),
    "top 2, expert groups": RouterConfig(
        **SIGMOID, num_expert_groups=4, expert_groups_per_token=2, bias_update_rate=0.001
    ),
    "top 2, by sequence": RouterConfig(
        **SIGMOID, balance_scope="sequence", balance_counts="unbiased", bias_update_rate=0.001
    ),
    "top 2, load of the step before": RouterConfig(
        num_selected=2, balance_scope="batch", balance_load="previous_step"
    ),
    "top 2, quantiles": RouterConfig(**SIGMOID, bias_rule="quantile", bias_update_rate=1.0),
    "top 2, quantiles of logits": RouterConfig(
        **SIGMOID, bias_rule="quantile_logits", bias_update_rate=1.0
    ),
    SHARED: RouterConfig(num_selected=2, gate="normalized"),
    "expert choice": RouterConfig(kind="expert_choice", exploration="none"),
    "hash": RouterConfig(kind="hash", exploration="none"),
    "top 1, adapted": RouterConfig(),
    "top 2, adapted alike": RouterConfig(num_selected=2),
}
# Layers whose experts have low-rank adapters: one for each expert, or one for all.
ADAPTERS = {
    "top 1, adapted": LoRASpec("none", rank=2),
    "top 2, adapted alike": LoRASpec("none", rank=2, shared_by_experts=True),
}
# The number of cells: its check fails if a further combination is refused.
ALL_CELLS = 3795
SAMPLE_CELLS = len(ROUTERS) * len(DISPATCHERS)

# Largest error over the array's largest number, in float32: tens of roundings.
TOLERANCE = 5e-6


@dataclasses.dataclass(frozen=True)
class Cell:
    """One combination of router, dispatcher and mesh, compared with one device."""

    router: str
    dispatcher: str
    mesh: MeshSpec

    @property
    def mesh_name(self) -> str:
        return named_axes({axis: getattr(self.mesh, axis) for axis in AXES})


def meshes(rules: Rules) -> Iterator[MeshSpec]:
    """Every way to write eight devices as a product of a layer's five axes."""
    powers = range(NUM_DEVICES.bit_length())
    # Pipeline stages are divided between layers: a layer computes the same in each.
    axes = [axis for axis in AXES if axis != "pipe"]
    for exponents in itertools.product(powers, repeat=len(axes)):
        if 2 ** sum(exponents) == NUM_DEVICES:
            sizes = {axis: 2**n for axis, n in zip(axes, exponents, strict=True)}
            yield MeshSpec(**sizes, rules=rules)


def all_cells() -> tuple[list[Cell], dict[tuple[str, str], str]]:
    """The cells to compare, and why each refused (dispatcher, mesh) is refused."""
    cells, refused = [], {}
    for dispatcher in DISPATCHERS:
        rules = SLICED_RULES if DISPATCHERS[dispatcher].is_sliced else Rules()
        for mesh in meshes(rules):
            reason = refusal(
                dispatcher, mesh.build(), rules, num_groups=ROWS, tokens_per_group=LENGTH
            )
            of_mesh = [Cell(router, dispatcher, mesh) for router in ROUTERS]
            if reason is None:
                cells += of_mesh
            else:
                refused[dispatcher, of_mesh[0].mesh_name] = reason
    return cells, refused


def sample_of(cells: list[Cell]) -> list[Cell]:
    """One cell for each router and dispatcher, taking different meshes in turn."""
    by_pair: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        by_pair.setdefault((cell.router, cell.dispatcher), []).append(cell)
    return [same[5 * i % len(same)] for i, same in enumerate(by_pair.values())]


def layer_of(router: str, dispatcher: str) -> SwitchFFN:
    """A layer with one group per row that drops tokens; its weights are replaced."""
    switch = SwitchConfig(
        NUM_EXPERTS,
        every=1,
        stacks="encoder",
        capacity_factor=1.0,
        min_capacity=1,
        group_size=LENGTH,
        expert_bias=True,
        shared_d_ff=D_FF if router == SHARED else None,
        shared_gate=router == SHARED,
        dispatcher=dispatcher,
        router=ROUTERS[router],
    )
    model = ModelConfig(
        "encoder_decoder", 8, D_MODEL, D_FF, 2, 4, 1, 1, activation="geglu", switch=switch
    )
    return SwitchFFN(model, key=jax.random.key(0))


def make_inputs() -> dict[str, jax.Array]:
    """Fixed numbers; the last tokens of every other row are padding, every fourth token has no
    choices to replay, and a row has two sequences."""
    rng = np.random.default_rng(0)
    x_BLD, dy_BLD = rng.normal(size=(2, ROWS, LENGTH, D_MODEL)).astype(np.float32)
    is_token_BL = np.ones((ROWS, LENGTH), bool)
    is_token_BL[::2, -3:] = False
    token_BL = rng.integers(0, 1000, (ROWS, LENGTH)).astype(np.int32)
    replay_BLS = np.argsort(rng.random((ROWS, LENGTH, NUM_EXPERTS)))[..., :2].astype(np.int16)
    replay_BLS[:, ::4] = UNSET
    inputs = dict(x_BLD=x_BLD, dy_BLD=dy_BLD, is_token_BL=is_token_BL, token_BL=token_BL)
    segment_BL = is_token_BL * (1 + (np.arange(LENGTH) >= 5)).astype(np.int32)
    inputs |= dict(replay_BLS=replay_BLS, segment_BL=segment_BL)
    return {name: jnp.array(value) for name, value in inputs.items()}


def make_params(layer: SwitchFFN, adapters: LoRASpec | None = None) -> dict:
    """Fixed numbers in the shapes of a layer's parameters, and of its adapters if any."""
    rng, shapes = np.random.default_rng(1), params_of(layer)
    if adapters is not None:
        shapes = {"base": shapes, "adapters": abstract_adapters(shapes, adapters)}
    return jax.tree.map(
        lambda leaf: jnp.array(rng.normal(size=leaf.shape), jnp.float32), shapes
    )


def evaluate(
    layer: SwitchFFN, params, inputs, expert_of_slot_R=None, adapters: LoRASpec | None = None
) -> dict[str, Any]:
    """Computes output, auxiliary losses and the numbers that set biases, raw gradients of
    inputs and parameters, and their norm.

    The gradients are of the output's product with fixed numbers, plus the auxiliary losses.

    Args:
        expert_of_slot_R: see `moe/expert_copies.py`; None where there are no copies.
        adapters: the adapters among `params`; None where there are none.
    """

    router = layer.config.switch.router

    def loss(params, x_BLD):
        if adapters is not None:
            params = with_adapters(params["base"], params["adapters"], adapters)
        if expert_of_slot_R is not None:
            experts = params["experts"]
            weight = CopiedWeight(experts["w_in_EDF"], expert_of_slot_R)
            params = params | {"experts": experts | {"w_in_EDF": weight}}
        y_BLD, stats = with_params(layer, params)(
            x_BLD,
            inputs["is_token_BL"],
            inputs["token_BL"],
            replay_BLS=inputs["replay_BLS"] if router.replay else None,
            segment_BL=inputs["segment_BL"] if router.balance_scope == "sequence" else None,
            is_training=True,
            key=jax.random.key(2),
        )
        aux = {"balance": stats.balance_loss, "router_z": stats.router_z_loss}
        value = jnp.sum(y_BLD * inputs["dy_BLD"]) + sum(aux.values())
        counts = stats.load_E, stats.margin_EW, stats.margin_E
        return value, (y_BLD, aux | {"counts": counts})

    gradients, (y_BLD, aux) = jax.grad(loss, argnums=(0, 1), has_aux=True)(
        params, inputs["x_BLD"]
    )
    return {
        "forward": y_BLD,
        "aux_loss": aux,
        "gradient": gradients,
        "grad_norm": global_norm(gradients),
    }


def run_on_one_device(router: str) -> dict[str, Any]:
    """Evaluates the oracle: the one-hot einsum on one device."""
    layer, adapters = layer_of(router, "einsum"), ADAPTERS.get(router)
    return _run(layer, make_params(layer, adapters), make_inputs(), adapters=adapters)


def run_cell(cell: Cell, expert_of_slot_R=None) -> dict[str, Any]:
    """Evaluates a cell, with parameters and tokens placed by the mesh's rules."""
    layer, mesh = layer_of(cell.router, cell.dispatcher), cell.mesh.build()
    adapters = ADAPTERS.get(cell.router)
    params, inputs = make_params(layer, adapters), make_inputs()
    rows = cell.mesh.rules.axes("B", mesh, table="activations")
    shardings = (
        param_shardings(cell.mesh.rules, mesh, params),
        jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec(rows)), inputs),
    )
    with use_mesh(mesh, cell.mesh.rules):
        return _run(layer, params, inputs, expert_of_slot_R, adapters, in_shardings=shardings)


def _run(
    layer: SwitchFFN, params, inputs, expert_of_slot_R=None, adapters=None, **placement
) -> dict[str, Any]:
    """Compiles and runs `evaluate` without LLVM's optimizations, which take longer than it."""
    function = functools.partial(
        evaluate, layer, expert_of_slot_R=expert_of_slot_R, adapters=adapters
    )
    jitted = jax.jit(function, **placement)
    is_cpu = jax.default_backend() == "cpu"
    options = {"xla_backend_optimization_level": "0"} if is_cpu else {}
    compiled = jitted.lower(params, inputs).compile(compiler_options=options)
    return jax.device_get(compiled(params, inputs))


def largest_errors(got: dict[str, Any], want: dict[str, Any]) -> dict[str, float]:
    """For each kind of result, the largest error of an array over its largest number."""

    def error(got, want):
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        difference = np.max(np.abs(got - want), initial=0.0)
        if np.isnan(difference):
            return np.inf
        return float(difference / max(np.max(np.abs(want), initial=0.0), 1e-30))

    return {
        kind: max(jax.tree.leaves(jax.tree.map(error, got[kind], want[kind]))) for kind in want
    }


def run(*, is_sample: bool = False, note=lambda text: None) -> Report:
    """Compares all cells, or a sample that has each router and dispatcher once.

    Raises:
        ValueError: there are fewer than eight devices.
    """
    if len(jax.devices()) != NUM_DEVICES:
        raise ValueError(
            f"check equivalence needs {NUM_DEVICES} devices, and there are "
            f"{len(jax.devices())}; simulate them on CPU with "
            f"JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count={NUM_DEVICES}"
        )
    cells, refused = all_cells()
    if is_sample:
        cells = sample_of(cells)
    oracle = {router: run_on_one_device(router) for router in ROUTERS}
    errors = {}
    for i, cell in enumerate(cells):
        errors[cell] = largest_errors(run_cell(cell), oracle[cell.router])
        if (i + 1) % 50 == 0:
            note(f"{i + 1} of {len(cells)} cells")
    rows = _rows(errors, refused)
    checks = [Check("cells", len(cells), f"=={SAMPLE_CELLS if is_sample else ALL_CELLS}")]
    checks += [
        Check(
            f"max_{kind}_error", max(each[kind] for each in errors.values()), f"<={TOLERANCE}"
        )
        for kind in ("forward", "aux_loss", "gradient", "grad_norm")
    ]
    return Report("check equivalence", rows, checks)


def _rows(errors: dict[Cell, dict[str, float]], refused: dict[tuple[str, str], str]):
    """A row for each router and dispatcher, then one for each reason for a refusal."""
    rows, found = [], {}
    for cell, error in errors.items():
        found.setdefault((cell.router, cell.dispatcher), []).append(error)
    for (router, dispatcher), same in found.items():
        worst = {f"max_{kind}_error": max(each[kind] for each in same) for kind in same[0]}
        rows.append({"router": router, "dispatcher": dispatcher, "meshes": len(same)} | worst)
    reasons = Counter((dispatcher, reason) for (dispatcher, _), reason in refused.items())
    rows += [
        {"router": "all", "dispatcher": dispatcher, "meshes": count, "refused": reason}
        for (dispatcher, reason), count in reasons.items()
    ]
    return rows
