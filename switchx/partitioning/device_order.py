# SPDX-License-Identifier: Apache-2.0
"""The order of devices in a mesh: inner axes inside a machine, `node` across machines by rail.

Shen et al. 2022 (SE-MoE, arXiv:2205.10034), section 4.2: in clusters whose machines have one
network card a GPU, cards of equal local rank hang on one switch, a rail. The outer part of a
hierarchical all-to-all should stay on its rail: it exchanges equal local ranks only.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

# What a hierarchical all-to-all keeps within a machine.
WITHIN = ("expert", "model")


def arranged(devices: Sequence, sizes: Mapping[str, int]) -> np.ndarray:
    """The devices as the array of a mesh, one axis each of `sizes`, outermost first.

    Machines with equally many devices are the rows of a table, local ranks its columns.
    Where there is an axis `node`, it runs down a column, and the axes after it along a row;
    what is left of a row and of the columns goes to the axes before it. Otherwise the mesh
    takes machine after machine.

    Args:
        devices: as many as the mesh has; of equal machines they keep their order.
        sizes: of the axes; `node` directly before those of `WITHIN`.

    Raises:
        ValueError: `node` does not divide the machines, or the axes after it do not fit one.
    """
    machines = _machines(devices)
    shape = tuple(sizes.values())
    nodes = sizes.get("node", 1)
    ordered = [device for machine in machines for device in machine]
    array = np.empty(len(ordered), object)
    array[:] = ordered
    if nodes == 1 or len(machines) == 1:
        return array.reshape(shape)
    inner = math.prod(sizes[axis] for axis in WITHIN)
    local = len(machines[0])
    if any(len(machine) != local for machine in machines):
        counts = ", ".join(str(len(machine)) for machine in machines)
        raise ValueError(
            f"mesh axis 'node' of size {nodes} needs machines with equally many devices; "
            f"these have {counts}; use node=1, or equal machines"
        )
    if len(machines) % nodes:
        choices = [n for n in range(2, len(machines) + 1) if len(machines) % n == 0]
        raise ValueError(
            f"mesh axis 'node' of size {nodes} does not divide the {len(machines)} machines; "
            f"use node={' or '.join(map(str, choices))}"
        )
    if local % inner:
        names = " x ".join(f"{axis}={sizes[axis]}" for axis in WITHIN if sizes[axis] > 1)
        choices = [n for n in range(1, local + 1) if local % n == 0]
        raise ValueError(
            f"with an axis 'node', {names} has to fit a machine's {local} devices; use a "
            f"product of {' or '.join(map(str, choices))}, and node for the machines"
        )
    table = array.reshape(len(machines) // nodes, nodes, local // inner, inner)
    return table.swapaxes(1, 2).reshape(shape)


def machine_of(device) -> int:
    """Which machine a device is in, as far as communication is concerned.

    Of GPUs the slice, which XLA makes of the machine (or of the NVLink domain) however many
    processes share it; of TPUs the slice, within which all chips are wired to their
    neighbours; of CPUs the process.
    """
    if device.platform == "cpu":
        return device.process_index
    for name in ("partition_index", "slice_index"):  # the new name and the old one
        if (index := getattr(device, name, None)) is not None:
            return index
    return 0 if device.platform == "tpu" else device.process_index


def _machines(devices: Sequence) -> list[list]:
    """The devices of each machine, in their order, or by process where it has several."""
    machines: dict[int, list] = {}
    for device in devices:
        machines.setdefault(machine_of(device), []).append(device)
    return [
        sorted(machines[machine], key=lambda device: device.process_index)
        if devices[0].platform != "tpu"
        else machines[machine]
        for machine in sorted(machines)
    ]
