# SPDX-License-Identifier: Apache-2.0
"""Predictions for a card, made before anything was measured on it, with the reasons.

The kernels' predictions use the cost model of their machine code as JAX 0.11.2 compiles it
(pallas_kernels/aot/gpu_cost.py), a launch of 13.6 us and 3,685 cycles at a tile's boundary,
memory at 4.2 TB/s on an H200 and 2.95 on an H100 (2026-11-27). A prediction is not changed
after its measurement; one that is made anew says so here.
"""

_SHAPE = "1024x4096, rows"
_TURNED = "4096x1024, rows"
# Microseconds on an H200.
_KERNELS_H200 = {
    **{f"bfloat16, {_SHAPE} {rows}": 77.6 for rows in (1, 4, 16)},  # memory
    # Tiles of 256 features: 4 for the busiest SM.
    **{f"int8, {_SHAPE} {rows}": 47.1 for rows in (1, 4, 16)},
    **{f"int4, {_SHAPE} {rows}": us for rows, us in ((1, 39.7), (4, 39.7), (16, 42.1))},
    # 8 tiles of 128 features, and 705 instructions of a loop that has 380: as it was measured
    # on 2026-11-26, 59 and 62.
    f"int8 tile_m=64, {_SHAPE} 4": 60.1,
    f"int4 tile_m=64, {_SHAPE} 4": 50.3,
    f"int4 tile_m=64 and load-ahead, {_SHAPE} 4": 63.3,
    f"int8 no load-ahead, {_SHAPE} 4": 47.6,
    # Half as many waits of each warpgroup, with 64 features.
    f"int8 512 channels, {_SHAPE} 4": 52.4,
    f"int4 512 channels, {_SHAPE} 4": 47.6,
    # Bytes on their way do not bound it: 36 KB of an SM's ring of 128 KB are enough.
    f"int8 twice the stages, {_SHAPE} 4": 50.4,
    f"int4 twice the stages, {_SHAPE} 4": 42.6,
    # A fence less in each step of the consumers.
    f"int8 fence in the producer, {_SHAPE} 4": 46.0,
    f"int4 fence in the producer, {_SHAPE} 4": 39.7,
    # Memory.
    f"int8 copy only, {_SHAPE} 4": 45.6,
    f"int4 copy only, {_SHAPE} 4": 29.6,
    f"int8 convert without wgmma, {_SHAPE} 4": 46.0,
    f"int4 convert without wgmma, {_SHAPE} 4": 39.0,
    f"int8 wgmma without convert, {_SHAPE} 4": 45.6,
    f"int4 wgmma without convert, {_SHAPE} 4": 29.9,
    # The falsifier: as many bytes, a quarter of the boundaries. With 64 features, as of
    # 2026-11-26, by the simulation of that day.
    f"bfloat16, {_TURNED} 4": 77.6,
    f"int8, {_TURNED} 4": 45.6,
    f"int4, {_TURNED} 4": 34.1,
    f"int8 tile_m=64, {_TURNED} 4": 46.5,
    f"int4 tile_m=64, {_TURNED} 4": 36.0,
    f"int4 tile_m=64 and load-ahead, {_TURNED} 4": 49.4,
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
        # What memory does not bound takes as long as on an H200.
        "variants": _KERNELS_H200
        | {f"bfloat16, {_SHAPE} {rows}": 104.6 for rows in (1, 4, 16)}
        | {f"int8, {_SHAPE} {rows}": 59.1 for rows in (1, 4, 16)}
        | {f"bfloat16, {_TURNED} 4": 104.6, f"int8, {_TURNED} 4": 59.1}
        | {f"int8 copy only, {_SHAPE} 4": 59.1, f"int4 copy only, {_SHAPE} 4": 36.4},
    },
}


def predicted(card: str, part: str, case: str) -> float | None:
    """The predicted value, in the unit of the row; None where there is none."""
    return PREDICTIONS.get(card, {}).get(part, {}).get(case)
