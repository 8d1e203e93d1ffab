# SPDX-License-Identifier: Apache-2.0
"""`switchx bench compiled`: a training step of Switch-Base on a chip, by the compiler's clock.

The model as printed (Fedus et al. 2021, arXiv:2101.03961, Table 9) with 8 experts in every
other block, 4 or 16 rows of 512 tokens on both sides, bfloat16 products, float32 parameters,
Adafactor, no rematerialization: forward, backward and update are one program. The ideal has
the FLOPs of the planner's formula, and the bytes of each product's operands and result once,
plus those of parameters and optimizer state, read and written once more. Nothing is run.
"""

import json
import math
import sys

from switchx.bench.compiled_layer import rates_of
from switchx.bench.small_job import small_job
from switchx.compiled.devices import describe_devices
from switchx.compiled.flops import matrix_flops
from switchx.compiled.jaxprs import sum_of_trace
from switchx.compiled.moved_bytes import moved_bytes
from switchx.compiled.training_step import batch_shapes, bytes_on_one_device
from switchx.compiled.workload import planned_flops
from switchx.models.config import ModelConfig, Precision, SwitchConfig
from switchx.optim.adafactor import Adafactor
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.topology import Topology
from switchx.training.program import TrainingProgram

# Rows by chip: 16 rows take 27.6 GiB of temporaries, and a v5e has 15.75 GiB.
ROWS = {"v5e": 4, "v5p": 16}
LENGTH, NUM_EXPERTS, LAYERS = 512, 8, 12  # layers per stack


def step_row(topology: Topology, precision: Precision) -> dict:
    """Compiles and counts the step, for one row; needs a process that has the compiler."""
    switch = SwitchConfig(NUM_EXPERTS, every=2, capacity_factor=1.25, group_size=8192)
    model = ModelConfig(
        "encoder_decoder",
        vocab_size=32128,
        d_model=768,
        d_ff=2048,
        num_heads=12,
        d_head=64,
        num_encoder_layers=LAYERS,
        num_decoder_layers=LAYERS,
        activation="geglu",
        tie_embeddings=True,
        scan_layers=True,
        switch=switch,
        precision=precision,
    )
    job = small_job(model, MeshSpec(data=1), ROWS[topology.kind], LENGTH, optimizer=Adafactor())
    program = TrainingProgram(job, describe_devices(topology)[:1])
    batch = program.abstract_batch(batch_shapes(program))
    with program.scope():
        traced = program.trace_step(batch)
        compiled = traced.lower().compile()
    hlo, memory = compiled.as_text(), compiled.memory_analysis()
    moved = moved_bytes(hlo, rates=rates_of(topology.kind))
    flops = matrix_flops(hlo)
    state = bytes_on_one_device(program.abstract_state)
    ideal_flops = planned_flops(job, 1)
    ideal_bytes = sum_of_trace(traced.jaxpr, product_bytes) + 2 * state
    return {
        "step": f"switch_base, {LAYERS}+{LAYERS} blocks",
        "target": str(topology),
        "rows": ROWS[topology.kind],
        "experts": NUM_EXPERTS,
        "capacity_factor": switch.capacity_factor,
        "flops": flops,
        "hbm_bytes": moved.num_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "kernels": moved.kernels,
        "estimated_s": moved.estimated_s,
        "compiler_share_of_s": moved.compiler_s / moved.estimated_s,
        "roofline_s": moved.roofline_s,
        "flops_vs_ideal": flops / ideal_flops,
        "bytes_vs_ideal": moved.num_bytes / ideal_bytes,
    }


def product_bytes(equation) -> int | None:
    """Bytes of a product's operands and result; None for any other equation."""
    if equation.primitive.name != "dot_general":
        return None
    arrays = [each.aval for each in (*equation.invars, *equation.outvars)]
    return sum(math.prod(each.shape) * each.dtype.itemsize for each in arrays)


if __name__ == "__main__":
    settings = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {"compute": "bfloat16"}
    print(json.dumps([step_row(Topology.parse(sys.argv[1]), precision=Precision(**settings))]))
