# SPDX-License-Identifier: Apache-2.0
"""What sharing the token table saves, and how many collectives buckets make of a step's.

Shen et al. 2022 (SE-MoE, arXiv:2205.10034), sections 2.3 and 4.3, Table 4. Everything is read
off compiled training steps on eight devices. Dims: V D
"""

import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from switchx.models.config import ModelConfig, SwitchConfig
from switchx.optim.adamw import AdamW
from switchx.optim.schedules import Constant
from switchx.partitioning.buckets import Slicing
from switchx.partitioning.constrain import use_mesh
from switchx.partitioning.hlo_collectives import collectives
from switchx.partitioning.mesh import MeshSpec, batch_axes
from switchx.partitioning.rules import Rules
from switchx.training.fused_loss import count_buckets
from switchx.training.losses import LossConfig
from switchx.training.program import state_shardings
from switchx.training.state import init_state
from switchx.training.step import StepConfig, train_step

Rows = list[dict[str, Any]]

NUM_DEVICES = 8
ROWS, LENGTH = 16, 16
# A table that is most of the model, as in Table 4.
WIDE_VOCABULARY = ModelConfig("decoder_only", 16384, 32, 64, 2, 16, 1, activation="relu")
VOCABULARY_ROWS = Rules(params=(("V", ("data",)),), may_stay_whole=())
# The table, and AdamW's two moments of it, all float32.
STATES = 3

# Table 4: V, devices, bytes that mixed precision and Adam keep for a parameter (section 2.1:
# parameter and gradient in half precision, parameter and two moments in single precision).
TABLE_4_VOCABULARY, TABLE_4_DEVICES, TABLE_4_BYTES = 50304, 8, 16
# By D: GB on a GPU without and with the partition, as printed.
TABLE_4 = {2048: (7.46, 5.78), 4096: (12.80, 9.70), 8192: (27.80, 20.49)}

DEEP = ModelConfig(
    "decoder_only", 512, 32, 64, 2, 16, 8, activation="relu", scan_layers=True, remat="full",
    switch=SwitchConfig(4, every=2, group_size=ROWS * LENGTH // NUM_DEVICES),
)  # fmt: skip
# One bucket a parameter, several a block, one a block.
BUCKET_BYTES = (1, 2**14, 2**30)


def embedding_bytes() -> tuple[float, Rows]:
    """The table's bytes on a device, with its optimizer's, over those of a replicated one.

    Returns:
        The ratio, 1 over the devices, and rows: the compiled steps, then the cells of the
        paper's Table 4 with what the same arithmetic says of them.
    """
    arguments = {}
    for name, rules in (("replicated", Rules()), ("rows split", VOCABULARY_ROWS)):
        compiled, _ = _compiled_step(WIDE_VOCABULARY, MeshSpec(rules=rules))
        arguments[name] = compiled.memory_analysis().argument_size_in_bytes
    whole = 4 * STATES * WIDE_VOCABULARY.vocab_size * WIDE_VOCABULARY.d_model
    rows = [
        {
            "case": f"embedding {name}",
            "argument_bytes": size,
            "table_state_bytes": whole - (arguments["replicated"] - size),
        }
        for name, size in arguments.items()
    ]
    for d_model, (without, with_partition) in TABLE_4.items():
        saved = 1 - 1 / TABLE_4_DEVICES
        predicted = saved * TABLE_4_VOCABULARY * d_model * TABLE_4_BYTES / 1e9
        paper = without - with_partition
        rows.append(
            {
                "case": f"SE-MoE Table 4, hidden size {d_model}",
                "paper_saved_gb": paper,
                "predicted_saved_gb": predicted,
                "error": predicted / paper - 1,
            }
        )
    return rows[1]["table_state_bytes"] / whole, rows


def bucket_collectives() -> tuple[float, Rows]:
    """Collectives of slices in a compiled training step, over those its buckets stand for.

    Returns:
        The ratio of the bucket size where it is farthest from 1, and a row for each size.
    """
    rows = []
    for bucket_bytes in BUCKET_BYTES:
        spec, step = MeshSpec(fsdp=NUM_DEVICES), StepConfig(bucket_bytes=bucket_bytes)
        compiled, params = _compiled_step(DEEP, spec, step)
        found = Counter(each.kind for each in collectives(compiled.as_text()))
        slicing = Slicing.on(spec.build(), spec.rules, bucket_bytes)
        outside, blocks = count_buckets(params, slicing)
        measured = found["all-gather"] + found["reduce-scatter"]
        rows.append(
            {
                "case": f"buckets of {bucket_bytes} bytes",
                "buckets": outside + blocks,
                "all_gathers": found["all-gather"],
                "reduce_scatters": found["reduce-scatter"],
                "all_reduces": found["all-reduce"],
                "collectives_vs_buckets": measured / (2 * outside + 3 * blocks),
            }
        )
    return max((row["collectives_vs_buckets"] for row in rows), key=lambda x: abs(x - 1)), rows


def _compiled_step(config: ModelConfig, spec: MeshSpec, step: StepConfig = StepConfig()):
    """A training step with AdamW compiled on a mesh, and the shapes of its parameters."""
    mesh = spec.build()
    optimizer = AdamW().build(Constant(1e-3))
    state = jax.eval_shape(lambda: init_state(config, optimizer, seed=0))
    shardings = state_shardings(spec.rules, mesh, state)
    rows = NamedSharding(mesh, PartitionSpec(batch_axes(mesh, spec.rules)))
    tokens_BL = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)
    names = ("input_tokens", "target_tokens", "segment_ids", "positions", "prefix_mask")
    batch = {f"decoder_{name}": tokens_BL for name in names}
    batch["decoder_loss_weights"] = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.float32)
    loss = LossConfig(layer_reduction="mean")
    jitted = jax.jit(
        functools.partial(train_step, config, loss, step, optimizer),
        in_shardings=(shardings, rows),
        out_shardings=(shardings, None),
        donate_argnums=0,
    )
    with use_mesh(mesh, spec.rules):
        # What is read off does not depend on LLVM, and its optimizations take long.
        is_cpu = jax.default_backend() == "cpu"
        options = {"xla_backend_optimization_level": "0"} if is_cpu else {}
        return jitted.lower(state, batch).compile(compiler_options=options), state.params
