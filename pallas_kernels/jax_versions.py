# SPDX-License-Identifier: Apache-2.0
"""What differs between JAX 0.10.2, 0.11 and 0.12 in Pallas, in one place.

0.10.2 has the interpreter of Mosaic GPU on private paths, lowers by lanes unless told
otherwise, and loads with an index that 0.12 no longer takes.
"""

import contextlib

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shard_map_types import vary_like

try:  # JAX 0.11 and later
    from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams, force_gpu_interpret_mode
except ImportError:
    from jax._src.pallas.mosaic_gpu.interpret.params import (
        InterpretGPUParams,
        force_gpu_interpret_mode,
    )

# By warpgroups, 0.10.2 refuses shared memory that is swizzled and not tiled.
_SEMANTICS = (
    plgpu.LoweringSemantics.Warpgroup
    if jax.__version_info__ >= (0, 11, 0)
    else plgpu.LoweringSemantics.Lane
)


def mosaic_gpu_kernel(body, *, out_type, scratch_types, grid, num_threads, interpret, name):
    """A Mosaic GPU kernel: `grid` blocks, axis `sm`, of `num_threads` warpgroups, axis `wg`.

    Interpreted, it runs on the CPU and looks for races between warpgroups, copies included.
    """
    kernel = plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch_types,
        grid=(grid,),
        grid_names=("sm",),
        num_threads=num_threads,
        thread_name="wg",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(lowering_semantics=_SEMANTICS),
    )

    def run(*operands):
        interpreter = force_gpu_interpret_mode(InterpretGPUParams(detect_races=True))
        with interpreter if interpret else contextlib.nullcontext():
            # `plgpu.kernel` types every result as the same on all devices of a `shard_map`.
            return vary_like(kernel(*operands), *operands)

    return run


def load_as(ref, layout, *, optimized: bool = True) -> jax.Array:
    """All of a reference in registers of a layout.

    Args:
        optimized: refuse a load that the layout makes slow; without it, vectors from global
            memory can be loaded too.
    """
    if jax.__version_info__ < (0, 11, 0):
        return plgpu.load(ref, (), layout=layout, optimized=optimized)
    return plgpu.load(ref, layout=layout, optimized=optimized)
