# SPDX-License-Identifier: Apache-2.0
"""A card's limits: bytes per second of a copy, FLOPs per second, the start of a kernel.

Dims: R rows, E experts, N elements
"""

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.bench.timing import Contender, repeated, take_turns
from pallas_kernels.grouped_matmul.gpu_schedule import schedule
from pallas_kernels.mosaic_gpu import Mosaic


def copy_bytes_per_s(num_bytes: int = 2**30, repeats: int = 8, rounds: int = 5) -> float:
    """Bytes that a plain copy of the device reads and writes in a second.

    XLA copies a program's argument to its result by the driver's own copy.
    """
    x_N = jnp.zeros(num_bytes // 4, jnp.float32)
    copy = jax.jit(jnp.copy).lower(x_N).compile()
    return 2 * num_bytes / _seconds(lambda: copy(x_N), repeats, rounds)


def matrix_flops_per_s(size: int, repeats: int = 8, rounds: int = 5) -> float:
    """FLOPs per second of a bfloat16 product of matrices `[size, size]`; on GPUs, cuBLAS's."""
    keys = jax.random.split(jax.random.key(0))
    a, b = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in keys)
    product = jax.jit(jnp.matmul).lower(a, b).compile()
    return 2 * size**3 / _seconds(lambda: product(a, b), repeats, rounds)


def _seconds(call: Callable, repeats: int, rounds: int) -> float:
    """Median seconds of a call among `repeats` that are begun without waiting."""
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        results = [call() for _ in range(repeats)]
        jax.block_until_ready(results)
        del results
        times.append((time.perf_counter() - start) / repeats)
    return statistics.median(times[1:])  # the first one allocates


def kernel_floors(mosaic: Mosaic, rounds: int = 7) -> dict[str, float]:
    """Seconds taken by kernels that do next to nothing, one after another in a program.

    `empty kernel` stores a vector; `schedule kernel` computes the tiles of 128 rows and 32
    experts, and runs before those of our products that do not compute them inside.
    """

    def body(x_gmem, y_gmem):
        y_gmem[...] = mosaic.iota((128,))

    vector = jax.ShapeDtypeStruct((128,), jnp.int32)
    empty = mosaic.kernel(
        body, out_type=[vector], scratch_types={}, grid=1, num_threads=1, name="empty"
    )
    functions = {
        "empty kernel": lambda x, w, sizes_E: empty(x),
        "schedule kernel": lambda x, w, sizes_E: schedule(sizes_E, 128, 16, mosaic),
    }
    contenders = []
    for name, function in functions.items():
        zeros = jnp.zeros(128, jnp.int32), (jnp.zeros(1),)
        arguments = *zeros, jnp.full((1, 32), 4, jnp.int32)
        run, calls = repeated(function, 1, 1)
        compiled = jax.jit(run).lower(*arguments).compile()

        def step(compiled=compiled, arguments=arguments):
            return jax.block_until_ready(compiled(*arguments))

        contenders.append(Contender(name, step, calls=calls))
    take_turns(contenders, rounds)
    return {each.name: each.median_s for each in contenders}
