# SPDX-License-Identifier: Apache-2.0
"""The table of promises: what measures each, and the bound that it is held to."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from switchx.results import Check
from tests.promises import (
    collectives,
    convert_memory,
    decoding_programs,
    elastic,
    gradient_bytes,
    loss_parity,
    offload,
    optimizer_bytes,
    pipelines,
    planned_bytes,
    saves,
    storage,
    storage_memory,
    storage_order,
    torus,
    training_kills,
)

# Name of a check, what was measured, value. Names without a bound are only printed.
Rows = Iterable[tuple[str, str, float]]


@dataclasses.dataclass(frozen=True)
class Promise:
    """Checks that one measurement decides.

    Attributes:
        measure: The function that yields the rows of all checks.
        bounds: The bound of each check, by name.
        brief: The same measurement of a few cases, for the default suite; None where that
            has another test, or `measure` itself where it is quick.
    """

    measure: Callable[[], Rows]
    bounds: dict[str, str]
    brief: Callable[[], Rows] | None = None

    @property
    def name(self) -> str:
        return "+".join(self.bounds)


def judged(rows: Rows, bounds: dict[str, str]) -> tuple[list[dict[str, Any]], list[Check]]:
    """The rows as dictionaries, and a check for each bound, of the row that is worst by it.

    Raises:
        ValueError: A check has no row.
    """
    rows = [(name, case, float(value)) for name, case, value in rows]
    checks = []
    for name, bound in bounds.items():
        values = np.array([value for found, _, value in rows if found == name])
        if not values.size:
            raise ValueError(f"{name}: nothing was measured")
        if bound[:2] == "<=" and float(bound[2:]) >= 1:  # a ratio, 0 if nothing was counted
            values = np.where(values > 0, values, np.nan)
        # NumPy's functions keep a NaN, wherever it stands.
        distance = {"<=": values, ">=": -values, "==": np.abs(values - float(bound[2:]))}
        checks.append(Check(name, float(values[np.argmax(distance[bound[:2]])]), bound))
    named = [{"promise": name, "case": case, "value": value} for name, case, value in rows]
    return named, checks


PROMISES = (
    Promise(loss_parity.losses_across_meshes, {"mesh_loss_parity": "<=1e-3"}),
    Promise(
        pipelines.memory_by_microbatches,
        {"memory_1f1b_m128_vs_m8": "<=1.05"},
        brief=pipelines.memory_of_two_blocks,
    ),
    Promise(pipelines.programs_of_stages, {"pipeline_program_holds_whole_model": "==0"}),
    Promise(
        planned_bytes.everywhere,
        {"hlo_vs_planner_bytes": "<=0.05", "hlo_vs_planner_flops": "<=0.05"},
        brief=functools.partial(planned_bytes.on_simulated_devices, planned_bytes.BRIEF),
    ),
    Promise(
        gradient_bytes.everywhere,
        {"gradient_bytes_vs_one_reduction": "<=1.02", "expert_gradients_across_experts": "==0"},
    ),
    Promise(
        optimizer_bytes.everywhere,
        # Adafactor has passes of its own; the module's docstring counts them.
        {"adamw_bytes_vs_ideal": "<=1.5", "adafactor_bytes_vs_ideal": "<=2.26"},
    ),
    Promise(collectives.of_layers, {"ppmoe_extra_collectives": "==0"}),
    Promise(collectives.token_tables, {"embedding_bytes_vs_replicated": "<=0.13125"}),
    Promise(collectives.buckets, {"buckets_vs_collectives": "==1"}),
    Promise(
        saves.by_processes,
        {"checkpoint_hashed_bytes_vs_share": "<=1.1", "checkpoint_bytes_read_back": "==0"},
    ),
    Promise(torus.axes_on_slices, {"torus_contiguous": "==1"}, brief=torus.axes_on_slices),
    Promise(
        elastic.lost_devices,
        {"loss_after_losing_devices": "<=1e-6", "token_ids_differing": "==0"},
    ),
    Promise(elastic.copied_experts, {"replica_gradient_error": "<=1e-6"}),
    Promise(
        elastic.balanced_experts, {"imbalance_zipf1": "<=1.05"}, brief=elastic.balanced_experts
    ),
    Promise(
        elastic.rows_of_tasks,
        {"ufo_rows_per_device_4": "==256", "ufo_rows_per_device_8": "==128"},
        brief=elastic.rows_of_tasks,
    ),
    Promise(
        offload.decoding,
        {
            "tokens_differing": "==0",
            "device_expert_bytes_vs_slots": "<=1.05",
            "bytes_moved_vs_formula": "==1",
            "int4_vs_bf16_bytes_moved": "<=0.27",
            "pinned_ring_vs_ring_bytes": "==0.75",
        },
    ),
    Promise(storage.gradient_errors, {"layered_gradient_error": "<=1e-6"}),
    Promise(storage.bits_by_cache, {"bits_differing_by_cache": "==0"}),
    Promise(storage.late_updates, {"lazy_vs_dense_bits_differing": "==0"}),
    Promise(storage.losses, {"loss_vs_resident": "<=1e-5"}),
    Promise(storage_order.bytes_of_files, {"bytes_vs_formula": "==1"}),
    Promise(storage_order.order_of_steps, {"order_violations": "==0"}),
    Promise(storage_memory.resident_set, {"rss_over_budget": "<=1.2"}),
    Promise(
        convert_memory.conversion,
        {"convert_rss_over_budget": "<=1.3", "convert_back_rss_over_budget": "<=1.3"},
    ),
    Promise(
        training_kills.killed,
        {"kill9_differing": "==0"},
        brief=functools.partial(training_kills.of_a_store, 7),
    ),
    Promise(decoding_programs.growth, {"programs_bounded": "<=1.05"}),
)
# What each check measures.
WHAT = {
    "mesh_loss_parity": (
        "losses of 50 steps on 14 meshes against those of one device, relative difference"
    ),
    "memory_1f1b_m128_vs_m8": "1F1B's temporaries with 128 microbatches over those with 8",
    "pipeline_program_holds_whole_model": (
        "programs of pipelined runs whose temporaries are as large as all blocks"
    ),
    "hlo_vs_planner_bytes": (
        "bytes of collectives of compiled steps against the planner's, kind by kind"
    ),
    "hlo_vs_planner_flops": "FLOPs of matrix products of compiled steps against the planner's",
    "gradient_bytes_vs_one_reduction": (
        "bytes of gradients in 4 and 16 microbatches over those of one reduction"
    ),
    "expert_gradients_across_experts": (
        "bytes of experts' gradients summed over devices with other experts"
    ),
    "adamw_bytes_vs_ideal": (
        "bytes that gradients and update of experts move, over one write and one read of "
        "gradients and one read and write of weights and moments"
    ),
    "adafactor_bytes_vs_ideal": (
        "the same of Adafactor, which reads a gradient four times; 1.5 was the aim"
    ),
    "ppmoe_extra_collectives": (
        "collectives of Pipeline MoE's layer beyond those of a dense tensor-parallel one"
    ),
    "embedding_bytes_vs_replicated": (
        "a token table over eight devices: bytes of each over a whole one's"
    ),
    "buckets_vs_collectives": "collectives of slices over those that their buckets stand for",
    "checkpoint_hashed_bytes_vs_share": (
        "1, 2 and 4 processes that save: bytes hashed by the busiest over an equal share"
    ),
    "checkpoint_bytes_read_back": "bytes of arrays read during a save",
    "torus_contiguous": (
        "groups along the axes of six meshes on TPU slices that are boxes of neighbours"
    ),
    "loss_after_losing_devices": (
        "losses of a run on eight, six, then two devices against those of one on eight"
    ),
    "token_ids_differing": (
        "token ids that such a run reads otherwise than one that is not resumed"
    ),
    "replica_gradient_error": (
        "raw gradients of a layer with copies of experts against those of one without"
    ),
    "imbalance_zipf1": (
        "the busiest of eight devices over their mean, 64 experts with Zipf's loads and 8 "
        "copies"
    ),
    "ufo_rows_per_device_4": "rows of SE-MoE's four tasks on the busiest of four devices",
    "ufo_rows_per_device_8": "the same of eight devices",
    "tokens_differing": (
        "decoding in float32 with 1, 4 or 16 experts of a layer on the device: other tokens"
    ),
    "device_expert_bytes_vs_slots": "bytes of experts on the device over those of the slots",
    "bytes_moved_vs_formula": "bytes moved over those that the requests miss",
    "int4_vs_bf16_bytes_moved": "bytes moved with int4 experts over those with bfloat16",
    "pinned_ring_vs_ring_bytes": (
        "bytes that a ring of 3 slots for 4 layers moves over those of all layers"
    ),
    "layered_gradient_error": "experts on a disk: raw gradients against the resident program's",
    "bits_differing_by_cache": "bits that depend on the cache's policy or size",
    "lazy_vs_dense_bits_differing": "bits that depend on when unused experts are updated",
    "loss_vs_resident": "losses of 50 steps against the resident program's",
    "bytes_vs_formula": "bytes of files over the formula's",
    "order_violations": "steps whose reads, runs or banks are out of order",
    "rss_over_budget": "host memory over the budget",
    "convert_rss_over_budget": (
        "`switchx convert` of 1.2 GiB: memory over the largest array and one layer's"
    ),
    "convert_back_rss_over_budget": "the same of what it has written, `--to=huggingface`",
    "kill9_differing": "kills after which the last checkpoint is not whole",
    "programs_bounded": (
        "memory maps and memory after 1,000 settings of decoding over those after 200"
    ),
}


def table() -> str:
    """The Markdown table of docs/promises.md: each check, what it measures, its bound."""
    bounds = {name: bound for promise in PROMISES for name, bound in promise.bounds.items()}
    rows = [
        f"| `{name}` | {WHAT[name]} | {bound[:2]} {bound[2:]} |"
        for name, bound in bounds.items()
    ]
    return "\n".join(["| check | what | bound |", "|---|---|---|", *rows])
