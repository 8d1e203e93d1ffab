# SPDX-License-Identifier: Apache-2.0
"""Copies from host memory in HLO texts, cut from what XLA's compilers wrote of a ring."""

import pytest

from pallas_kernels.aot import gpu_compiler
from switchx.compiled.host_copies import host_copies, noted_strides, share_overlapped
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
  %one = s32[] constant(1)
  %n.1 = s32[] add(%n, %one)
  ROOT %tuple.1 = (s32[], {STACK}) tuple(%n.1, %dynamic-update-slice-done.1)
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


ON_H200 = """
import jax, jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec
from pallas_kernels.aot.gpu_compiler import compile_lowered, described_gpus
from switchx.training.offload.host_ring import layer_numbers, ring_scan
from switchx.training.offload.host_stack import HostStack
from switchx.partitioning.mesh import HOST

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
program = compile_lowered(lowered, described_gpus("h200"))
print(program.hlo_modules()[0].to_string())
"""


@pytest.mark.aot
def test_no_stride_of_host_memory_is_noted_for_an_h200():
    done = script_with_compiler(gpu_compiler, ON_H200)
    assert "S(5)" in done.stdout and "does device compute in host memory" not in done.stderr
    assert noted_strides(done.stdout) == []
    # Nor is any array read backwards: releases differ in which they note, and how.
    assert '"byte_stride":"-' not in done.stdout
