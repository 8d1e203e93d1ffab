# SPDX-License-Identifier: Apache-2.0
"""What makes loops of a compiled program slow: copies of constants, waits for the host."""

import re

from switchx.compiled.hlo import Computation, Instruction, parse, within

# What has nothing but constants where its operands have.
_OF_CONSTANTS = ("constant", "iota", "broadcast", "reshape", "bitcast", "copy", "fusion")
_WITH_HOST = ("infeed", "outfeed", "send", "recv")
_CALLBACK = re.compile(r'custom_call_target="\w*python\w*callback')
_THUNK = re.compile(r"( *)\d+: k(CommandBuffer|While|Conditional)?")


def copied_constants(hlo: str) -> list[int]:
    """Bytes of each copy, in a loop, of an array that is the same constant in every turn.

    XLA moves constants out of loops. One that is written in place there, as the zeros that a
    collective's result goes into, is then copied in each turn.
    """
    program = parse(hlo)
    callers = {
        called: (each, place) for each in program for place, called in enumerate(each.called)
    }

    def is_in_loop(computation: Computation) -> bool:
        caller, _ = callers.get(computation, (None, 0))
        return caller is not None and (
            caller.opcode == "while" or is_in_loop(caller.computation)
        )

    def is_carried(state: Instruction, index: int | None) -> bool:
        """Whether a loop hands an element of its state on as it is."""
        last = state.computation.root
        if index is None or last.opcode != "tuple":
            return False
        element = last.operands[index]
        is_same = element.attributes.get("index") == str(index)
        return is_same and element.operands == (state,)

    def is_constant(each: Instruction, index: int | None = None) -> bool:
        """Whether an array, or an element of a tuple, comes from constants alone."""
        if each.opcode == "get-tuple-element":
            return is_constant(each.operands[0], int(each.attributes["index"]))
        if each.opcode == "tuple":
            return is_constant(each.operands[index])
        if each.opcode != "parameter":
            is_made = each.opcode in _OF_CONSTANTS or "AllocateBuffer" in each.rest
            return is_made and all(map(is_constant, each.operands))
        caller, place = callers.get(each.computation, (None, 0))
        if caller is not None and caller.opcode == "conditional":
            return is_constant(caller.operands[place + 1], index)
        is_same = caller is not None and caller.opcode == "while" and is_carried(each, index)
        return is_same and is_constant(caller.operands[0], index)

    return [
        each.arrays[0].num_bytes
        for each in program
        if each.opcode == "copy" and each.arrays[0].shape
        if is_in_loop(each.computation) and is_constant(each.operands[0])
    ]


def host_waits(hlo: str, thunks: str) -> int:
    """How often a GPU's program waits for the host, with one turn of each loop.

    The host reads whether a loop goes on whose trips are not known, and which branch a
    conditional takes, unless they are in a command buffer (a CUDA graph). It also takes part
    in callbacks and transfers.

    Args:
        thunks: what XLA runs, of the same program: `*.thunk_sequence_after_thunk_passes.txt`
            of `--xla_dump_to`, or `*.thunk_sequence.txt` where it has no command buffer.
    """
    program, captured, buffer = parse(hlo), [], None
    for thunk in filter(None, map(_THUNK.match, thunks.splitlines())):
        depth = len(thunk[1])
        if buffer is None or depth <= buffer:
            buffer = depth if thunk[2] == "CommandBuffer" else None
        if thunk[2] in ("While", "Conditional"):
            captured.append(buffer is not None)
    choices = [
        each for each in within(program.entry) if each.opcode in ("while", "conditional")
    ]
    pairs = zip(choices, captured, strict=True)
    read = sum(not free and '"known_trip_count"' not in each.rest for each, free in pairs)
    return read + sum(
        each.opcode in _WITH_HOST or bool(_CALLBACK.search(each.rest)) for each in program
    )
