# SPDX-License-Identifier: Apache-2.0
"""Bytes that experts' gradients and update move, in the program that takes a step.

`adamw_bytes_vs_ideal`, `adafactor_bytes_vs_ideal`: the norm of all gradients, the optimizer and
the sum, as `training.step.take_step` has them, are compiled for a bank of experts, on this
machine and, where their compilers are installed, for a v5e and an H200. The value is the bytes
between memory and kernels (`compiled/moved_bytes.py`) plus one write of the gradients, over one
write and one read of these and one read and one write of weights and optimizer state.

Adafactor reads a gradient four times and weights twice: the norm, means over rows and over
columns, what is clipped, the update; root mean squares of weights, the update. With its write
and that of the weights these are nine passes where four are ideal, 2.25; a TPU's compiler joins
three of them. AdamW has nine where eight are ideal; a CPU updates each moment by itself, 12.
"""

import sys
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from switchx import tree
from switchx.compiled.moved_bytes import moved_bytes
from switchx.gin_config.building import job_from_gin
from switchx.optim.adafactor import Adafactor
from switchx.optim.adamw import AdamW
from switchx.optim.updates import global_norm
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.topology import Topology
from switchx.training.losses import TokenSums
from switchx.training.step import StepConfig, init_state, take_step
from tests.promises.compiled_steps import TOPOLOGY, on_described, print_rows

CARD = Topology.parse("h200")
OPTIMIZERS = {"adamw": AdamW(), "adafactor": Adafactor()}
# 16 experts of D 512 and F 2,048: 67 MB a matrix, more than what stays in a cache.
SHAPES = {"w_in_EDF": (16, 512, 2048), "w_out_EFD": (16, 2048, 512)}


def moved(name: str, device) -> float:
    """Bytes that a step moves over the ideal ones."""
    config = job_from_gin(["runs/pretrain_tiny.gin"]).model
    optimizer = OPTIMIZERS[name].build(lambda count: jnp.float32(0.01))

    def step(state, grads):
        sums = TokenSums(*[jnp.float32(1.0)] * 4)
        state, metrics, _ = take_step(
            config, StepConfig(), optimizer, state, grads, global_norm(grads), jnp.float32(1.0),
            sums, None,
        )  # fmt: skip
        return state, metrics.grad_norm

    weights = {key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in SHAPES.items()}
    state = jax.eval_shape(lambda params: init_state(config, optimizer, 0, params), weights)
    mesh = MeshSpec().build([device])
    whole = NamedSharding(mesh, PartitionSpec())
    with jax.set_mesh(mesh):
        jitted = jax.jit(step, donate_argnums=0, in_shardings=whole, out_shardings=whole)
        hlo = jitted.lower(state, weights).compile().as_text()
    gradients = tree.num_bytes(weights)
    ideal = 2 * (gradients + tree.num_bytes(state))
    return round((gradients + moved_bytes(hlo).num_bytes) / ideal, 4)


def all_optimizers(devices: Sequence) -> Iterator[tuple]:
    """A row for each optimizer."""
    for name in OPTIMIZERS:
        kind = devices[0].device_kind
        yield f"{name}_bytes_vs_ideal", f"16 experts, {kind}", moved(name, devices[0])


def everywhere() -> Iterator[tuple]:
    """Rows for this machine, a v5e and an H200."""
    yield from all_optimizers(jax.devices())
    for topology in (TOPOLOGY, CARD):
        yield from on_described(topology, "tests.promises.optimizer_bytes", str(topology))


if __name__ == "__main__":
    print_rows(all_optimizers, Topology.parse(sys.argv[1]))
