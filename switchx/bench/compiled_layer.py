# SPDX-License-Identifier: Apache-2.0
"""`switchx bench compiled`: kernels and bytes of one sparse layer, compiled for TPU and GPU.

A whole `SwitchFFN` in bfloat16, including router, plan and statistics, is compiled for a v5e
and for an H200 that need not be present. The compiled program's kernels are counted, and so are
the bytes that they move (`moved_bytes.py`), for two fixed splits of the rows: balanced, and
with a share of 1 / k for the k-th expert. The ideal reads and writes once each array that a
layer of two products has. Nothing is run, so there are no times.
Dims: R rows, D model, F feed-forward, E experts
"""

import json
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.launches import recorded_launches
from pallas_kernels.tpu_chip import described_tpu
from switchx.compiled.devices import describe_devices, json_of_child
from switchx.compiled.moved_bytes import Rates, moved_bytes
from switchx.hardware.spec import load_hardware
from switchx.models.config import ModelConfig, Precision, SwitchConfig
from switchx.models.params import params_of, with_params
from switchx.moe.layer import SwitchFFN
from switchx.partitioning.topology import Topology
from switchx.results import Check, Report

TARGETS = ("v5e:2x2", "h200:1")
DIRECTIONS = ("forward", "backward")
ACTIVATIONS = ("relu", "geglu")
# 256 rows per expert, as in an encoder or a training batch.
ROWS, LENGTH, NUM_EXPERTS, D_MODEL, D_FF = 16, 512, 32, 1024, 4096
R = ROWS * LENGTH
BOUND = "<=1.15"
COUNTED = ("kernels", "pallas_kernels", "num_bytes", "pallas_bytes")
_ELEMENT = 2  # bytes of a bfloat16
# Matrix units of a device (of a v5p, both cores') and the FLOPs of one in a cycle: 128 x 128
# multiplications and additions; with the spec file's peak they give the device's cycles.
MATRIX_UNITS = {"v5e": 4, "v5p": 8}
UNIT_FLOPS = 2 * 128 * 128


def layer_config(activation: str) -> ModelConfig:
    switch = SwitchConfig(NUM_EXPERTS, every=1, dispatcher="dropless", eval_capacity_factor=2.0)
    return ModelConfig(
        "decoder_only",
        vocab_size=8,
        d_model=D_MODEL,
        d_ff=D_FF,
        num_heads=16,
        d_head=64,
        num_decoder_layers=1,
        activation=activation,
        switch=switch,
        precision=Precision(params="bfloat16", compute="bfloat16"),
    )


def group_sizes(rows: int = R, experts: int = NUM_EXPERTS) -> dict[str, np.ndarray]:
    """Rows of each expert: balanced, and by Zipf's law."""
    share_E = 1 / np.arange(1, experts + 1)
    zipf_E = np.floor(rows * share_E / share_E.sum()).astype(np.int32)
    zipf_E[0] += rows - zipf_E.sum()
    return {"balanced": np.full(experts, rows // experts, np.int32), "zipf": zipf_E}


def ideal_bytes(activation: str, direction: str) -> int:
    """`layer_bytes` of the layer measured here."""
    matrix = NUM_EXPERTS * D_MODEL * D_FF
    return layer_bytes(matrix, R * D_MODEL, R * D_FF, activation != "relu", direction)


def layer_bytes(
    matrix: int, rows_D: float, rows_F: float, is_gated: bool, direction: str
) -> int:
    """Bytes of each array once: matrices, rows of D and rows of F.

    Forward: x is read, y written, and the hidden rows are written and read. Backward is the
    whole of `jax.grad`: matrices are read twice and their gradients written; x is read twice,
    y and dx written, dy read; hidden rows are written, read by the second product and by its
    weight gradient, and their gradient is written and read. A gated linear unit has a second
    matrix of the first product, the gradients of two hidden arrays, and those two as residual.

    Args:
        matrix: number of elements in one product's matrices, over all experts.
        rows_D, rows_F: number of elements in all rows of the model's size, and in hidden ones.
    """
    times, arrays_D, arrays_F = 1, 2, 2
    if direction == "backward":
        times = 3
        arrays_D = 5
        arrays_F = 11 if is_gated else 5
    matrices = times * matrix * (3 if is_gated else 2)
    return round(_ELEMENT * (matrices + arrays_D * rows_D + arrays_F * rows_F))


def layer_function(
    config: ModelConfig, direction: str, batch: int = ROWS, length: int = LENGTH
) -> tuple[Callable, tuple]:
    """The layer as a function of parameters and rows, and the shapes of its arguments."""
    params = jax.eval_shape(lambda: params_of(SwitchFFN(config, key=jax.random.key(0))))
    is_token_BL = jnp.ones((batch, length), bool)

    def forward(params, x_BLD):
        # The initial weights are not used, and so not computed.
        layer = with_params(SwitchFFN(config, key=jax.random.key(0)), params)
        y_BLD, stats = layer(x_BLD, is_token_BL, is_training=direction == "backward")
        return y_BLD, stats.balance_loss

    x_BLD = jax.ShapeDtypeStruct((batch, length, config.d_model), jnp.bfloat16)
    return in_direction(forward, params, x_BLD, direction)


def in_direction(forward: Callable, params, x_BLD, direction: str) -> tuple[Callable, tuple]:
    """A forward pass, or the gradients of its outputs and of its balance loss."""
    if direction == "forward":
        return forward, (params, x_BLD)

    def loss(params, x_BLD, dy_BLD):
        y_BLD, balance_loss = forward(params, x_BLD)
        return jnp.sum((y_BLD * dy_BLD).astype(jnp.float32)) + balance_loss

    return jax.grad(loss, argnums=(0, 1)), (params, x_BLD, x_BLD)


def rates_of(kind: str) -> Rates:
    """A TPU's rates, from its spec file; cycles are its matrix units' cycles."""
    hardware = load_hardware(kind)
    peak = hardware.compute.peak_flops_per_s
    return Rates(peak, hardware.memory.bytes_per_s, peak / (MATRIX_UNITS[kind] * UNIT_FLOPS))


def described_chip(topology: Topology, device):
    """The scope in which kernels are traced for a device that is not present."""
    if topology.generation.platform == "tpu":
        return described_tpu(device.device_kind, device.num_cores)
    kind = jax.sharding.AbstractDevice(device.device_kind, None, platform="gpu")
    mesh = jax.sharding.get_abstract_mesh().update(abstract_device=kind)
    return jax.sharding.use_abstract_mesh(mesh)


def compiled_rows(topology: Topology) -> list[dict]:
    """One row per activation, direction and split; runs in a process that has the compiler."""
    device, rows = describe_devices(topology)[0], []
    with described_chip(topology, device):
        for activation in ACTIVATIONS:
            for direction in DIRECTIONS:
                layer = layer_function(layer_config(activation), direction)
                _, compiled, launches = compiled_for(device, *layer)
                ideal = ideal_bytes(activation, direction)
                hlo = compiled.as_text()
                for split, sizes_E in group_sizes().items():
                    moved = moved_bytes(hlo, launches, sizes_E)
                    row = {
                        "target": str(topology),
                        "activation": activation,
                        "pass": direction,
                        "rows_by_expert": split,
                        **{name: getattr(moved, name) for name in COUNTED},
                        "ideal_bytes": ideal,
                        "bytes_vs_ideal": moved.num_bytes / ideal,
                    }
                    rows.append(row)
    return rows


def compiled_for(device, function: Callable, arguments: tuple) -> tuple:
    """A function traced and compiled for a device, and the Pallas kernels that it launches."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    arguments = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), arguments
    )
    with recorded_launches() as launches:
        traced = jax.jit(function).trace(*arguments)
        return traced, traced.lower().compile(), launches


def run(note=print) -> Report:
    """Compiles for every target whose compiler is installed; says why not for the others."""
    rows = []
    for target in TARGETS:
        note(f"compiling a sparse layer for {target}")
        rows += rows_of_child(__name__, target)
    return Report("bench compiled", rows, checks(rows))


def rows_of_child(module: str, target: str, *words: str) -> list[dict]:
    """The rows that a module prints with the target's compiler, or a row that says why not."""
    try:
        return json_of_child([target, *words], Topology.parse(target), module)
    except FileNotFoundError as error:
        return [{"target": target, "not_run": str(error)}]


def checks(rows: list[dict]) -> list[Check]:
    """The worst forward pass against its ideal; none where nothing was compiled."""
    found = [row["bytes_vs_ideal"] for row in rows if row.get("pass") == "forward"]
    return [Check("layer_bytes_vs_ideal", max(found), BOUND)] if found else []


if __name__ == "__main__":
    print(json.dumps(compiled_rows(Topology.parse(sys.argv[1]))))
