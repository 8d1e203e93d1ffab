# SPDX-License-Identifier: Apache-2.0
"""What was predicted of a card before anything was measured on it, with the reasons.

Of the kernels: a simulation of their machine code with two warps a scheduler, a launch floor
of 9 us and 4,400 serial cycles a tile (2026-11-26), which gave what an H200 had measured on one
day within 8%. A prediction is not changed after its measurement; one that is made anew says so
here.
"""

_SHAPE = "1024x4096, rows"
# Microseconds on an H200, with JAX 0.11 and later.
_KERNELS_H200 = {
    # Memory bound at 4.2 TB/s.
    f"bfloat16, {_SHAPE} 1": 73.0,
    f"bfloat16, {_SHAPE} 4": 73.0,
    f"bfloat16, {_SHAPE} 16": 73.0,
    f"int8, {_SHAPE} 1": 58.9,
    f"int8, {_SHAPE} 4": 58.9,
    f"int8, {_SHAPE} 16": 59.4,
    # 705 instructions in the loop, where JAX 0.10.2 has 392: the weights that are carried to
    # the next step are packed anew. Without that the loop has 380.
    f"int4, {_SHAPE} 1": 62.2,
    f"int4, {_SHAPE} 4": 62.2,
    f"int4, {_SHAPE} 16": 48.5,
    f"int4 no load-ahead, {_SHAPE} 4": 49.0,
    # Half as many tiles, so half as many of their serial cycles.
    f"int8 tile_m=128, {_SHAPE} 4": 44.5,
    f"int4 tile_m=128, {_SHAPE} 4": 37.0,
    # Half as many waits as with 256 channels, and nothing packed anew.
    f"int4 512 channels, {_SHAPE} 4": 48.5,
    # Bytes on their way do not bound it: 36 KB of an SM's ring of 128 KB are enough.
    f"int8 twice the stages, {_SHAPE} 4": 58.9,
    f"int4 twice the stages, {_SHAPE} 4": 62.2,
    # A fence and a barrier less in each step of the consumers.
    f"int8 fence in the producer, {_SHAPE} 4": 55.0,
    f"int4 fence in the producer, {_SHAPE} 4": 60.0,
    # Memory, 134 and 67 MB at 4.2 TB/s, with half of the serial cycles.
    f"int8 copy only, {_SHAPE} 4": 41.0,
    f"int4 copy only, {_SHAPE} 4": 25.0,
    f"int8 convert without wgmma, {_SHAPE} 4": 55.0,
    f"int4 convert without wgmma, {_SHAPE} 4": 55.0,
    f"int8 wgmma without convert, {_SHAPE} 4": 46.0,
    f"int4 wgmma without convert, {_SHAPE} 4": 35.0,
    # The falsifier: a quarter of the tiles, with four times the steps.
    "bfloat16, 4096x1024, rows 4": 75.0,
    "int8, 4096x1024, rows 4": 46.5,
    "int4, 4096x1024, rows 4": 49.4,
    "int4 no load-ahead, 4096x1024, rows 4": 36.0,
    # Measured before, against cuBLAS 109 with a copy of its matrix.
    f"bfloat16, {_SHAPE} 256": 129.0,
    f"dense bfloat16, {_SHAPE} 256": 109.0,
}
_ON_HOPPER = {
    "card": {"empty kernel": 2.0, "schedule kernel": 4.0, "bfloat16 product": 790.0},
    # In an hour of another day 520 of 599 had passed, and none failed.
    "kernel_tests": {"pytest": 0},
    "all_kernel_tests": {"pytest": 0},
    # A step of the dense model is 40% of the matrix rate; 8 experts add routing and gathers.
    "training": {
        "dense": 190e3,
        "8 experts, gather": 160e3,
        "8 experts, dropless": 165e3,
        "64 experts, gather": 110e3,
        "64 experts, dropless": 125e3,
        "8 experts, AdamW": 155e3,
        "transformers, AdamW": 60e3,
        "losses, gather": 0.02,
        "losses, dropless": 0.02,
        # 48 GB less (docs/compiled.md) are 10 of 54 ms.
        "dense, cuDNN's attention": 230e3,
        "losses, cuDNN's attention": 0.02,
    },
    # 32 steps of 6 blocks; without a captured loop each kernel is launched by the host.
    "decoding": {
        "bfloat16, batch 1, 1 beams, default": 40.0,
        "bfloat16, batch 1, 1 beams, loops in command buffers": 15.0,
        "bfloat16, batch 96, 1 beams, default": 45.0,
        "bfloat16, batch 96, 1 beams, loops in command buffers": 20.0,
        "bfloat16, batch 16, 4 beams, default": 60.0,
        "bfloat16, batch 1, 1 beams, transformers": 500.0,
        "bfloat16, batch 96, 1 beams, transformers": 550.0,
        "float32, our kernels and XLA's products": 0,
        "float32, the card and the CPU": 0,
    },
    "export": {
        "texts differing of run.py": 0,
        "expert_slots=4": 0,
        "copies into slots": 15.0,
        "a ring of host memory": 0,
    },
}
# By the card's name, then by part and case.
PREDICTIONS = {
    "NVIDIA H200": _ON_HOPPER
    | {"card": _ON_HOPPER["card"] | {"copy": 4.2}, "variants": _KERNELS_H200},
    "NVIDIA H100 80GB HBM3": _ON_HOPPER
    | {
        "card": _ON_HOPPER["card"] | {"copy": 2.95},
        # Memory bound at 2.95 TB/s; what instructions bound takes as long as on an H200.
        "variants": _KERNELS_H200
        | {f"bfloat16, {_SHAPE} {rows}": 101.0 for rows in (1, 4, 16)}
        | {"bfloat16, 4096x1024, rows 4": 101.0, f"int8 copy only, {_SHAPE} 4": 55.0},
    },
}


def predicted(card: str, part: str, case: str) -> float | None:
    """What was predicted, in the unit of the row; None where nothing was."""
    return PREDICTIONS.get(card, {}).get(part, {}).get(case)
