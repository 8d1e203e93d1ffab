# SPDX-License-Identifier: Apache-2.0
"""Copies from host memory in HLO texts, cut from what XLA's compilers wrote of a ring."""

import pytest

from pallas_kernels.aot import gpu_compiler
from switchx.compiled.host_copies import (
    copied_constants,
    host_copies,
    host_waits,
    noted_strides,
    share_overlapped,
)
from tests.processes import script_with_compiler

# The TPU compiler's: a loop of 4 turns over layers, and the optimizer's loop.
STACK = "f32[8,4,64]{2,1,0:T(8,128)S(5)}"
SLICE = "f32[1,4,64]{2,1,0:T(8,128)}"
HLO = f"""HloModule jit_step, is_scheduled=true

%products (p: f32[8,64]) -> f32[8,64] {{
  ROOT %convolution.1 = f32[8,64]{{1,0}} convolution(%p, %p), dim_labels=bf_io->bf
}}

%layers (state: (s32[], f32[8,4,64])) -> (s32[], f32[8,4,64]) {{
  %state = (s32[], {STACK}) parameter(0)
  %stack = {STACK} get-tuple-element(%state), index=1
  %n = s32[] get-tuple-element(%state), index=0
  %dynamic-slice-start.1 = (({STACK}, s32[], s32[]), {SLICE}, u32[]{{:S(2)}}) dynamic-slice-start(%stack, %n, %n)
  %x = f32[8,64]{{1,0}} broadcast(%n), dimensions={{}}
  %fusion.1 = f32[8,64]{{1,0}} fusion(%x), kind=kOutput, calls=%products
  %dynamic-slice-done.1 = {SLICE} dynamic-slice-done(%dynamic-slice-start.1)
  %dynamic-update-slice-start.1 = (({STACK}, {SLICE}, s32[]), {STACK}, u32[]{{:S(2)}}) dynamic-update-slice-start(%stack, %dynamic-slice-done.1, %n)
  %bitcast.1 = f32[512]{{0}} bitcast(%fusion.1)
  %dynamic-update-slice-done.1 = {STACK} dynamic-update-slice-done(%dynamic-update-slice-start.1)
  ROOT %tuple.1 = (s32[], {STACK}) tuple(%n, %dynamic-update-slice-done.1)
}}

%counted (state: (s32[], f32[8,4,64])) -> pred[] {{
  %state.1 = (s32[], {STACK}) parameter(0)
  %counter = s32[] get-tuple-element(%state.1), index=0
  %bound = s32[] constant(4)
  ROOT %less = pred[] compare(%counter, %bound), direction=LT
}}

%update (state: (s32[], f32[8,4,64])) -> (s32[], f32[8,4,64]) {{
  %state.2 = (s32[], {STACK}) parameter(0)
  %stack.2 = {STACK} get-tuple-element(%state.2), index=1
  %n.2 = s32[] get-tuple-element(%state.2), index=0
  %dynamic-slice-start.2 = (({STACK}, s32[], s32[]), {SLICE}, u32[]{{:S(2)}}) dynamic-slice-start(%stack.2, %n.2, %n.2)
  %dynamic-slice-done.2 = {SLICE} dynamic-slice-done(%dynamic-slice-start.2)
  ROOT %tuple.2 = (s32[], {STACK}) tuple(%n.2, %stack.2)
}}

%finite (state: (s32[], f32[8,4,64])) -> pred[] {{
  %state.3 = (s32[], {STACK}) parameter(0)
  ROOT %is_finite = pred[] parameter(1)
}}

ENTRY %main (stack: f32[8,4,64]) -> f32[8,4,64] {{
  %stack.0 = {STACK} parameter(0)
  %zero = s32[] constant(0)
  %tuple.0 = (s32[], {STACK}) tuple(%zero, %stack.0)
  %while.1 = (s32[], {STACK}) while(%tuple.0), condition=%counted, body=%layers
  %while.2 = (s32[], {STACK}) while(%while.1), condition=%finite, body=%update
  ROOT %result = {STACK} get-tuple-element(%while.2), index=1
}}
"""  # noqa: E501


def test_copies_of_layers_are_overlapped_where_as_much_is_computed():
    fetched, written, updated = host_copies(HLO)
    num_bytes = 4 * 64 * 4
    assert (fetched.kind, fetched.num_bytes, fetched.count) == ("dynamic-slice", num_bytes, 4)
    assert fetched.is_of_layer and fetched.is_overlapped
    # The broadcast's result, the fusion's operand and its result.
    assert fetched.bytes_meanwhile == 3 * 8 * 64 * 4
    assert (written.kind, written.count) == ("dynamic-update-slice", 4)
    assert written.is_of_layer and not written.is_overlapped  # a bitcast takes no time
    # As often as there are layers: the data decides.
    assert (updated.count, updated.is_of_layer) == (8, False)
    assert share_overlapped([fetched, written, updated]) == 0.5
    with pytest.raises(ValueError, match="no copies from host memory"):
        share_overlapped([updated])


def test_fusions_of_a_slice_are_copies():
    """The compiler's for GPUs."""
    text = HLO.replace("ENTRY", f"""%sliced (p0: f32[8,4,64], p1: s32[]) -> f32[1,4,64] {{
  %p0 = {STACK} parameter(0)
  %p1 = s32[] parameter(1)
  ROOT %slice.9 = f32[1,4,64]{{2,1,0}} dynamic-slice(%p0, %p1, %p1)
}}

ENTRY""")  # fmt: skip
    text = text.replace("dynamic-slice-start(%stack, %n, %n)", "fusion-start(%stack, %n, %n)")
    text = text.replace(
        "fusion-start(%stack, %n, %n)", "fusion-start(%stack, %n), calls=%sliced"
    )
    text = text.replace(
        "dynamic-slice-done(%dynamic-slice-start.1)", "fusion-done(%dynamic-slice-start.1)"
    )
    assert text.count("fusion-start") == text.count("fusion-done") == 1
    assert host_copies(text) == host_copies(HLO)
    with pytest.raises(ValueError, match="copies nothing"):
        host_copies(text.replace("dynamic-slice(%p0", "add(%p0"))


def test_strides_that_a_compiler_notes_are_of_host_memory():
    note = (
        'backend_config={"dynamic_slice_config":{"byte_offset":"3670016","byte_stride":"-8"}}'
    )
    line = "  %slice.1 = f32[1,4]{1,0} dynamic-slice(f32[8,4]{1,0:S(5)} %stack, s32[] %n)"
    on_device, not_noted = (line.replace("slice.1", f"slice.{n}") for n in (2, 3))
    lines = f"{line}, {note}", f"{on_device}, {note}".replace("S(5)", "S(1)"), not_noted
    assert noted_strides("\n".join(("ENTRY %main () -> f32[1,4] {", *lines, "}"))) == [-8]


# The GPU compiler's: rows are received in zeros from outside of the loop.
STATE = "(s32[], f32[64,8], f32[64,8])"
LOOPS = f"""HloModule jit_decode, is_scheduled=true

%c (n: s32[]) -> pred[] {{
  ROOT %asked = pred[] parameter(0)
}}

%b (n: s32[]) -> s32[] {{
  ROOT %m.1 = s32[] parameter(0)
}}

%fused () -> f32[64,8] {{
  ROOT %zeros = f32[64,8] constant(0)
}}

%received (p: {STATE}) -> f32[64,8] {{
  %p = {STATE} parameter(0)
  %zeros.1 = f32[64,8] get-tuple-element(%p), index=1
  ROOT %copy.1 = f32[64,8] copy(%zeros.1)
}}

%step (state: {STATE}) -> {STATE} {{
  %state = {STATE} parameter(0)
  %n = s32[] get-tuple-element(%state), index=0
  %zeros.2 = f32[64,8] get-tuple-element(%state), index=1
  %x = f32[64,8] get-tuple-element(%state), index=2
  %copy.2 = f32[64,8] copy(%x)
  %copy.3 = s32[] copy(%n)
  %m = s32[] while(%n), condition=%c, body=%b, backend_config={{"known_trip_count":{{"n":"3"}}}}
  %tuple.2 = {STATE} tuple(%m, %zeros.2, %x)
  %y = f32[64,8] conditional(%m, %n, %tuple.2), true_computation=%b, false_computation=%received
  ROOT %tuple.3 = {STATE} tuple(%n, %zeros.2, %y)
}}

ENTRY %main (x: f32[64,8]) -> {STATE} {{
  %x.1 = f32[64,8] parameter(0)
  %zero = s32[] constant(0)
  %zeros.3 = f32[64,8] fusion(), kind=kLoop, calls=%fused
  %copy.4 = f32[64,8] copy(%zeros.3)
  %tuple.4 = {STATE} tuple(%zero, %zeros.3, %x.1)
  ROOT %while.2 = {STATE} while(%tuple.4), condition=%c, body=%step
}}
"""
THUNKS = """\
001: kWhile        [source | sink]
condition:
    002: kCustomKernel [source | sink] less
  body:
    003: kWhile [source | sink]
condition:
      body:
        004: kCommandBuffer [source | sink]
            005: kCopy [source | sink]
    006: kConditional [source | sink]
"""


def test_constants_that_a_loop_copies():
    """Not what is copied once, what the loop changes or is given, nor a scalar."""
    assert copied_constants(LOOPS) == [64 * 8 * 4]
    changed = LOOPS.replace("tuple(%n, %zeros.2, %y)", "tuple(%n, %y, %zeros.2)")
    given = LOOPS.replace("tuple(%zero, %zeros.3,", "tuple(%zero, %x.1,")
    assert copied_constants(changed) == copied_constants(given) == []


def test_waits_for_the_host():
    # The loop that the data ends, and the conditional; not the loop of 3 turns.
    assert host_waits(LOOPS, THUNKS) == 2
    inside = THUNKS.replace("    006", "            006")
    assert host_waits(LOOPS, inside) == 1
    lines = "".join(f"    {line}\n" for line in THUNKS.splitlines())
    assert host_waits(LOOPS, f"000: kCommandBuffer [source | sink]\n{lines}") == 0
    asked = '%said = s32[] custom-call(%n), custom_call_target="xla_ffi_python_gpu_callback"'
    with_host = LOOPS.replace("  %copy.2", f"  {asked}\n  %r = token[] outfeed(%n)\n  %copy.2")
    assert host_waits(with_host, inside) == 3
    with pytest.raises(ValueError, match="shorter"):
        host_waits(LOOPS, "001: kWhile [source | sink]")


ON_H200 = """
import jax, jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec
from pallas_kernels.aot.gpu_compiler import compile_lowered, described_gpu
from switchx.partitioning.host_ring import layer_numbers, ring_scan
from switchx.partitioning.host_stack import HOST, HostStack

abstract = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
mesh = AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=abstract)
whole = NamedSharding(mesh, PartitionSpec())
host = whole.with_memory_kind(HOST)

def layer(x_RD, w_DD, *_):
    return jnp.sin(x_RD @ w_DD), None

def loss(w, x_RD):
    return jnp.sum(ring_scan(layer, x_RD, w, None, None, layer_numbers(8), slots=2)[0])

def gradient(w_NDD, x_RD):
    return jax.grad(loss)(HostStack.of(w_NDD, "NDF", 2), x_RD).value

w_NDD = jax.ShapeDtypeStruct((8, 512, 512), jnp.float32, sharding=host)
x_RD = jax.ShapeDtypeStruct((256, 512), jnp.float32, sharding=whole)
lowered = jax.jit(gradient, out_shardings=host).trace(w_NDD, x_RD).lower(
    lowering_platforms=("cuda",)
)
program = compile_lowered(lowered, [described_gpu("h200")])
print(program.hlo_modules()[0].to_string())
"""


@pytest.mark.aot
def test_no_stride_of_host_memory_is_noted_for_an_h200():
    done = script_with_compiler(gpu_compiler, ON_H200)
    assert "S(5)" in done.stdout and "does device compute in host memory" not in done.stderr
    assert noted_strides(done.stdout) == []
    # Nor is any array read backwards: releases differ in which they note, and how.
    assert '"byte_stride":"-' not in done.stdout
