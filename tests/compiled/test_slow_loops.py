# SPDX-License-Identifier: Apache-2.0
"""Copies of constants and waits for the host in a text, cut from what XLA wrote for a GPU."""

import pytest

from tests.compiled.slow_loops import copied_constants, host_waits

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
