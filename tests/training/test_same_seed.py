# SPDX-License-Identifier: Apache-2.0
"""The same seed is the same model, whatever is scanned, sharded, staged or stored."""

import math

import jax
import numpy as np
import pytest

from switchx import tree
from switchx.checkpoint.run_folder import RunFolder
from switchx.gin_config.building import job_from_gin
from switchx.models.unroll import unrolled
from switchx.storage.snapshot import Snapshot
from switchx.training.programs import program_of
from tests.cases import slow
from tests.gin_files import names

BRIEF = (
    "VOCAB_SIZE=512", "NUM_EXPERTS=8", "BATCH_SIZE=16", "ModelConfig.d_model=16",
    "ModelConfig.d_ff=24", "ModelConfig.num_heads=4", "ModelConfig.d_head=8",
    "ModelConfig.num_decoder_layers=4", "SwitchConfig.group_size=64",
)  # fmt: skip
# In the default suite: experts split in two ways, stages, a copy on the host.
QUICK = {"meshes/pipeline_moe_stages.gin", "storage/host.gin"}


def first_params(folder, *files: str) -> dict[str, np.ndarray]:
    """Initial parameters by path of a small GPT, its blocks unrolled, on eight devices or as
    many as its mesh has."""
    job = job_from_gin(["runs/pretrain_gpt_tiny.gin", *files], BRIEF)
    num_devices = math.prod(job.mesh.sizes(8).values())
    program = program_of(job, RunFolder(folder), jax.devices()[:num_devices])
    with program.scope():
        leaves = tree.named_leaves(jax.device_get(program.init_state().params))
        if job.storage.experts == "disk":
            program.experts.save(folder / "saved")
            leaves |= records(folder / "saved", job.model.switch.num_experts)
    return tree.named_leaves(unrolled(job.model, tree.nested(leaves))[1])


def records(folder, num_experts: int) -> dict[str, np.ndarray]:
    """The experts' parameters by path, stacked over the periods."""
    snapshot, found = Snapshot(folder), {}
    for key in range(snapshot.layout.num_keys):
        for label, array in snapshot.read(key).arrays.items():
            if label.startswith("params/"):
                found.setdefault(label.removeprefix("params/"), []).append(np.array(array))
    return {
        name: np.stack(x).reshape(-1, num_experts, *x[0].shape) for name, x in found.items()
    }


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory):
    return first_params(tmp_path_factory.mktemp("one"), "meshes/one_device.gin")


@pytest.mark.parametrize(
    "file", [name if name in QUICK else slow(name) for name in names("meshes", "storage")]
)
def test_on_every_mesh_and_in_every_storage(file, on_one_device, tmp_path):
    found = first_params(tmp_path, file)
    assert found.keys() == on_one_device.keys()
    for name, leaf in on_one_device.items():
        np.testing.assert_array_equal(found[name], leaf, err_msg=name)
