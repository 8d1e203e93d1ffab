# SPDX-License-Identifier: Apache-2.0
"""The device mesh: how many devices along each axis of parallelism, and in which order.

Fedus et al. 2021 (Switch Transformers, arXiv:2101.03961), section 5, Figure 9; `node` as in
Shen et al. 2022 (SE-MoE, arXiv:2205.10034), section 4.2; `pipe` as in Chen et al. 2023
(Pipeline MoE, arXiv:2304.11414), section 3.3. Dims: D model
"""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from switchx.fields import require
from switchx.partitioning.rules import TABLES, MeshAxes, Rules

# Outermost first: devices next to each other share the last axes.
AXES = ("pipe", "data", "fsdp", "node", "expert", "model")
# The axis of stages.
PIPE = "pipe"
# Axes along which a hierarchical all-to-all stays within a machine.
WITHIN = ("expert", "model")
# The host's memory, as JAX names its kind.
HOST = "pinned_host"


@dataclasses.dataclass(frozen=True)
class MeshSpec:
    """Sizes of the mesh axes, and the rules by which arrays follow them.

    The rules say what an axis holds; these are the defaults.

    Attributes:
        data: replicas of everything, each with its own part of the batch; None takes all
            the devices that the other axes leave.
        fsdp: parts of the batch that share the parameters: each keeps a slice of D, which
            is gathered where it is used.
        node: the outer part of the axis that experts are split over: machines, if the
            all-to-all is to cross them once (`hierarchical`).
        expert: parts that the experts are split over; they split the batch too.
        model: parts of heads, F and vocabulary; they share the batch.
        pipe: stages, each with its own part of every stack's blocks; microbatches go from
            one to the next (`pipeline/schedule.py`). They share the batch.
        rules: the axes that each dimension of an array is split over.
    """

    data: int | None = None
    fsdp: int = 1
    node: int = 1
    expert: int = 1
    model: int = 1
    pipe: int = 1
    rules: Rules = Rules()

    def __post_init__(self):
        for name, size in self._sizes.items():
            require(
                size is None or size >= 1, f"mesh axis {name!r} has size {size}; use at least 1"
            )
        for table in TABLES:
            for letter, axes in getattr(self.rules, table):
                require(
                    set(axes) <= set(AXES),
                    f"Rules.{table} splits {letter} over {axes!r}; use a tuple of mesh axes, "
                    f"out of {', '.join(AXES)}",
                )

    @property
    def _sizes(self) -> dict[str, int | None]:
        return {name: getattr(self, name) for name in AXES}

    def num_devices(self, available: int) -> int:
        """Number of available devices that the mesh uses: `data` takes what is left."""
        others = math.prod(size for size in self._sizes.values() if size is not None)
        return others * (max(available // others, 1) if self.data is None else 1)

    def sizes(self, available: int) -> dict[str, int]:
        """Number of available devices along each axis: `data` takes what is left."""
        sizes = self._sizes
        if self.data is None:
            others = math.prod(size for size in sizes.values() if size is not None)
            sizes["data"] = self.num_devices(available) // others
        return sizes

    def __str__(self) -> str:
        used = {name: size for name, size in self._sizes.items() if size is None or size > 1}
        text = " x ".join(f"{name}={size or 'the rest'}" for name, size in used.items())
        return text or "of one device"

    def build(self, devices=None) -> Mesh:
        """Builds the mesh over `devices`, or over all there are, in the order of `arranged`.

        Raises:
            ValueError: the mesh does not use exactly the devices there are, or its axis
                `node` does not fit the machines that they are in.
        """
        devices = jax.devices() if devices is None else devices
        needed, sizes = self.num_devices(len(devices)), self.sizes(len(devices))
        if needed != len(devices):
            text = " x ".join(
                f"{name}={size}" for name, size in sizes.items() if name == "data" or size > 1
            )
            raise ValueError(
                f"mesh {text} needs {needed} devices, but there are {len(devices)} "
                f"({devices[0].platform}); change the mesh (of a run, by "
                "--gin_file=configs/meshes/data.gin after its own files), or simulate devices "
                f"on CPU with XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
            )
        axis_types = (AxisType.Auto,) * len(sizes)
        return Mesh(arranged(devices, sizes), tuple(sizes), axis_types=axis_types)

    def abstract(self, device) -> AbstractMesh:
        """Builds an abstract mesh, without devices; `data` is 1 if it is None.

        Args:
            device: the `AbstractDevice` that stands for each.
        """
        sizes = tuple(size or 1 for size in self._sizes.values())
        axis_types = (AxisType.Auto,) * len(AXES)
        return AbstractMesh(sizes, AXES, axis_types, abstract_device=device)


def named_axes(sizes: Mapping[str, int]) -> str:
    """The axes with more than one device, such as `data=2 expert=4`."""
    return " ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)


def platform_of(mesh: Mesh | AbstractMesh) -> str:
    """`cpu`, `gpu` or `tpu`: of the devices, or of the one that an abstract mesh describes."""
    if isinstance(mesh, Mesh):
        return mesh.devices.flat[0].platform
    if mesh.abstract_device is None:
        return jax.default_backend()
    # JAX before 0.12 does not give the platform of an abstract device. GPUs have many names.
    kind = device_kind_of(mesh)
    return "tpu" if "TPU" in kind else "cpu" if kind == "cpu" else "gpu"


def device_kind_of(mesh: Mesh | AbstractMesh) -> str:
    """JAX's name of the kind of devices, or of the one that an abstract mesh describes."""
    if isinstance(mesh, Mesh):
        return mesh.devices.flat[0].device_kind
    return mesh.abstract_device.device_kind


def cpu_device() -> jax.Device:
    """This process's first device of JAX's CPU back end.

    Raises:
        ValueError: `JAX_PLATFORMS` leaves that back end out.
    """
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        platforms = os.environ.get("JAX_PLATFORMS")
        raise ValueError(
            f"JAX has no CPU back end beside the accelerator ({error}), and arrays on the host "
            f"need it; JAX_PLATFORMS is {platforms!r}: use '{platforms},cpu', or unset it"
        ) from error


def batch_axes(mesh, rules: Rules) -> MeshAxes:
    """The axes that the rows of a batch are split over."""
    return rules.axes("B", mesh, table="activations")


def batch_parts(mesh, rules: Rules) -> int:
    """The number of devices that the rows of a batch are split over."""
    return math.prod(mesh.shape[axis] for axis in batch_axes(mesh, rules))


def arranged(devices: Sequence, sizes: Mapping[str, int]) -> np.ndarray:
    """Orders the devices as the array of a mesh: inner axes in a machine, `node` along a rail.

    With TPUs a machine is a slice, whose chips are wired as a torus: axes follow its sides, and
    slices are along the outermost axes, or along `node`. The next paragraph is about other
    machines.

    In clusters whose machines have one network card per GPU, the cards of equal local rank are
    connected by one switch, a rail. The outer part of a hierarchical all-to-all exchanges
    between equal local ranks only, so it stays on its rail (SE-MoE, section 4.2). Machines with
    equally many devices are the rows of a table, local ranks its columns. An axis `node` runs
    down a column, and the axes after it along a row; what is left of a row and of the columns
    goes to the axes before it. Without `node` the mesh takes machine after machine.

    Args:
        devices: devices, as many as the mesh has. Devices of equal machines keep their order,
            and so do TPUs if those of a slice do not fill a box.
        sizes: sizes of the axes, outermost first; `node` directly before the axes of `WITHIN`.

    Raises:
        ValueError: `node` does not divide the machines, or the axes after it do not fit one.
    """
    machines = _machines(devices)
    shape = tuple(sizes.values())
    nodes = sizes.get("node", 1)
    array = np.array([device for machine in machines for device in machine], object)
    are_slices = all(len(each) == len(machines[0]) and is_box(each) for each in machines)
    if nodes == 1 or len(machines) == 1:
        return _on_torus(machines, sizes) if are_slices else array.reshape(shape)
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
    if are_slices:
        return _on_torus(machines, sizes, nodes)
    table = array.reshape(len(machines) // nodes, nodes, local // inner, inner)
    return table.swapaxes(1, 2).reshape(shape)


def is_box(devices: Sequence) -> bool:
    """Whether devices are TPUs whose chips are all those of a box, a torus or a part of one."""
    if devices[0].platform != "tpu" or getattr(devices[0], "coords", None) is None:
        return False
    chips = np.unique([device.coords for device in devices], axis=0)
    return len(chips) == int(np.prod(np.ptp(chips, axis=0) + 1))


def _on_torus(slices: list[list], sizes: Mapping[str, int], nodes: int = 1) -> np.ndarray:
    """Axes along the sides of equal slices, as JAX lays them; slices along the outermost axes.

    An axis takes whole sides of a slice if its size is their product, the innermost axis
    first, and parts of sides otherwise (`planner/torus.py` counts the links that it gets).

    Args:
        nodes: slices along `node`.
    """
    across = dict.fromkeys(sizes, 1) | {"node": nodes}
    left = len(slices) // nodes
    for axis, size in sizes.items():
        if axis != "node":
            across[axis] = math.gcd(left, size)
            left //= across[axis]
    within = [size // across[axis] for axis, size in sizes.items()]
    parts = [
        mesh_utils.create_device_mesh(within, devices, allow_split_physical_axes=True)
        for devices in slices
    ]
    array = np.stack(parts).reshape(*across.values(), *within)
    order = [axis for n in range(len(sizes)) for axis in (n, n + len(sizes))]
    return array.transpose(order).reshape(tuple(sizes.values()))


def machine_of(device) -> int:
    """The number of the machine that a device communicates from.

    With GPUs it is the slice, which XLA makes of the machine (or of the NVLink domain) however
    many processes share it; with TPUs the slice, within which all chips are wired to their
    neighbours; with CPUs the process.
    """
    if device.platform == "cpu":
        return device.process_index
    for name in ("partition_index", "slice_index"):  # the new name and the old one
        if (index := getattr(device, name, None)) is not None:
            return index
    return 0 if device.platform == "tpu" else device.process_index


def _machines(devices: Sequence) -> list[list]:
    """The devices of each machine: of TPUs in their order, of others process by process."""
    machines: dict[int, list] = {}
    for device in devices:
        machines.setdefault(machine_of(device), []).append(device)
    if devices[0].platform != "tpu":
        for machine in machines.values():
            machine.sort(key=lambda device: device.process_index)
    return [machines[number] for number in sorted(machines)]
