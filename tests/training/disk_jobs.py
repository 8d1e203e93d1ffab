# SPDX-License-Identifier: Apache-2.0
"""Jobs whose experts are on a disk, also with a mesh of devices; a program, what it saves."""

import jax

from switchx.checkpoint.run_folder import RunFolder
from switchx.optim.adafactor import Adafactor
from switchx.optim.adamw import AdamW
from switchx.partitioning.mesh import MeshSpec
from switchx.storage.snapshot import Snapshot
from switchx.training.offload.disk_program import LayeredProgram
from switchx.training.offload.storage_spec import StorageSpec
from switchx.training.step import StepConfig
from tests.training.jobs import SPARSE, make_job, stacked, with_switch

# So many experts that some have no token in a step.
E = 24
MODEL = stacked(SPARSE, 2, every=1, num_experts=E)
OPTIMIZERS = {
    "adamw": AdamW(weight_decay=0.1, epsilon=1e-4),
    "adafactor": Adafactor(min_dim_size_to_factor=8, beta1=0.9, weight_decay_rate=0.01),
}
DISK = StorageSpec("disk")
# Some of them have no token in a step. Those of a device have dropout of their own.
MESH_E, MESH_ROWS = 16, 16
MESH_MODEL = stacked(SPARSE, 2, every=1, num_experts=MESH_E, expert_dropout_rate=0.0)


def disk_job(model=MODEL, storage=DISK, optimizer="adamw", **changes):
    step = changes.pop("step", StepConfig(num_microbatches=2, clip_norm=0.5))
    return make_job(
        model,
        storage=storage,
        optimizer=OPTIMIZERS[optimizer],
        mesh=MeshSpec(data=1),
        step=step,
        **changes,
    )


def disk_program(folder, **changes) -> LayeredProgram:
    return LayeredProgram(disk_job(**changes), RunFolder(folder), jax.devices()[:1])


def saved_files(program, folder):
    """Bytes and CRC-32 of each record, all of one update."""
    program.experts.save(folder)
    snapshot = Snapshot(folder)
    keys = range(snapshot.layout.num_keys)
    assert {snapshot.read(key).updates for key in keys} == {program.experts.updates}
    return snapshot.files


def mesh_job(mesh: MeshSpec, storage=None, dispatcher="gather", **changes):
    fields = dict(
        storage=storage or StorageSpec("disk"),
        optimizer=AdamW(weight_decay=0.1, epsilon=1e-4),
        mesh=mesh,
        step=StepConfig(num_microbatches=2, clip_norm=0.5),
        batch_size=MESH_ROWS,
    )
    return make_job(with_switch(MESH_MODEL, dispatcher=dispatcher), **fields | changes)
