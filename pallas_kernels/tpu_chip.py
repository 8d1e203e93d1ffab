# SPDX-License-Identifier: Apache-2.0
"""The TPU that a kernel is traced for, and a stand-in for one that is not there.

The device is that of `jax.sharding.use_abstract_mesh` if one is given (compiling ahead of
time), the default device otherwise. Interpret mode runs a kernel for a TPU that is only
described, on arrays padded as they lie in a TPU's memory.
"""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

MIB = 1 << 20
# Rows and columns of a tile of memory.
TILE = (16, 128)


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device.

    Attributes:
        generation: 4 to 7.
        vmem_bytes: bytes of a core's vector memory.
        bytes_per_s: bandwidth between a core and HBM, as the vendor states it.
        flops_per_s: peak FLOPs per second of a core in bfloat16, as the vendor states them.
        cores: number of tensor cores that one device's kernel is spread over, 2 on a v4 or v5p
            that is used as one device ("megacore").
    """

    generation: int
    vmem_bytes: int
    bytes_per_s: float
    flops_per_s: float
    cores: int = 1


# Tilings for this chip, a core of a v4, fit every TPU. It stands in where there is no TPU: in
# interpret mode, and if a program is lowered for a TPU that is not named.
SMALLEST = Chip(generation=4, vmem_bytes=16 * MIB, bytes_per_s=6.14e11, flops_per_s=1.37e14)


def current_chip() -> Chip:
    try:
        info = pltpu.get_tpu_info()
    except ValueError:
        return SMALLEST
    return Chip(
        generation=info.generation,
        vmem_bytes=info.vmem_capacity_bytes,
        bytes_per_s=info.mem_bw_bytes_per_second,
        flops_per_s=info.bf16_ops_per_second,
        cores=info.num_cores,
    )


@contextlib.contextmanager
def described_tpu(kind: str = "TPU v5 lite", cores: int = 1):
    """A context in which kernels are traced for this TPU, on a machine that has none.

    Mosaic's pipeline asks the current device how memory is tiled, in interpret mode too. The
    axes of a mesh that is in use stay.

    Args:
        kind: the device's kind, as in `jax.devices()[0].device_kind`.
        cores: number of the device's tensor cores.
    """
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=cores, platform="tpu")
    mesh = jax.sharding.get_abstract_mesh()
    with jax.sharding.use_abstract_mesh(mesh.update(abstract_device=device)):
        yield


def is_tpu_kind(kind: str) -> bool:
    """Whether JAX knows a TPU of this `device_kind`."""
    try:
        with described_tpu(kind):
            pltpu.get_tpu_info()
    except ValueError:
        return False
    return True


def on_some_tpu(cores: int = 1):
    """A context in which a kernel can be traced: nothing to do if there is a TPU.

    Raises:
        ValueError: a mesh of several devices is in use and they are not TPUs. The interpreter's
            copies and waits would be split among them, and wait forever.
    """
    try:
        pltpu.get_tpu_info()
    except ValueError:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.size > 1:
            raise ValueError(
                f"the TPU kernels are traced on a mesh of {mesh.size} devices that are no "
                "TPUs; interpret them outside jax.set_mesh and jax.shard_map, or use "
                "implementation='reference'"
            ) from None
        return described_tpu("TPU v5" if cores > 1 else "TPU v5 lite", cores)
    return contextlib.nullcontext()


def interpret_mode(interpret):
    """`interpret` as `pl.pallas_call` wants it for a kernel with a pipeline.

    `True` alone would choose the interpreter that has no copies and no semaphores. An
    `InterpretParams` is passed on, so that a test can ask for race detection.
    """
    return pltpu.InterpretParams() if interpret is True else interpret


def padded_shape(shape: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of an array cut into blocks with whole tiles of memory in its last two axes.

    A block at an array's edge reads the rest of the tile, whatever is there. An axis of a
    single block has no such rest.
    """
    sizes = (
        size if part == size else -(-size // tile) * tile
        for size, part, tile in zip(shape[-2:], block, TILE, strict=True)
    )
    return (*shape[:-2], *sizes)


def padded_to_tiles(array, block: tuple[int, ...]):
    """The array as it lies in memory, cut into blocks of its last two axes, to be interpreted.

    Interpret mode stops at an array's edge (its `buffer_bounds="padded"` fails under `jax.jit`
    on JAX 0.10 and 0.11). So the rest of a tile is filled, with NaN or the least integer.
    """
    shape = padded_shape(array.shape, block)
    padding = [(0, padded - size) for padded, size in zip(shape, array.shape, strict=True)]
    is_float = jnp.issubdtype(array.dtype, jnp.floating)
    value = jnp.nan if is_float else jnp.iinfo(array.dtype).min
    return jnp.pad(array, padding, constant_values=value)
