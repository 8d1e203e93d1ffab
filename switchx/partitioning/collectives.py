# SPDX-License-Identifier: Apache-2.0
"""All-to-all inside of `jax.shard_map`: flat, hierarchical, and of any number of rows.

Shen et al. 2022 (SE-MoE, arXiv:2205.10034), section 4.2, Figure 8.
Dims: P devices of the exchange, in the order of the mesh axes; R rows, D model
"""

import functools
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from switchx.partitioning.mesh import platform_of
from switchx.partitioning.rules import MeshAxes

# Where `choose_dispatcher` and the planner choose a ragged all-to-all by themselves. GPUs will
# be added when two cards have shown equal gradients, by the largest difference per expert.
RAGGED_PLATFORMS = ("cpu", "tpu")
RAGGED_ON_GPUS = (
    "a ragged all-to-all on GPUs: the one-shot kernel of JAX 0.11 and later is reported to "
    "corrupt gradients on 8 devices (marin-community/marin issue 8077) and to reach 2% of "
    "NVLink (openxla/xla issue 33386), and nothing here has compared it on two cards; use "
    "SwitchConfig.dispatcher='all_to_all' with a routing group or more to each device and "
    "num_replicas=0, or dispatcher='gather'"
)


def all_to_all(x_P, axes: MeshAxes):
    """Exchanges `[P, ...]` by destination for `[P, ...]` by source, over `axes` at once."""
    return jax.lax.all_to_all(x_P, axes, split_axis=0, concat_axis=0, tiled=True)


def hierarchical_all_to_all(x_P, axes: MeshAxes):
    """Exchanges the same in two steps: inside of each node, then between equal ranks of nodes.

    The first step brings everything for rank r of any node to rank r of this one. So the second
    sends P / num_nodes times fewer and larger messages, and none between different ranks.

    Args:
        axes: (between nodes, inside of a node).
    """
    outer, inner = axes
    x_PP = x_P.reshape(jax.lax.axis_size(outer), jax.lax.axis_size(inner), *x_P.shape[1:])
    x_PP = jax.lax.all_to_all(x_PP, inner, split_axis=1, concat_axis=1, tiled=True)
    x_PP = jax.lax.all_to_all(x_PP, outer, split_axis=0, concat_axis=0, tiled=True)
    return x_PP.reshape(x_P.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def ragged_all_to_all(x_RD, sizes_PP, axes: MeshAxes, rows: int):
    """Sends consecutive rows to each device and receives those for this one.

    TPU and GPU send only these rows (`jax.lax.ragged_all_to_all`), the latter with a warning.
    CPU has no such collective: it gathers all rows and picks the right ones, for the same
    numbers at P times the bytes.

    Args:
        x_RD: rows for device 0, then for device 1, ...; rows past those are not sent.
        sizes_PP: rows from device (first index) to device (second), the same on all devices.
        rows: rows of the result, enough for all that a device can receive.

    Returns:
        Rows from device 0, then from device 1, ...; zeros past those.
    """
    if platform_of(jax.sharding.get_abstract_mesh()) not in RAGGED_PLATFORMS:
        _warn_of_gpus()
    return jax.lax.platform_dependent(
        x_RD,
        sizes_PP,
        cpu=lambda x_RD, sizes_PP: _ragged_by_gather(x_RD, sizes_PP, axes, rows),
        default=lambda x_RD, sizes_PP: _ragged(x_RD, sizes_PP, axes, rows),
    )


@functools.cache  # once per process
def _warn_of_gpus() -> None:
    warnings.warn(RAGGED_ON_GPUS, stacklevel=3)


def _ragged_forward(x_RD, sizes_PP, axes, rows):
    return ragged_all_to_all(x_RD, sizes_PP, axes, rows), (sizes_PP, x_RD)


def _ragged_backward(axes, rows, residuals, dy_RD):
    sizes_PP, x_RD = residuals
    # The rows are sent back: sources and destinations are exchanged.
    dx_RD = ragged_all_to_all(dy_RD, sizes_PP.T, axes, x_RD.shape[0])
    return dx_RD, np.zeros(sizes_PP.shape, jax.dtypes.float0)


ragged_all_to_all.defvjp(_ragged_forward, _ragged_backward)


def _ragged(x_RD, sizes_PP, axes, rows):
    here = jax.lax.axis_index(axes)
    # 0 that the compiler does not know. Do not simplify: it moves constant zeros out of a loop
    # over layers and, as rows are received in their place, copies them in each iteration.
    zero = jnp.minimum(sizes_PP[0, 0], 0).astype(x_RD.dtype)
    x_RD, zeros_RD = vary_alike(x_RD, jnp.full((rows, x_RD.shape[1]), zero))
    return jax.lax.ragged_all_to_all(
        x_RD,
        zeros_RD,
        _before(sizes_PP, 1)[here],
        sizes_PP[here],
        # Where on each destination the rows of this device begin.
        _before(sizes_PP, 0)[here],
        sizes_PP[:, here],
        axis_name=axes,
    )


def _before(sizes, axis: int):
    """Sums of the sizes before each one."""
    return jnp.cumsum(sizes, axis=axis) - sizes


def _ragged_by_gather(x_RD, sizes_PP, axes, rows):
    here = jax.lax.axis_index(axes)
    x_PRD = jax.lax.all_gather(x_RD, axes)
    end_P = jnp.cumsum(sizes_PP[:, here])
    row_R = jnp.arange(rows, dtype=end_P.dtype)
    source_R = jnp.sum(row_R[:, None] >= end_P[None], axis=1)
    is_received_R = source_R < end_P.shape[0]
    source_R = jnp.minimum(source_R, end_P.shape[0] - 1)
    place_R = row_R - _before(sizes_PP[:, here], 0)[source_R]
    place_R = place_R + _before(sizes_PP, 1)[source_R, here]
    return jnp.where(is_received_R[:, None], x_PRD[source_R, place_R], 0)


def vary(array, axes: MeshAxes):
    """The array typed as different along `axes`: backward, its gradient is summed."""
    varying = jax.typeof(array).manual_axis_type.varying
    missing = tuple(axis for axis in axes if axis not in varying)
    return jax.lax.pcast(array, missing, to="varying") if missing else array


def vary_alike(*arrays) -> list:
    """The arrays, all typed as different along the axes that any of them is."""
    axes = [jax.typeof(array).manual_axis_type.varying for array in arrays]
    return [vary(array, tuple(set().union(*axes))) for array in arrays]


def connect_processes(mesh: Mesh) -> None:
    """Makes the processes that exchange over some of the mesh's axes connect, all at once.

    Collectives on CPUs are Gloo's. Its processes have 30 s to reach the first exchange of their
    group, and 30 minutes to reach later ones (`xla_cpu_collective_timeout_seconds`); they reach
    the first step when they have compiled it. Other platforms wait as long as it takes.
    """
    if jax.process_count() == 1 or platform_of(mesh) != "cpu":
        return
    axes = [axis for axis, size in mesh.shape.items() if size > 1]
    groups = [each for n in range(len(axes)) for each in itertools.combinations(axes, n + 1)]
    one_each = PartitionSpec(mesh.axis_names)
    zeros = jax.make_array_from_callback(
        (mesh.size,), NamedSharding(mesh, one_each), lambda _: np.zeros(1, np.float32)
    )
    add = jax.shard_map(
        lambda x: sum(jax.lax.psum(x, group) for group in groups),
        mesh=mesh,
        in_specs=one_each,
        out_specs=one_each,
        check_vma=False,
    )
    jax.block_until_ready(jax.jit(add)(zeros))
