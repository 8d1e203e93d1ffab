# SPDX-License-Identifier: Apache-2.0
"""A job whose experts are on a disk and on the devices of a mesh."""

import dataclasses

from switchx.optim.adamw import AdamW
from switchx.partitioning.mesh import MeshSpec
from switchx.training.offload.storage_spec import StorageSpec
from switchx.training.step import StepConfig
from tests.training.jobs import SPARSE, make_job, stacked

# Some of them have no token in a step. Those of a device have dropout of their own.
E, ROWS = 16, 16
MODEL = stacked(SPARSE, 2, every=1, num_experts=E, expert_dropout_rate=0.0)


def mesh_job(mesh: MeshSpec, storage=None, dispatcher="gather", **changes):
    switch = dataclasses.replace(MODEL.switch, dispatcher=dispatcher)
    fields = dict(
        storage=storage or StorageSpec("disk"),
        optimizer=AdamW(weight_decay=0.1, epsilon=1e-4),
        mesh=mesh,
        step=StepConfig(num_microbatches=2, clip_norm=0.5),
        batch_size=ROWS,
    )
    return make_job(dataclasses.replace(MODEL, switch=switch), **fields | changes)
