# SPDX-License-Identifier: Apache-2.0
"""The interpreter finds the race of a Mosaic GPU kernel; swizzles follow the row."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import Mosaic, erf, tiled


def doubled(x):
    """Twice x through shared memory: warpgroup 0 writes, 1 reads before it waits."""

    def body(x_gmem, y_gmem, smem, done):
        warpgroup = lax.axis_index("wg")

        def write():
            smem[...] = x_gmem[...] * 2
            plgpu.barrier_arrive(done)

        def read():
            y_gmem[...] = smem[...]
            plgpu.barrier_wait(done)

        lax.cond(warpgroup == 0, write, read)

    return Mosaic(is_interpreted=True).kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=dict(smem=plgpu.SMEM(x.shape, x.dtype), done=plgpu.Barrier()),
        grid=1,
        num_threads=2,
        name="doubled",
    )(x)


def test_race_is_found():
    x = jnp.arange(128, dtype=jnp.float32)
    try:
        jax.block_until_ready(doubled(x))
    except Exception as error:  # JAX 0.12 raises, earlier ones remember.
        assert "RACE" in str(error)
        gpu_callbacks.reset_gpu_interpret_mode_state()
    else:
        assert gpu_callbacks.get_races().races_found


def test_swizzle_follows_the_row():
    def swizzle(columns, dtype):
        tile, swizzle = tiled(columns, dtype)
        return tile.tiling, swizzle.swizzle

    assert swizzle(64, jnp.bfloat16) == ((8, 64), 128)
    assert swizzle(128, jnp.bfloat16) == ((8, 64), 128)
    assert swizzle(256, jnp.int4) == ((8, 256), 128)
    assert swizzle(64, jnp.int4) == ((8, 64), 32)
    assert swizzle(16, jnp.float32) == ((8, 16), 64)


def test_the_error_function():
    x = np.linspace(-6, 6, 10_001, dtype=np.float32)
    want = np.vectorize(math.erf)(x.astype(np.float64))
    np.testing.assert_allclose(erf(x), want, rtol=5e-7, atol=5e-7)
    ends = erf(jnp.asarray([np.inf, -np.inf, np.nan]))
    np.testing.assert_allclose(ends, [1, -1, np.nan], atol=5e-7)
