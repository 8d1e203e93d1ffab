# SPDX-License-Identifier: Apache-2.0
"""`switchx bench scale`: what many devices change, on eight simulated ones and by compilation.

Losses across meshes; a pipeline's memory by schedule; a layer's collectives by dispatcher; the
bytes that compiled steps communicate against the planner's, and gradients' along axes of
replicas against one reduction's; a token table's rows on several devices, and slices gathered
in buckets; what processes hash and read in a save; how axes lie on a torus; and, where the TPU
compiler is installed, the four Switch models compiled for pods. Nothing here is a time.
Dims: B rows of a batch, L tokens of a row, D model
"""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.aot import tpu_compiler
from switchx.bench import (
    compiled,
    gradient_bytes,
    loss_parity,
    pipelines,
    planned_bytes,
    saves,
    torus,
)
from switchx.bench.loss_parity import VOCABULARY_ROWS
from switchx.bench.planned_bytes import compile_step
from switchx.bench.report import Check, Report
from switchx.bench.step_cases import small_job
from switchx.compiled.collectives import collectives
from switchx.layers.dense import DenseFFN
from switchx.models.config import ModelConfig, SwitchConfig
from switchx.models.params import abstract_params, params_of, with_params
from switchx.moe.layer import SwitchFFN
from switchx.partitioning.buckets import Slicing
from switchx.partitioning.constrain import use_mesh
from switchx.partitioning.mesh import MeshSpec, batch_axes, named_axes
from switchx.partitioning.rules import param_shardings
from switchx.planner.layout import SLICED_RULES
from switchx.training.fused_loss import count_buckets
from switchx.training.step import StepConfig

Rows = list[dict[str, Any]]

NUM_DEVICES = 8
# A table's rows divide evenly; the rest are the buffers of its exchange.
TABLE_BOUND = 1.05 / NUM_DEVICES


def run(note: Callable[[str], None] = lambda text: None) -> Report:
    """All rows, each part's with its own first column, and the checks."""
    parity = loss_parity.measured_rows(note=note)
    note("compiling pipelines")
    memory, programs = pipelines.memory_rows(), pipelines.program_rows()
    layers = layer_rows(note)
    planned = planned_bytes.run(note)
    note("compiling token tables and buckets")
    table_ratio, tables = token_tables()
    bucket_ratio, buckets = bucket_rows()
    saved = saves.run(note)
    reduced = gradient_bytes.measured_rows(note)
    on_torus = torus.rows()
    checks = [
        loss_parity.check(parity),
        Check("memory_1f1b_m128_vs_m8", pipelines.growth(memory, "1f1b"), "<=1.05"),
        pipelines.holds_whole_model(programs),
        *planned.checks,
        gradient_bytes.check(reduced),
        gradient_bytes.check_experts(reduced),
        extra_collectives(layers),
        Check("embedding_bytes_vs_replicated", table_ratio, f"<={TABLE_BOUND:g}"),
        Check("buckets_vs_collectives", bucket_ratio, "==1"),
        *saved.checks,
        torus.check(on_torus),
    ]
    rows = (
        _named("training", parity)
        + memory
        + programs
        + _named("layer", layers)
        + _named("communication", planned.results)
        + _named("gradients", reduced)
        + _named("table", tables)
        + _named("fused", buckets)
        + saved.results
        + on_torus
    )
    pods = pod_reports(note)
    rows += [row for report in pods for row in report["results"]]
    checks += compiled.pod_checks(pods)
    return Report("bench scale", rows, checks)


def pod_reports(note: Callable[[str], None]) -> list[dict[str, Any]]:
    """What `switchx compile` says of the runs on pods; none without the TPU compiler."""
    try:
        tpu_compiler.compiler_folder()
    except FileNotFoundError as error:
        note(f"Switch models on pods left out: {error}")
        return []
    return compiled.compiled_reports(note=note)


def _named(column: str, rows: Rows) -> Rows:
    """The rows with `column` for `case`: the name of the first column of their table."""
    return [{column: row["case"]} | {k: row[k] for k in row if k != "case"} for row in rows]


# One layer's collectives, forward and backward. Data-parallel experts exchange tokens and
# results by all-to-all. Pipeline MoE's (Chen et al. 2023, arXiv:2304.11414, section 3.3) add up
# parts once each way, as a dense tensor-parallel FFN does, and communicate nothing more.

ROWS, LENGTH, EXPERTS = 8, 16, 8
LAYER = ModelConfig("decoder_only", 8, 32, 64, 8, 4, num_decoder_layers=1, activation="relu")
# Less than any array of activations has: what is left out are sums of the router's gradient,
# of D * E numbers, and of counts.
LEAST_BYTES = 4 * ROWS * LENGTH * LAYER.d_model // NUM_DEVICES
LAYER_MESHES = {
    "dense": MeshSpec(data=1, model=8),
    "sliced": MeshSpec(data=1, model=8, rules=SLICED_RULES),
    "all_to_all": MeshSpec(data=1, expert=8),
    "hierarchical": MeshSpec(data=1, node=2, expert=4),
}


def layer_rows(note: Callable[[str], None] = lambda text: None) -> Rows:
    """A row a layer: collectives of its activations by kind, their number and bytes."""
    rows = []
    for name, spec in LAYER_MESHES.items():
        note(f"compiling a layer: {name}")
        counted, sizes = collections.Counter(), collections.Counter()
        for each in collectives(compiled_layer(name, spec)):
            if each.num_bytes >= LEAST_BYTES:
                counted[each.kind] += 1
                sizes[each.kind] += each.num_bytes
        axes = named_axes(spec.build().shape)
        row = {"case": f"one layer, {name}, {axes}", "collectives": counted.total()}
        for kind in sorted(counted):
            row |= {f"{kind}s": counted[kind], f"{kind}_bytes": sizes[kind]}
        rows.append(row)
    return rows


def extra_collectives(rows: Rows) -> Check:
    """Collectives of Pipeline MoE's layer beyond those of the dense tensor-parallel one."""
    dense, sliced = (row["collectives"] for row in rows[:2])
    return Check("ppmoe_extra_collectives", sliced - dense, "==0")


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
# One bucket a parameter, several a block, one a block.
BUCKET_BYTES = (1, 2**14, 2**30)


def token_tables() -> tuple[float, Rows]:
    """Bytes of a split table and its optimizer's state on a device, over a replicated one's.

    Returns:
        The ratio, 1 over the devices, and a row for each of both.
    """
    arguments = {}
    meshes = {"replicated": MeshSpec(), "rows split": MeshSpec(rules=VOCABULARY_ROWS)}
    for name, spec in meshes.items():
        job = small_job(WIDE_VOCABULARY, spec, STEP_ROWS, STEP_LENGTH)
        arguments[name] = compile_step(job, jax.devices()).argument_bytes
    whole = 4 * STATES * WIDE_VOCABULARY.vocab_size * WIDE_VOCABULARY.d_model
    rows = [
        {
            "case": f"embedding {name}",
            "argument_bytes": size,
            "table_state_bytes": whole - (arguments["replicated"] - size),
        }
        for name, size in arguments.items()
    ]
    return rows[1]["table_state_bytes"] / whole, rows


def bucket_rows() -> tuple[float, Rows]:
    """Collectives of slices in a compiled training step, over those its buckets stand for.

    Returns:
        The ratio of the bucket size where it is farthest from 1, and a row for each size.
    """
    rows, spec = [], MeshSpec(fsdp=NUM_DEVICES)
    for bucket_bytes in BUCKET_BYTES:
        step = StepConfig(bucket_bytes=bucket_bytes)
        job = small_job(DEEP, spec, STEP_ROWS, STEP_LENGTH, step=step)
        hlo = compile_step(job, jax.devices()).text
        found = collections.Counter(each.kind for each in collectives(hlo))
        slicing = Slicing.on(spec.build(), spec.rules, bucket_bytes)
        outside, blocks = count_buckets(abstract_params(DEEP), slicing)
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
