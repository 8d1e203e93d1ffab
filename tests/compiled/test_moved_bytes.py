# SPDX-License-Identifier: Apache-2.0
"""Kernels and bytes of compiled programs: by hand, and of Pallas' grids what is executed.

Dims: R rows, D inputs, F outputs, E experts
"""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import launches
from pallas_kernels.grouped_matmul import tpu
from pallas_kernels.launches import Cache, recorded_launches
from pallas_kernels.tiling.tpu import Tiling
from switchx.bench.compiled_step import product_bytes
from switchx.bench.peers.pallas_grids import pallas_launches
from switchx.compiled.jaxprs import sum_of_trace
from switchx.compiled.moved_bytes import Moved, Rates, moved_bytes
from tests.cases import slow

# As the TPU compiler writes it: a gather of 8 of 64 rows, a copy into vector memory (S(1)), a
# kernel that reads it there, and a loop of 3 additions.
HLO = """\
HloModule m

%gathered (p0: bf16[64,256], p1: s32[8]) -> bf16[8,256] {
  %p0 = bf16[64,256]{1,0} parameter(0)
  %p1 = s32[8]{0} parameter(1)
  ROOT %g = bf16[8,256]{1,0} gather(%p0, %p1), offset_dims={1}
}

%body (t: (s32[], f32[32])) -> (s32[], f32[32]) {
  %t = (s32[], f32[32]) parameter(0)
  %v = f32[32]{0} get-tuple-element(%t), index=1
  %w = f32[32]{0} add(%v, %v)
  ROOT %u = (s32[], f32[32]) tuple(%v, %w)
}

ENTRY %main (a: bf16[64,256], b: s32[8], c: bf16[4,256,128]) -> bf16[8,128] {
  %a = bf16[64,256]{1,0:T(8,128)(2,1)} parameter(0)
  %b = s32[8]{0} parameter(1)
  %c = bf16[4,256,128]{2,1,0} parameter(2)
  %n = s32[4]{0} constant({1,2,3,2})
  %copy-start = (s32[8]{0:T(256)S(1)}, s32[8]{0:T(256)}, u32[]{:S(2)}) copy-start(%b)
  %copy-done = s32[8]{0:T(256)S(1)} copy-done(%copy-start)
  %x = bf16[8,256]{1,0:T(8,128)(2,1)S(1)} fusion(%a, %copy-done), kind=kLoop, calls=%gathered
  %y = bf16[8,128]{1,0} custom-call(%n, %x, %c), custom_call_target="tpu_custom_call"
  %loop = (s32[], f32[32]) while(%n), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  ROOT %r = bf16[8,128]{1,0} bitcast(%y)
}
"""
PALLAS = launches.Launch(
    "multiply_rows",
    tuple(
        jax.ShapeDtypeStruct(*each)
        for each in (((4,), jnp.int32), ((8, 256), jnp.bfloat16), ((4, 256, 128), jnp.bfloat16))
    ),
    (jax.ShapeDtypeStruct((8, 128), jnp.bfloat16),),
    lambda sizes: ([16, 4096, int(sizes.sum())], [2048]),
)


def test_by_hand():
    moved = moved_bytes(HLO, [PALLAS], [1, 2, 3, 2])
    pallas = 16 + 8 + 2048  # x is in vector memory
    # The indices into vector memory, 8 gathered rows that stay there, three additions.
    assert moved == Moved(3 + 3, 1, 32 + 8 * 256 * 2 + pallas + 3 * 2 * 128, pallas)


def test_an_argument_that_is_prefetched_for_the_next_run_is_copied_once():
    again = HLO.replace(
        "  %y = ",
        "  %copy-start.1 = (s32[8]{0:T(256)S(1)}, s32[8]{0:T(256)}, u32[]{:S(2)}) "
        "copy-start(%b)\n"
        "  %copy-done.1 = s32[8]{0:T(256)S(1)} copy-done(%copy-start.1)\n  %y = ",
    )
    rows = [PALLAS], [1, 2, 3, 2]
    assert moved_bytes(again, *rows) == moved_bytes(HLO, *rows)
    read = again.replace("fusion(%a, %copy-done)", "fusion(%a, %copy-done.1)")
    read = read.replace("bitcast(%y)", "fusion(%y, %copy-done), kind=kLoop, calls=%gathered")
    assert moved_bytes(read, *rows).kernels == moved_bytes(HLO, *rows).kernels + 2


UPDATES = """\
HloModule m

%updated (p0: bf16[6,8,128], p1: bf16[8,128], p2: s32[]) -> (bf16[6,8,128], bf16[8,128]) {
  %p0 = bf16[6,8,128]{2,1,0} parameter(0)
  %p1 = bf16[8,128]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %part = bf16[1,8,128]{2,1,0} bitcast(%p1)
  %d = bf16[6,8,128]{2,1,0} dynamic-update-slice(%p0, %part, %p2)
  ROOT %t = (bf16[6,8,128]{2,1,0}, bf16[8,128]{1,0}) tuple(%d, %p1)
}

ENTRY %main (a: bf16[6,8,128], b: bf16[8,128], i: s32[]) -> bf16[6,8,128] {
  %a = bf16[6,8,128]{2,1,0} parameter(0)
  %b = bf16[8,128]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %x = (bf16[6,8,128]{2,1,0}, bf16[8,128]{1,0}) fusion(%a, %b, %i), kind=kLoop, calls=%updated
  %y = bf16[6,8,128]{2,1,0} get-tuple-element(%x), index=0
  %z = bf16[1,8,128]{2,1,0} bitcast(%b)
  ROOT %u = bf16[6,8,128]{2,1,0} dynamic-update-slice(%y, %z, %i)
}
"""


def test_of_an_array_that_is_updated_in_place_a_part_is_written():
    part = 8 * 128 * 2
    # The fusion reads a part and an index and writes it twice; the second reads and writes it.
    assert moved_bytes(UPDATES) == Moved(2, 0, (part + 4 + 2 * part) + 2 * part)


def test_a_kernel_that_was_not_recorded_is_an_error():
    with pytest.raises(ValueError, match="was not recorded"):
        moved_bytes(HLO, [], [])


def test_xlas_own_softmax_is_counted():
    """Scores [2, 8, 8] and values [2, 8, 4], float32; the product has 2 m n k operations."""
    scores, values = "f32[2,8,8]{2,1,0}", "f32[2,8,4]{2,1,0}"
    program = (
        f"HloModule m\n\nENTRY %main (a: f32[2,8,8], b: f32[2,8,4]) -> f32[2,8,4] {{\n"
        f"  %a = {scores} parameter(0)\n  %b = {values} parameter(1)\n"
        f"  ROOT %online-softmax.1 = {values} custom-call(%a, %b), "
        'custom_call_target="tpu_custom_call"\n}\n'
    )
    moved = moved_bytes(program)
    assert moved.pallas_bytes == 4 * (2 * 8 * 8 + 2 * 2 * 8 * 4)
    assert moved.pallas_flops == 2 * 2 * 8 * 8 * 4


def test_a_cache_forgets_what_was_used_longest_ago():
    cache = Cache(100)
    assert [cache.read(*each) for each in (("a", 60), ("b", 40), ("a", 60))] == [60, 40, 0]
    cache.write("c", 30)
    assert [cache.read("a", 60), cache.read("b", 40)] == [0, 40]


@pytest.mark.parametrize("direction", [slow("forward"), "weight gradient"])
def test_counted_bytes_are_those_that_an_interpreted_kernel_copies(direction, monkeypatch):
    executed = {}
    read = interpret_pallas_call.DMA.execute_read

    def execute_read(dma):
        read(dma)
        executed[dma.id] = dma.data_size

    monkeypatch.setattr(interpret_pallas_call.DMA, "execute_read", execute_read)
    sizes_E = np.array([10, 0, 20, 2], np.int32)
    x_RD, w_EDF = jnp.ones((32, 256)), jnp.ones((4, 256, 256))
    options = {"interpret": pltpu.InterpretParams(), "tiling": Tiling(16, 128, 128)}

    def run(x_RD, w_EDF, sizes_E):
        if direction == "forward":
            options["has_residual"] = True
            return tpu.forward(x_RD, w_EDF, sizes_E, activation="gelu", **options)
        return tpu.weight_gradient(x_RD, x_RD, sizes_E, out_dtype=jnp.float32, **options)

    with recorded_launches() as recorded:
        jax.block_until_ready(jax.jit(run)(x_RD, w_EDF, sizes_E))
    pltpu.reset_tpu_interpret_mode_state()
    [launch] = recorded
    counted_read, counted_written = launch.copied(sizes_E)
    # The first five operands are the schedule, which the interpreter does not copy.
    assert sum(counted_read[5:]) + sum(counted_written) == sum(executed.values()) > 0


# Kernels that others wrote.

SIZES_E = np.array([10, 0, 20, 34], np.int32)


def megablox(x_RD, w_EDF, sizes_E):
    """JAX's own kernel, of which MaxText's is a copy: tiles of 16 rows and 128 x 128."""
    gmm = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")
    return gmm.gmm(x_RD, w_EDF, sizes_E, jnp.float32, (16, 128, 128))


def traced_megablox(function=megablox):
    shapes = ((64, 256), jnp.float32), ((4, 256, 256), jnp.float32), ((4,), jnp.int32)
    return jax.jit(function).trace(*(jax.ShapeDtypeStruct(*each) for each in shapes)).jaxpr


@pytest.mark.slow  # traces megablox
def test_a_kernel_of_others_is_counted_by_its_grid_and_schedule():
    [launch] = pallas_launches(traced_megablox(), [None, None, SIZES_E])
    # Rows 0 to 10, 10 to 30 and 30 to 64 touch 1, 2 and 3 of the four tiles of 16 rows.
    tiles, blocks_F, blocks_D = 6, 2, 2
    assert launch.flops(SIZES_E) == tiles * 2 * 16 * 256 * 256
    (*_, of_x, of_w), [of_y] = launch.copied(SIZES_E)
    steps = tiles * blocks_F * blocks_D
    assert (of_x, of_w) == (steps * 16 * 128 * 4, steps * 128 * 128 * 4)
    assert of_y == 4 * blocks_F * 16 * 128 * 4  # a tile stays until the last of its experts


def test_a_schedule_that_is_not_known_is_an_error():
    with pytest.raises(ValueError, match="depends on arguments that are not known"):
        pallas_launches(traced_megablox(), [None, None, None])


def test_a_kernel_in_a_loop_is_an_error():
    def repeated(x_RD, w_EDF, sizes_E):
        return jax.lax.scan(lambda x, _: (megablox(x, w_EDF, sizes_E), None), x_RD, None, 2)[0]

    with pytest.raises(ValueError, match="a Pallas kernel stands in scan"):
        pallas_launches(traced_megablox(repeated), [None, None, SIZES_E])


# As the TPU compiler writes it: a matrix that a nested fusion hands on as it is, cycles of a
# product, a slice that is copied beside other work, and a sort, which has no cycles.
CYCLES = """\
HloModule m

%handed_on (p: bf16[64,256]) -> bf16[64,256] {
  %p = bf16[64,256]{1,0} parameter(0)
  ROOT %b = bf16[64,256]{1,0} bitcast(%p)
}

%product (p0: bf16[8,64], p1: bf16[64,256]) -> bf16[8,256] {
  %p0 = bf16[8,64]{1,0} parameter(0)
  %p1 = bf16[64,256]{1,0} parameter(1)
  %same = bf16[64,256]{1,0} fusion(%p1), kind=kLoop, calls=%handed_on
  ROOT %c = bf16[8,256]{1,0} convolution(%p0, %same), dim_labels=bf_io->bf
}

ENTRY %main (a: bf16[8,64], w: bf16[64,256]) -> bf16[8,256] {
  %a = bf16[8,64]{1,0} parameter(0)
  %w = bf16[64,256]{1,0} parameter(1)
  %y = bf16[8,256]{1,0} fusion(%a, %w), kind=kOutput, calls=%product, \
backend_config={"window_config":{"estimated_cycles":"3000"}}
  %slice-start = (bf16[64,256]{1,0}, bf16[16,256]{1,0:S(1)}, s32[]{:S(2)}) slice-start(%w)
  %slice-done = bf16[16,256]{1,0:S(1)} slice-done(%slice-start)
  %whole = bf16[16,256]{1,0:S(1)} custom-call(%slice-done), custom_call_target="ConcatBitcast"
  ROOT %sorted = bf16[8,256]{1,0} sort(%y), dimensions={1}
}
"""


def test_bytes_and_seconds_by_hand():
    moved = moved_bytes(CYCLES, rates=Rates(1e12, 1e9, 1e6))
    of_product, of_slice, of_sort = (
        2 * (8 * 64 + 64 * 256 + 8 * 256),
        2 * 16 * 256,
        2 * 2 * 8 * 256,
    )
    assert (moved.kernels, moved.num_bytes) == (3, of_product + of_slice + of_sort)
    assert moved.compiler_s == pytest.approx(3000 / 1e6)
    assert moved.other_s == pytest.approx((of_slice + of_sort) / 1e9)
    assert moved.estimated_s == moved.compiler_s + moved.other_s
    assert moved.roofline_s == pytest.approx((of_product + of_slice + of_sort) / 1e9)
    slow = moved_bytes(CYCLES, rates=Rates(1e3, 1e9, 1e6))
    flops = 2 * 8 * 64 * 256
    assert slow.roofline_s == pytest.approx(flops / 1e3 + (of_slice + of_sort) / 1e9)


def test_bytes_of_products_count_a_loop_by_its_length():
    def repeated(x_RD, w_NDD):
        return jax.lax.scan(lambda x, w: (x @ w, None), x_RD, w_NDD)[0]

    shapes = (jax.ShapeDtypeStruct(each, jnp.bfloat16) for each in ((8, 64), (3, 64, 64)))
    jaxpr = jax.jit(repeated).trace(*shapes).jaxpr
    assert sum_of_trace(jaxpr, product_bytes) == 3 * 2 * (2 * 8 * 64 + 64 * 64)
