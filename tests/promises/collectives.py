# SPDX-License-Identifier: Apache-2.0
"""Collectives and bytes of meshes: of one layer by dispatcher, of a token table, of buckets.

Dims: B rows of a batch, L tokens of a row, D model
"""

import collections
import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from switchx.bench.small_job import small_job
from switchx.compiled.collectives import collectives
from switchx.layers.ffn import DenseFFN
from switchx.models.config import ModelConfig, SwitchConfig
from switchx.models.params import abstract_params, params_of, with_params
from switchx.moe.layer import SwitchFFN
from switchx.partitioning.buckets import Slicing
from switchx.partitioning.constrain import use_mesh
from switchx.partitioning.mesh import MeshSpec, batch_axes
from switchx.partitioning.rules import SLICED_RULES, param_shardings
from switchx.training.step import StepConfig
from tests.bucket_counts import count_buckets
from tests.promises.compiled_steps import NUM_DEVICES, compile_step
from tests.promises.loss_parity import VOCABULARY_ROWS

# One layer's collectives, forward and backward. Data-parallel experts exchange tokens and
# results by all-to-all. Pipeline MoE's (Chen et al. 2023, arXiv:2304.11414, section 3.3) add up
# parts once each way, as a dense tensor-parallel FFN does, and communicate nothing more.

ROWS, LENGTH, EXPERTS = 8, 16, 8
LAYER = ModelConfig("decoder_only", 8, 32, 64, 8, 4, num_decoder_layers=1, activation="relu")
# Less than any array of activations has: this leaves out sums of counts, and of the router's
# gradient, which has D * E numbers.
LEAST_BYTES = 4 * ROWS * LENGTH * LAYER.d_model // NUM_DEVICES
LAYER_MESHES = {
    "dense": MeshSpec(data=1, model=8),
    "sliced": MeshSpec(data=1, model=8, rules=SLICED_RULES),
    "all_to_all": MeshSpec(data=1, expert=8),
    "hierarchical": MeshSpec(data=1, node=2, expert=4),
}


def of_layers() -> Iterator[tuple]:
    """Collectives of a layer's activations by kind, and how many more Pipeline MoE has than
    the dense tensor-parallel layer."""
    totals = {}
    for name, spec in LAYER_MESHES.items():
        counted, sizes = collections.Counter(), collections.Counter()
        for each in collectives(compiled_layer(name, spec)):
            if each.num_bytes >= LEAST_BYTES:
                counted[each.kind] += 1
                sizes[each.kind] += each.num_bytes
        totals[name] = counted.total()
        for kind in sorted(counted):
            yield f"{kind}s", f"one layer, {name}", counted[kind]
            yield f"{kind} bytes", f"one layer, {name}", sizes[kind]
    yield "ppmoe_extra_collectives", "one layer", totals["sliced"] - totals["dense"]


def compiled_layer(name: str, spec: MeshSpec) -> str:
    """HLO of the gradients of a layer's inputs and parameters, tokens placed by the rules."""
    if name == "dense":
        layer = DenseFFN(LAYER, key=jax.random.key(0))
    else:
        switch = SwitchConfig(
            EXPERTS, every=1, group_size=LENGTH, capacity_factor=1.0, min_capacity=1,
            dispatcher=name,
        )  # fmt: skip
        config = dataclasses.replace(LAYER, switch=switch)
        layer = SwitchFFN(config, key=jax.random.key(0))
    mesh, params = spec.build(), params_of(layer)
    rows = NamedSharding(mesh, PartitionSpec(batch_axes(mesh, spec.rules)))
    shardings = param_shardings(spec.rules, mesh, params)
    x_BLD = jax.ShapeDtypeStruct((ROWS, LENGTH, LAYER.d_model), jnp.float32)

    def loss(params, x_BLD):
        run = with_params(layer, params)
        if name == "dense":
            return jnp.sum(run(x_BLD) ** 2)
        is_token_BL = jnp.ones(x_BLD.shape[:2], bool)
        return jnp.sum(run(x_BLD, is_token_BL, is_training=True)[0] ** 2)

    placed = (shardings, rows)
    gradients = jax.grad(loss, argnums=(0, 1))
    jitted = jax.jit(gradients, in_shardings=placed, out_shardings=placed)
    with use_mesh(mesh, spec.rules):
        return jitted.lower(params, x_BLD).compile().as_text()


# The token table's rows split over replicas, and slices in buckets: Shen et al. 2022 (SE-MoE,
# arXiv:2205.10034), sections 4.3 and 2.3. Read off compiled training steps with AdamW.

STEP_ROWS, STEP_LENGTH = 16, 16
# A table that is most of the model, as in the paper's Table 4.
WIDE_VOCABULARY = ModelConfig("decoder_only", 16384, 32, 64, 2, 16, 1, activation="relu")
# The table, and AdamW's two moments of it, all float32.
STATES = 3
DEEP = ModelConfig(
    "decoder_only", 512, 32, 64, 2, 16, 8, activation="relu", scan_layers=True, remat="full",
    switch=SwitchConfig(4, every=2, group_size=STEP_ROWS * STEP_LENGTH // NUM_DEVICES),
)  # fmt: skip
# One bucket per parameter, several per block, one per block.
BUCKET_BYTES = (1, 2**14, 2**30)


def token_tables() -> Iterator[tuple]:
    """Bytes of a split table and its optimizer's state on a device, over a replicated one's."""
    meshes = {"replicated": MeshSpec(), "rows split": MeshSpec(rules=VOCABULARY_ROWS)}
    arguments = {}
    for name, spec in meshes.items():
        job = small_job(WIDE_VOCABULARY, spec, STEP_ROWS, STEP_LENGTH)
        _, compiled = compile_step(job, jax.devices()[:NUM_DEVICES])
        arguments[name] = compiled.memory_analysis().argument_size_in_bytes
        yield "argument_bytes", name, arguments[name]
    whole = 4 * STATES * WIDE_VOCABULARY.vocab_size * WIDE_VOCABULARY.d_model
    split = whole - (arguments["replicated"] - arguments["rows split"])
    yield "embedding_bytes_vs_replicated", f"{NUM_DEVICES} devices", split / whole


def buckets() -> Iterator[tuple]:
    """Collectives of slices in a compiled training step, over those its buckets stand for."""
    spec = MeshSpec(fsdp=NUM_DEVICES)
    for bucket_bytes in BUCKET_BYTES:
        step = StepConfig(bucket_bytes=bucket_bytes)
        job = small_job(DEEP, spec, STEP_ROWS, STEP_LENGTH, step=step)
        _, compiled = compile_step(job, jax.devices()[:NUM_DEVICES])
        found = collections.Counter(each.kind for each in collectives(compiled.as_text()))
        slicing = Slicing.on(spec.build(), spec.rules, bucket_bytes)
        outside, blocks = count_buckets(abstract_params(DEEP), slicing)
        measured = found["all-gather"] + found["reduce-scatter"]
        what = f"buckets of {bucket_bytes} bytes"
        yield "buckets", what, outside + blocks
        yield "all_reduces", what, found["all-reduce"]
        yield "buckets_vs_collectives", what, measured / (2 * outside + 3 * blocks)
