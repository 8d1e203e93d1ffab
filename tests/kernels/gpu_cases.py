# SPDX-License-Identifier: Apache-2.0
"""Inputs of the GPU kernels' tests, their answer by NumPy in float64, and the comparison."""

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

# Rows of 5 experts: empty ones first and in the middle, single rows, sizes of no tile.
GROUPS = {
    "ragged": (0, 3, 0, 17, 1),
    "one_has_all": (0, 0, 24, 0, 0),
    "none": (0, 0, 0, 0, 0),
    "single_rows": (1, 1, 1, 1, 1),
    # More rows than there are, which only traced sizes can say: cut at the last row.
    "too_many": (9, 0, 11, 7, 5),
    "whole_tiles": (16, 0, 16, 32, 16),
    "halves_of_tiles": (150, 0, 40, 3, 65),
}
# What a float32 sum, rounded once to this dtype, may be off by, relative to the largest.
TOLERANCE = {"bfloat16": 4e-3, "float16": 5e-4, "float32": 1e-5}


def rows(sizes, columns: int, dtype, *, seed: int = 0):
    """Sorted rows, 26 where that is enough, and at least 5 of no expert that hold NaN."""
    used = sum(sizes)
    number = 26 if used < 33 else used + 5
    values = np.random.default_rng(seed).standard_normal((number, columns))
    values[used:] = np.nan
    return jnp.asarray(values, dtype)


def matrices(shape, dtype, seed: int = 1):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def integers(shape, bits: int, seed: int = 2):
    """Any value of the width, the outermost among them."""
    most = 2 ** (bits - 1)
    values = np.random.default_rng(seed).integers(-most, most, shape)
    values.flat[:2] = (-most, most - 1)
    return values, jnp.asarray(values, jnp.int8).astype(jnp.int8 if bits == 8 else jnp.int4)


def in_float64(array) -> np.ndarray:
    return np.asarray(jnp.asarray(array).astype(jnp.float32), np.float64)


def assert_agrees(got, want: np.ndarray, dtype):
    got = in_float64(got)
    bound = TOLERANCE[jnp.dtype(dtype).name] * max(1.0, np.abs(want).max())
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= bound


def interpreted(run, *operands):
    """The result of an interpreted kernel, which had no race; on the CPU if JAX has it.

    It runs inside `jax.shard_map` on one device, where the types of arrays name a mesh axis.
    """
    try:
        device = jax.devices("cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS names the GPU alone.
        device = jax.devices()[0]
    mesh = jax.sharding.Mesh([device], ("data",))
    spec = jax.sharding.PartitionSpec("data")
    mapped = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)
    result = jax.block_until_ready(jax.jit(mapped)(*operands))
    assert not gpu_callbacks.get_races().races_found
    return result
