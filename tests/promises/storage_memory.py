# SPDX-License-Identifier: Apache-2.0
"""Host memory of training with experts on a disk, in a process of its own.

`rss_over_budget` is the most memory that the process ever had (resident set size), less that of
a process with the same layers, experts and tokens whose experts are thin, over the budget:

    host_bytes              records in the cache
    gradients               of all experts that a step uses, kept until the update
    banks                   of `slots` periods, and the gradient of one: what a device has, on a
                            CPU in the same memory

The states of all experts are four times `host_bytes`. `python -m tests.promises.storage_memory
WIDTH` is the process.
Dims: F ffn
"""

import json
import sys
from collections.abc import Iterator

from switchx.bench.storage import of_child, opened
from switchx.models.config import ModelConfig, SwitchConfig
from switchx.training.job import TrainingJob
from switchx.training.offload.storage_spec import StorageSpec
from tests.processes import peak_rss_bytes
from tests.promises.storage import make_batch, make_job

LAYERS, EXPERTS, D, ROWS, LENGTH = 8, 16, 128, 4, 8
STATES_OVER_HOST_BYTES = 4
WIDE, THIN = 2048, 8
NUM_STEPS = 4
MEBIBYTE = 2**20


def memory_job(width: int) -> TrainingJob:
    """A job whose experts have this width F, a quarter of whose records is cached."""
    # Few tokens: a step uses some of the experts.
    switch = SwitchConfig(EXPERTS, every=1, min_capacity=1, group_size=LENGTH)
    model = ModelConfig(
        "decoder_only", 256, D, width, 2, 8, num_decoder_layers=LAYERS, activation="relu",
        scan_layers=True, remat="full", switch=switch,
    )  # fmt: skip
    parameters = LAYERS * EXPERTS * 2 * D * width * 4
    states = 3 * parameters  # of AdamW
    storage = StorageSpec("disk", host_bytes=states // STATES_OVER_HOST_BYTES)
    return make_job(model, storage, ROWS, LENGTH)


def resident_set() -> Iterator[tuple]:
    """Memory of a process with wide experts above that of one with thin ones, over the budget's
    difference."""
    # One device, and programs as they are compiled for users.
    thin, wide = (of_child(__name__, width, XLA_FLAGS="") for width in (THIN, WIDE))
    for row in (thin, wide):
        for name, value in row.items():
            yield name, f"experts of width {THIN if row is thin else WIDE}", value
    more = wide["peak_rss_mib"] - thin["peak_rss_mib"]
    yield "rss_over_budget", "wide", more / (wide["budget_mib"] - thin["budget_mib"])


def main(width: int) -> None:
    job = memory_job(width)
    with opened(job) as (program, _):
        state = program.init_state()
        for step in range(NUM_STEPS):
            batch = program.place(make_batch(job.model, step, ROWS, LENGTH))
            state, metrics = program.train_step(state, batch)
        touched = program.experts.metrics()["touched_share"]
        states = program.experts.layout.record_bytes * program.experts.layout.num_keys
    bank = states / 3 / LAYERS
    budget = job.storage.host_bytes + touched * states / 3 + (job.storage.slots + 1) * bank
    row = {
        "states_mib": states / MEBIBYTE,
        "host_mib": job.storage.host_bytes / MEBIBYTE,
        "touched_share": touched,
        "budget_mib": budget / MEBIBYTE,
        "peak_rss_mib": peak_rss_bytes() / MEBIBYTE,
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main(int(sys.argv[1]))
