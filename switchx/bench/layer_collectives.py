# SPDX-License-Identifier: Apache-2.0
"""`ppmoe_extra_collectives`: what one sparse layer communicates, by its dispatcher.

Forward and backward of one layer, compiled for eight devices. Data-parallel experts send
tokens and results by all-to-all, both ways; Pipeline MoE's (Chen et al. 2023,
arXiv:2304.11414, section 3.3) add up parts once each way, as a dense tensor-parallel FFN
does, and communicate nothing more. Dims: B L D
"""

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from switchx.bench.report import Check
from switchx.layers.ffn import DenseFFN
from switchx.models.config import ModelConfig, SwitchConfig
from switchx.models.params import params_of, with_params
from switchx.moe.layer import SwitchFFN
from switchx.partitioning.constrain import use_mesh
from switchx.partitioning.hlo_collectives import collectives
from switchx.partitioning.mesh import MeshSpec, batch_axes
from switchx.partitioning.rules import param_shardings
from switchx.planner.layout import SLICED_RULES

NUM_DEVICES = 8
ROWS, LENGTH, EXPERTS = 8, 16, 8
MODEL = ModelConfig("decoder_only", 8, 32, 64, 8, 4, num_decoder_layers=1, activation="relu")
# Less than any array of activations has: what is left out are sums of the router's gradient,
# of D * E numbers, and of counts.
LEAST_BYTES = 4 * ROWS * LENGTH * MODEL.d_model // NUM_DEVICES

MESHES = {
    "dense": MeshSpec(data=1, model=8),
    "sliced": MeshSpec(data=1, model=8, rules=SLICED_RULES),
    "all_to_all": MeshSpec(data=1, expert=8),
    "hierarchical": MeshSpec(data=1, node=2, expert=4),
}


def measured_rows(note: Callable[[str], None] = lambda text: None) -> list[dict[str, Any]]:
    """A row a layer: collectives of its activations by kind, their number and bytes."""
    rows = []
    for name, spec in MESHES.items():
        note(f"compiling a layer: {name}")
        counted, sizes = collections.Counter(), collections.Counter()
        for each in collectives(compiled_layer(name, spec)):
            if each.num_bytes >= LEAST_BYTES:
                counted[each.kind] += 1
                sizes[each.kind] += each.num_bytes
        row = {"case": f"one layer, {name}, {axes_of(spec)}", "collectives": counted.total()}
        for kind in sorted(counted):
            row |= {f"{kind}s": counted[kind], f"{kind}_bytes": sizes[kind]}
        rows.append(row)
    return rows


def check(rows: list[dict[str, Any]]) -> Check:
    """Collectives of Pipeline MoE's layer beyond those of the dense tensor-parallel one."""
    dense, sliced = (row["collectives"] for row in rows[:2])
    return Check("ppmoe_extra_collectives", sliced - dense, "==0")


def axes_of(spec: MeshSpec) -> str:
    sizes = spec.build().shape
    return " ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)


def compiled_layer(name: str, spec: MeshSpec) -> str:
    """HLO of the gradients of a layer's inputs and parameters, tokens placed by the rules."""
    layer, mesh = make_layer(name), spec.build()
    params = params_of(layer)
    rows = NamedSharding(mesh, PartitionSpec(batch_axes(mesh, spec.rules)))
    shardings = param_shardings(spec.rules, mesh, params)
    x_BLD = jax.ShapeDtypeStruct((ROWS, LENGTH, MODEL.d_model), jnp.float32)

    def loss(params, x_BLD):
        run = with_params(layer, params)
        if name == "dense":
            return jnp.sum(run(x_BLD) ** 2)
        is_token_BL = jnp.ones(x_BLD.shape[:2], bool)
        return jnp.sum(run(x_BLD, is_token_BL, is_training=True)[0] ** 2)

    jitted = jax.jit(
        jax.grad(loss, argnums=(0, 1)),
        in_shardings=(shardings, rows),
        out_shardings=(shardings, rows),
    )
    with use_mesh(mesh, spec.rules):
        return jitted.lower(params, x_BLD).compile().as_text()


def make_layer(name: str) -> DenseFFN | SwitchFFN:
    if name == "dense":
        return DenseFFN(MODEL, key=jax.random.key(0))
    switch = SwitchConfig(
        EXPERTS, every=1, group_size=LENGTH, capacity_factor=1.0, min_capacity=1,
        dispatcher=name,
    )  # fmt: skip
    config = ModelConfig(
        "decoder_only", 8, MODEL.d_model, MODEL.d_ff, 8, 4, num_decoder_layers=1,
        activation="relu", switch=switch,
    )  # fmt: skip
    return SwitchFFN(config, key=jax.random.key(0))
