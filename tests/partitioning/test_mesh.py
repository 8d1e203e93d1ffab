# SPDX-License-Identifier: Apache-2.0
"""Meshes over eight simulated devices."""

import jax
import pytest
from jax.sharding import AxisType

from switchx.partitioning.mesh import MeshSpec, batch_parts
from tests.data.refusals import refused


@pytest.mark.parametrize(
    ("spec", "sizes"),
    [
        (MeshSpec(), {"data": 8, "expert": 1}),
        (MeshSpec(expert=4), {"data": 2, "expert": 4}),
        (MeshSpec(data=1, expert=8), {"data": 1, "expert": 8}),
    ],
)
def test_data_takes_the_devices_that_experts_leave(spec, sizes):
    mesh = spec.build()
    assert dict(mesh.shape) == sizes
    assert batch_parts(mesh) == 8
    assert sorted(device.id for device in mesh.devices.flat) == list(range(8))


def test_axes_are_automatic():
    """Explicit ones, `jax.make_mesh`'s default, would forbid what constraints leave open."""
    assert MeshSpec(expert=2).build().axis_types == (AxisType.Auto, AxisType.Auto)


def test_experts_are_on_neighbours_and_data_across():
    ids = [[device.id for device in row] for row in MeshSpec(expert=4).build().devices]
    assert ids == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_some_of_the_devices():
    mesh = MeshSpec(data=1).build(jax.devices()[3:4])
    assert mesh.size == 1 and mesh.devices.item() == jax.devices()[3]
    assert batch_parts(mesh) == 1


@pytest.mark.parametrize(
    ("spec", "text", "needed"),
    [
        (MeshSpec(data=2, expert=2), "data=2 x expert=2", 4),
        (MeshSpec(data=4, expert=4), "data=4 x expert=4", 16),
        (MeshSpec(expert=16), "data=1 x expert=16", 16),
        (MeshSpec(expert=3), "data=2 x expert=3", 6),
    ],
)
def test_a_mesh_uses_exactly_the_devices_there_are(spec, text, needed):
    with refused(
        f"mesh {text} needs {needed} devices, but there are 8 (cpu); change the mesh, or "
        "simulate devices on CPU with "
        f"XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
    ):
        spec.build()


@pytest.mark.parametrize("name", ["data", "expert"])
def test_an_axis_has_a_device(name):
    with refused(f"mesh axis {name!r} has size 0; use at least 1"):
        MeshSpec(**{name: 0})
