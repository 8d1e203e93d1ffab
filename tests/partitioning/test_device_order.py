# SPDX-License-Identifier: Apache-2.0
"""Meshes over machines that are not here: who shares a machine, and who a rail."""

import dataclasses

import numpy as np
import pytest

from switchx.partitioning.mesh import MeshSpec, arranged, machine_of
from tests.data.refusals import refused


@dataclasses.dataclass(frozen=True)
class Device:
    """What the order is made of."""

    id: int
    process_index: int
    slice_index: int | None = None
    platform: str = "gpu"


def cluster(machines: int, local: int, processes: int = 1) -> list[Device]:
    """GPUs: machine 1 has the ids from `local` on; each machine runs some processes."""
    per_process = local // processes
    return [Device(i, i // per_process, i // local) for i in range(machines * local)]


def sizes(data=1, fsdp=1, node=1, expert=1, model=1) -> dict[str, int]:
    return dict(data=data, fsdp=fsdp, node=node, expert=expert, model=model)


def layout(devices, **axes):
    """Machine and local rank of each device of the mesh, by data, fsdp, node, expert, model."""
    local = len(devices) // len({machine_of(device) for device in devices})
    array = arranged(devices, sizes(**axes))
    ids = np.vectorize(lambda device: device.id)(array)
    assert sorted(ids.flat) == sorted(device.id for device in devices)
    return ids // local, ids % local


@pytest.mark.parametrize("processes", [1, 2, 8])
@pytest.mark.parametrize(
    "axes",
    [
        dict(node=4, expert=8),
        dict(node=4, expert=4, model=2),
        dict(node=4, expert=2, data=4),
        dict(node=4, expert=4, fsdp=2),
        dict(node=2, expert=4, data=2, fsdp=2),
        dict(node=2, expert=2, data=8),
        dict(node=2, expert=2, model=2, data=4),
    ],
)
def test_inner_axes_stay_in_a_machine_and_node_on_a_rail(processes, axes):
    machine, rank = layout(cluster(4, 8, processes), **axes)
    # Along expert and model the machine is one; so it is a hierarchical all-to-all's inside.
    assert (machine == machine[:, :, :, :1, :1]).all()
    # Along node the local rank is one, and every machine another.
    assert (rank == rank[:, :, :1]).all()
    for column in np.moveaxis(machine, 2, -1).reshape(-1, axes["node"]):
        assert len(set(column)) == axes["node"]


def test_the_order_that_ids_come_in_is_no_rail():
    """What is tested above is not so by itself: data before node would take whole machines."""
    ids = np.arange(32).reshape(4, 1, 4, 2, 1)
    assert not (ids % 8 == (ids % 8)[:, :, :1]).all()


def test_without_node_machine_follows_machine():
    machine, rank = layout(cluster(2, 4), data=2, expert=4)
    assert machine[:, 0, 0, :, 0].tolist() == [[0] * 4, [1] * 4]
    assert rank[:, 0, 0, :, 0].tolist() == [[0, 1, 2, 3]] * 2
    # A flat all-to-all over both machines is slow, not wrong.
    machine, _ = layout(cluster(2, 4), expert=8)
    assert machine.flatten().tolist() == [0] * 4 + [1] * 4


def test_devices_may_come_in_any_order_of_machines():
    devices = cluster(2, 4)
    mixed = devices[4:] + devices[:4]
    for axes in (dict(node=2, expert=4), dict(data=2, expert=4)):
        got = arranged(mixed, sizes(**axes))
        assert (got == arranged(devices, sizes(**axes))).all()


def test_one_machine_is_simulated_nodes_of_neighbours():
    machine, rank = layout(cluster(1, 8), node=2, expert=4)
    assert rank[0, 0, :, :, 0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert not machine.any()


def test_chips_of_a_slice_stay_as_they_come_and_slices_are_nodes():
    # A pod's ids go along its torus, not host after host: chips 0, 1, 4, 5 are on host 0.
    def chips(slice_index, platform="tpu"):
        return [
            Device(16 * (slice_index or 0) + i, (i // 2) % 2 + 2 * (i // 8), slice_index,
                   platform)
            for i in range(16)
        ]  # fmt: skip

    for index in (0, None):
        array = arranged(chips(index), sizes(data=4, expert=4))
        assert [device.id for device in array.flat] == list(range(16))
    array = arranged(chips(0) + chips(1), sizes(node=2, expert=16))
    assert [device.slice_index for device in array.flat] == [0] * 16 + [1] * 16


def test_processes_of_cpus_are_machines():
    devices = [Device(i, i // 2, platform="cpu") for i in range(4)]
    got = arranged(devices, sizes(node=2, data=2))
    assert [device.id for device in got.flat] == [0, 2, 1, 3]


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (
            dict(node=3, data=4),
            "mesh axis 'node' of size 3 does not divide the 4 machines; use node=2 or 4",
        ),
        (
            dict(node=2, expert=6),
            "with an axis 'node', expert=6 has to fit a machine's 4 devices; use a product of "
            "1 or 2 or 4, and node for the machines",
        ),
        (
            dict(node=2, expert=4, model=2),
            "with an axis 'node', expert=4 x model=2 has to fit a machine's 4 devices; use a "
            "product of 1 or 2 or 4, and node for the machines",
        ),
    ],
)
def test_axes_that_do_not_fit_machines(axes, message):
    with refused(message):
        arranged(cluster(4, 4), sizes(**axes))


def test_unequal_machines_have_no_rails():
    devices = cluster(2, 4)[:6]
    with refused(
        "mesh axis 'node' of size 2 needs machines with equally many devices; these have 4, 2; "
        "use node=1, or equal machines"
    ):
        arranged(devices, sizes(node=2, expert=3))
    assert arranged(devices, sizes(data=6)).size == 6


def test_a_mesh_is_built_in_this_order():
    devices = [Device(i, i // 4, platform="cpu") for i in range(8)]
    mesh = MeshSpec(data=2, node=2, expert=2).build(devices)
    ids = [[device.id for device in rows.flat] for rows in mesh.devices.reshape(2, 2, 2)]
    assert ids == [[0, 1, 4, 5], [2, 3, 6, 7]]
