# SPDX-License-Identifier: Apache-2.0
"""`switchx bench scale`: what many devices change, on eight simulated ones and by compilation.

Losses across meshes; a pipeline's memory by schedule; a layer's collectives by dispatcher;
what compiled steps communicate against the planner's bytes; a shared token table, buckets;
and, where the TPU compiler is installed, the four Switch models compiled for pods. Nothing here
is a time.
"""

from collections.abc import Callable
from typing import Any

from pallas_kernels.aot import tpu_compiler
from switchx.bench import (
    compiled,
    layer_collectives,
    loss_parity,
    memory_sharding,
    pipeline,
    planned_bytes,
)
from switchx.bench.report import Check, Report

Rows = list[dict[str, Any]]
# A table's rows divide evenly; the rest are the buffers of its exchange.
EMBEDDING_BOUND = 1.05 / memory_sharding.NUM_DEVICES


def run(note: Callable[[str], None] = lambda text: None) -> Report:
    """All rows, each part's by another first column, and the checks."""
    parity = loss_parity.measured_rows(note=note)
    note("compiling pipelines")
    memory = pipeline.memory_rows()
    layers = layer_collectives.measured_rows(note)
    planned = planned_bytes.measured_rows(note=note)
    left_over = planned_bytes.measured_rows(planned_bytes.LEFT_OVER, note=note)
    note("compiling token tables and buckets")
    table_ratio, tables = memory_sharding.embedding_bytes()
    bucket_ratio, buckets = memory_sharding.bucket_collectives()
    checks = [
        loss_parity.check(parity),
        Check("memory_1f1b_m128_vs_m8", growth(memory, "1f1b"), "<=1.05"),
        *planned_bytes.checks(planned, left_over),
        layer_collectives.check(layers),
        Check("embedding_bytes_vs_replicated", table_ratio, f"<={EMBEDDING_BOUND:g}"),
        Check("buckets_vs_collectives", bucket_ratio, "==1"),
    ]
    rows = (
        _named("training", parity)
        + memory
        + _named("layer", layers)
        + _named("communication", planned + left_over)
        + _named("table", tables)
        + _named("fused", buckets)
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


def growth(rows: Rows, schedule: str) -> float:
    """Temporary bytes with the most microbatches over those with the fewest."""
    sizes = [row["temporary_bytes"] for row in rows if row["schedule"] == schedule]
    return sizes[-1] / sizes[0]


def _named(column: str, rows: Rows) -> Rows:
    """With `column` for `case`: what a table's first column is called."""
    return [
        {column: row["case"], **{k: v for k, v in row.items() if k != "case"}} for row in rows
    ]
