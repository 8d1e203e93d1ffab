# SPDX-License-Identifier: Apache-2.0
"""Meshes over eight simulated devices."""

import jax
import pytest
from jax.sharding import AxisType

from switchx.partitioning.mesh import (
    AXES,
    MeshSpec,
    batch_axes,
    batch_parts,
)
from switchx.partitioning.rules import Rules
from tests.data.refusals import refused


@pytest.mark.parametrize(
    ("spec", "sizes", "parts"),
    [
        (MeshSpec(), {"data": 8}, 8),
        (MeshSpec(expert=4), {"data": 2, "expert": 4}, 8),
        (MeshSpec(data=1, expert=8), {"expert": 8}, 8),
        (MeshSpec(fsdp=2, model=2), {"data": 2, "fsdp": 2, "model": 2}, 4),
        (MeshSpec(node=2, expert=2, model=2), {"node": 2, "expert": 2, "model": 2}, 4),
        (MeshSpec(data=1, model=8), {"model": 8}, 1),
    ],
)
def test_data_takes_the_devices_that_other_axes_leave(spec, sizes, parts):
    mesh = spec.build()
    assert tuple(mesh.shape) == AXES
    assert {axis: size for axis, size in mesh.shape.items() if size > 1} == sizes
    assert batch_parts(mesh, Rules()) == parts
    assert batch_axes(mesh, Rules()) == tuple(axis for axis in sizes if axis != "model")
    assert sorted(device.id for device in mesh.devices.flat) == list(range(8))


def test_axes_are_automatic():
    """Explicit ones, `jax.make_mesh`'s default, would forbid what constraints leave open."""
    assert MeshSpec(expert=2).build().axis_types == (AxisType.Auto,) * len(AXES)


def test_inner_axes_are_on_neighbours_and_data_across():
    def ids(spec, *shape):
        return [device.id for device in spec.build().devices.reshape(*shape)[0]]

    assert ids(MeshSpec(expert=4), 2, 4) == [0, 1, 2, 3]
    # A node is a block of devices that stand next to each other.
    assert ids(MeshSpec(node=2, expert=4), 2, 4) == [0, 1, 2, 3]
    assert ids(MeshSpec(expert=4, model=2), 4, 2) == [0, 1]


def test_some_of_the_devices():
    mesh = MeshSpec(data=1).build(jax.devices()[3:4])
    assert mesh.size == 1 and mesh.devices.item() == jax.devices()[3]
    assert batch_parts(mesh, Rules()) == 1


@pytest.mark.parametrize(
    ("spec", "text", "needed"),
    [
        (MeshSpec(data=2, expert=2), "data=2 x expert=2", 4),
        (MeshSpec(data=4, expert=4), "data=4 x expert=4", 16),
        (MeshSpec(expert=16), "data=1 x expert=16", 16),
        (MeshSpec(expert=3), "data=2 x expert=3", 6),
        (MeshSpec(fsdp=3, model=2), "data=1 x fsdp=3 x model=2", 6),
        (MeshSpec(data=1, node=2, expert=2), "data=1 x node=2 x expert=2", 4),
    ],
)
def test_a_mesh_uses_exactly_the_devices_there_are(spec, text, needed):
    with refused(
        f"mesh {text} needs {needed} devices, but there are 8 (cpu); change the mesh, or "
        "simulate devices on CPU with "
        f"XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
    ):
        spec.build()


@pytest.mark.parametrize("name", AXES)
def test_an_axis_has_a_device(name):
    with refused(f"mesh axis {name!r} has size 0; use at least 1"):
        MeshSpec(**{name: 0})


def test_a_mesh_of_devices_that_are_not_here():
    mesh = MeshSpec(expert=16, model=8).abstract(None)
    assert tuple(mesh.shape) == AXES
    assert {axis: size for axis, size in mesh.shape.items() if size > 1} == {
        "expert": 16,
        "model": 8,
    }
