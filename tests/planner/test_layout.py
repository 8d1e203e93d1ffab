# SPDX-License-Identifier: Apache-2.0
"""Workloads and layouts: arrays, lengths, sizes, names, and which devices communicate."""

import jax
import numpy as np

from switchx.partitioning.mesh import AXES, MeshSpec
from switchx.partitioning.rules import SLICED_RULES
from switchx.planner.layout import Layout, StateArray
from tests.data.refusals import refused
from tests.planner.workloads import make_workload


def test_arrays_and_a_step():
    expert = StateArray(
        "decoder/blocks/ffn/experts/w_in_NEDF", "NEDF", (2, 8, 4, 4), 4, "params"
    )
    router = StateArray("decoder/blocks/ffn/w_router_NDE", "NDE", (2, 4, 8), 4, "params")
    table = StateArray("embedding/embedding_VD", "VD", (96, 64), 4, "params")
    assert (expert.table, router.table) == ("expert_params", "params")
    assert expert.is_in_blocks and not table.is_in_blocks
    workload = make_workload()
    assert workload.tokens == 16 * 16
    assert (workload.length("encoder"), workload.length("decoder")) == (0, 16)
    assert workload.num_layers("decoder") == 4
    assert (workload.activation_bytes, workload.param_bytes) == (4, 4)


def test_groups_are_those_of_a_mesh():
    spec = MeshSpec(data=2, expert=2, model=2)
    ids = np.vectorize(lambda device: device.id)(spec.build(jax.devices()[:8]).devices)
    ids = ids.reshape([dict(data=2, expert=2, model=2).get(axis, 1) for axis in AXES])
    layout = Layout(data=2, expert=2, model=2)
    for axes in (("data",), ("expert",), ("model",), ("data", "expert"), ("data", "model")):
        index = tuple(slice(None) if axis in axes else 0 for axis in AXES)
        assert layout.group(axes) == tuple(sorted(ids[index].ravel().tolist()))


def test_sizes_and_names():
    layout = Layout(pipe=4, data=2, model=8, dispatcher="sliced", num_microbatches=16)
    assert layout.size == 64
    assert layout.stage.size == 16
    assert layout.name == "pipe=4 data=2 model=8 sliced microbatches=16"
    assert layout.rules is SLICED_RULES
    assert Layout().name == "data=1"
    with refused("expert=0; use at least 1"):
        Layout(expert=0)
