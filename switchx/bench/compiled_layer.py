# SPDX-License-Identifier: Apache-2.0
"""`switchx bench compiled`: kernels and bytes of one sparse layer, compiled for TPU and GPU.

A whole `SwitchFFN` in bfloat16, router, plan and statistics among it, is compiled for a v5e and
for an H200 that are not there. Its kernels are counted in the compiled program, and so are the
bytes that they move (`bench/hlo_bytes.py`), for two fixed splits of the rows: balanced, and
the k-th expert with a share of 1 / k. The ideal reads and writes each array once that a layer
of two products has. Nothing is run, so there are no times.
Dims: R rows, D model, F feed-forward, E experts
"""

import dataclasses
import json
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.launches import recorded_launches
from pallas_kernels.tpu_chip import described_tpu
from switchx.bench.hlo_bytes import moved_bytes
from switchx.bench.report import Check, Report
from switchx.models.config import ModelConfig, Precision, SwitchConfig
from switchx.models.params import params_of, with_params
from switchx.moe.layer import SwitchFFN
from switchx.partitioning.topology import Topology
from switchx.training.aot_devices import describe_devices, run_with_compiler

TARGETS = ("v5e:2x2", "h200:1")
DIRECTIONS = ("forward", "backward")
ACTIVATIONS = ("relu", "geglu")
# 256 rows an expert, as of an encoder or a training batch.
ROWS, LENGTH, EXPERTS, D_MODEL, D_FF = 16, 512, 32, 1024, 4096
R = ROWS * LENGTH
BOUND = "<=1.15"
_ELEMENT = 2  # bytes of a bfloat16


def layer_config(activation: str) -> ModelConfig:
    switch = SwitchConfig(EXPERTS, every=1, dispatcher="dropless", eval_capacity_factor=2.0)
    return ModelConfig(
        "decoder_only", vocab_size=8, d_model=D_MODEL, d_ff=D_FF, num_heads=16, d_head=64,
        num_decoder_layers=1, activation=activation, switch=switch,
        precision=Precision(params="bfloat16", compute="bfloat16"),
    )  # fmt: skip


def group_sizes() -> dict[str, np.ndarray]:
    """Rows of each expert: balanced, and by Zipf's law."""
    share_E = 1 / np.arange(1, EXPERTS + 1)
    zipf_E = np.floor(R * share_E / share_E.sum()).astype(np.int32)
    zipf_E[0] += R - zipf_E.sum()
    return {"balanced": np.full(EXPERTS, R // EXPERTS, np.int32), "zipf": zipf_E}


def ideal_bytes(activation: str, direction: str) -> int:
    """Each array once: matrices, rows of D and rows of F.

    Forward: x is read, y written, and the hidden rows are written and read. Backward is the
    whole of `jax.grad`: matrices are read twice and their gradients written; x is read twice,
    y and dx written, dy read; hidden rows are written, read by the second product and by its
    weight gradient, and their gradient is written and read. A gated linear unit has a second
    matrix of the first product, the gradients of two hidden arrays, and those two as residual.
    """
    is_gated = activation != "relu"
    matrices = EXPERTS * D_MODEL * D_FF * (3 if is_gated else 2)
    times, rows_D, rows_F = 1, 2, 2
    if direction == "backward":
        times, rows_D, rows_F = 3, 5, 11 if is_gated else 5
    elements = times * matrices + R * (rows_D * D_MODEL + rows_F * D_FF)
    return _ELEMENT * elements


def layer_function(activation: str, direction: str) -> tuple[Callable, tuple]:
    """The layer as a function of parameters and rows, and the shapes of its arguments."""
    config = layer_config(activation)
    params = jax.eval_shape(lambda: params_of(SwitchFFN(config, key=jax.random.key(0))))
    x_BLD = jax.ShapeDtypeStruct((ROWS, LENGTH, D_MODEL), jnp.bfloat16)
    is_token_BL = jnp.ones((ROWS, LENGTH), bool)
    is_training = direction == "backward"

    def forward(params, x_BLD):
        # Its initial weights are not used, so not computed.
        layer = with_params(SwitchFFN(config, key=jax.random.key(0)), params)
        y_BLD, stats = layer(x_BLD, is_token_BL, is_training=is_training)
        return y_BLD, stats.balance_loss

    def loss(params, x_BLD, dy_BLD):
        y_BLD, balance_loss = forward(params, x_BLD)
        return jnp.sum((y_BLD * dy_BLD).astype(jnp.float32)) + balance_loss

    if is_training:
        return jax.grad(loss, argnums=(0, 1)), (params, x_BLD, x_BLD)
    return forward, (params, x_BLD)


def compiled_rows(topology: Topology) -> list[dict]:
    """A row for each activation, direction and split, in a process that has the compiler."""
    device = describe_devices(topology)[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    if topology.generation.platform == "tpu":
        scope = described_tpu(device.device_kind, device.num_cores)
    else:
        kind = jax.sharding.AbstractDevice(device.device_kind, None, platform="gpu")
        mesh = jax.sharding.get_abstract_mesh().update(abstract_device=kind)
        scope = jax.sharding.use_abstract_mesh(mesh)
    rows = []
    with scope:
        for activation in ACTIVATIONS:
            for direction in DIRECTIONS:
                function, arguments = layer_function(activation, direction)
                arguments = jax.tree.map(
                    lambda leaf: jax.ShapeDtypeStruct(
                        leaf.shape, leaf.dtype, sharding=sharding
                    ),
                    arguments,
                )
                with recorded_launches() as launches:
                    hlo = jax.jit(function).lower(*arguments).compile().as_text()
                cell = str(topology), activation, direction
                rows += [_row(*cell, *each, hlo, launches) for each in group_sizes().items()]
    return rows


def _row(target, activation, direction, split, sizes_E, hlo, launches) -> dict:
    moved, ideal = moved_bytes(hlo, launches, sizes_E), ideal_bytes(activation, direction)
    return {
        "target": target,
        "activation": activation,
        "pass": direction,
        "rows_by_expert": split,
        **dataclasses.asdict(moved),
        "ideal_bytes": ideal,
        "bytes_vs_ideal": moved.num_bytes / ideal,
    }


def run(note=print) -> Report:
    """Compiles for every target whose compiler is installed; says of the others why not."""
    rows = []
    for target in TARGETS:
        note(f"compiling a sparse layer for {target}")
        try:
            child = run_with_compiler(
                [target], Topology.parse(target), module=__name__, capture_output=True,
                text=True,
            )  # fmt: skip
        except FileNotFoundError as error:
            rows.append({"target": target, "not_run": str(error)})
            continue
        lines = [line for line in child.stdout.splitlines() if line.startswith("[{")]
        if not lines:
            raise RuntimeError(
                f"the compiler for {target} ended with status {child.returncode}: "
                f"{child.stderr[-2000:]}"
            )
        rows += json.loads(lines[-1])
    return Report("bench compiled", rows, checks(rows))


def checks(rows: list[dict]) -> list[Check]:
    """The worst forward pass against its ideal; none where nothing was compiled."""
    found = [row["bytes_vs_ideal"] for row in rows if row.get("pass") == "forward"]
    return [Check("layer_bytes_vs_ideal", max(found), BOUND)] if found else []


if __name__ == "__main__":
    print(json.dumps(compiled_rows(Topology.parse(sys.argv[1]))))
