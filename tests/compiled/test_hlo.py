# SPDX-License-Identifier: Apache-2.0
"""The reader of HLO: lines as XLA's compilers write them, and what it refuses."""

from collections import Counter

import pytest

from switchx.compiled.hlo import Array, parse, within

# With a table of places in files before the computations, and comments in tuples.
HLO = """\
HloModule jit_f, is_scheduled=true, replica_count=2, num_partitions=4

FileLocations
1 {file_name_id=1 function_name_id=1 line=13 end_line=13 column=4 end_column=9}

%less (state: (s32[], f32[4,3])) -> pred[] {
  %state = (s32[], f32[4,3]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%state), index=0
  %bound = s32[]{:T(128)} constant(5)
  ROOT %l = pred[] compare(%n, %bound), direction=LT
}

%body (state: (s32[], f32[4,3])) -> (s32[], f32[4,3]) {
  %state.1 = (s32[], f32[4,3]{1,0}) parameter(0)
  %n.1 = s32[] get-tuple-element(%state.1), index=0
  %x.1 = f32[4,3]{1,0} get-tuple-element(%state.1), index=1
  ROOT %t = (s32[], /*index=1*/f32[4,3]{1,0}) tuple(%n.1, /*index=1*/%x.1)
}

ENTRY %main.3 (x: f32[4,3], w: f8e4m3fn[3,2]) -> f32[4,3] {
  %x = f32[4,3]{1,0:T(8,128)S(5)} parameter(0), metadata={op_name="blocks['w, x']" line=1}
  %copy-start = ((f32[4,3]{1,0:T(8,128)}), f32[4,3]{1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}) copy-start(f32[4,3]{1,0:T(8,128)} %x)
  %copy-done = f32[4,3]{1,0} copy-done(%copy-start), frontend_attributes={kernel_metadata={
"block": "512"
}}, metadata={op_name="of several lines"}
  %r = f32[4,3] all-reduce(%x), replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}, to_apply=%less, frontend_attributes={chain_id="3",note="a, (b"}
  %c = f32[4,3] conditional(%p, %x, %x), branch_computations={%less, %body}
  ROOT %w.1 = (s32[], f32[4,3]) while(%c), condition=%less, body=%body
}
"""  # noqa: E501


def test_a_program_and_its_instructions():
    program = parse(HLO)
    assert program.num_devices == 8 and list(program.computations) == ["less", "body", "main.3"]
    assert program.entry is program.computations["main.3"]
    made = program.entry.instructions
    assert [each.name for each in program][-6:] == list(made)
    assert program.entry.root is made["w.1"] and made["x"].arguments == "0"
    assert made["x"].arrays == (Array("f32", (4, 3), "1,0:T(8,128)S(5)"),)
    assert made["x"].op_name == "blocks['w, x']"
    assert made["copy-done"].op_name == "of several lines"
    start = made["copy-start"]
    assert (start.opcode, start.operands, start.is_end) == ("copy-start", (made["x"],), False)
    assert [array.num_bytes for array in start.arrays] == [48, 48, 4]
    assert start.arrays[1].layout == "1,0:T(8,128)(2,1)S(1)"
    assert made["copy-done"].is_end and made["copy-done"].operands == (start,)
    assert made["r"].attributes == {
        "replica_groups": "mesh['a'=4,'b'=2]",
        "device_ids": "([2,4]T(1,0)) {'a'}",
        "to_apply": "%less",
        "frontend_attributes": '{chain_id="3",note="a, (b"}',
    }
    state, *elements, root = program.computations["body"]
    assert root.is_root and root.operands == tuple(elements)


def test_what_an_instruction_runs():
    program = parse(HLO)
    made = program.entry.instructions
    less, body = program.computations["less"], program.computations["body"]
    assert made["c"].called == (less, body)
    assert made["w.1"].called == (body,) and made["w.1"].trips == 5
    both = made["c"], made["w.1"]
    assert list(within(both)) == [both[0], *less, *body, both[1]]


def test_a_sum_of_one_for_each_tuple_counts_turns_and_the_larger_branch():
    program = parse(HLO)

    def own(each):
        return Counter(tuples=1) if each.opcode == "tuple" else None

    assert program.sum_of_run(own) == {"tuples": 5 + 1}
    endless = parse(HLO.replace("direction=LT", "direction=GT"))
    assert endless.sum_of_run(own, of_data_loop=lambda turn: Counter(tuples=7)) == {"tuples": 8}
    with pytest.raises(ValueError, match="has no known trip count, as the data ends it"):
        endless.sum_of_run(own)


@pytest.mark.parametrize(
    ("dtype", "num_bytes"),
    [("pred", 6), ("s4", 3), ("f8e4m3fn", 6), ("bf16", 12), ("f64", 48), ("token", 0)],
)
def test_bytes_of_an_array(dtype, num_bytes):
    assert Array(dtype, (2, 3)).num_bytes == num_bytes


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("ENTRY ", "", "expected HLO text with an ENTRY computation"),
        ("copy-done(%copy-start)", "copy-done(%copy-start", "expected an instruction of HLO"),
        ("  %c = ", "  c is ", "got 'c is f32"),
        ("  %c = ", "  %r = ", "got r twice in main.3"),
    ],
)
def test_what_is_no_program_is_refused(old, new, message):
    with pytest.raises(ValueError, match=message):
        parse(HLO.replace(old, new))
