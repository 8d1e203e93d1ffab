# SPDX-License-Identifier: Apache-2.0
"""The device mesh: how many devices along each parallelism axis.

Fedus et al. 2021 (arXiv:2101.03961), section 5, Figure 9; `node` as in Shen et al. 2022
(SE-MoE, arXiv:2205.10034), section 4.2; `pipe` as in Chen et al. 2023 (Pipeline MoE,
arXiv:2304.11414), section 3.3.
"""

import dataclasses
import math

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from switchx.partitioning.device_order import arranged
from switchx.partitioning.rules import MeshAxes, Rules

# Outermost first: devices next to each other share the last axes.
AXES = ("pipe", "data", "fsdp", "node", "expert", "model")


@dataclasses.dataclass(frozen=True)
class MeshSpec:
    """Sizes of the mesh axes, and the rules by which arrays follow them.

    What an axis holds is said by the rules; these are the defaults.

    Attributes:
        data: replicas of everything, each with its own part of the batch; None takes all
            the devices that the other axes leave.
        fsdp: parts of the batch that share the parameters: each keeps a slice of D, which
            is gathered where it is used.
        node: the outer part of the axis that experts are split over: machines, where the
            all-to-all is to cross them once (`hierarchical`).
        expert: parts that the experts are split over; they split the batch too.
        model: parts of heads, F and vocabulary; they share the batch.
        pipe: stages, each with its own part of every stack's blocks; microbatches go from
            one to the next (`partitioning/schedule.py`). They share the batch.
    """

    data: int | None = None
    fsdp: int = 1
    node: int = 1
    expert: int = 1
    model: int = 1
    pipe: int = 1
    rules: Rules = Rules()

    def __post_init__(self):
        for name in AXES:
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"mesh axis {name!r} has size {size}; use at least 1")

    def num_devices(self, there: int) -> int:
        """Devices that the mesh uses of those that are there: `data` takes what is left."""
        sizes = {name: getattr(self, name) for name in AXES}
        others = math.prod(size for size in sizes.values() if size is not None)
        return others * (max(there // others, 1) if self.data is None else 1)

    def __str__(self) -> str:
        sizes = {name: getattr(self, name) for name in AXES}
        used = {name: size for name, size in sizes.items() if size is None or size > 1}
        text = " x ".join(f"{name}={size or 'the rest'}" for name, size in used.items())
        return text or "of one device"

    def build(self, devices=None) -> Mesh:
        """The mesh over `devices`, or over all there are, in the order of `arranged`.

        Raises:
            ValueError: the mesh does not use exactly the devices there are, or its axis
                `node` does not fit the machines that they are in.
        """
        devices = jax.devices() if devices is None else devices
        sizes = {name: getattr(self, name) for name in AXES}
        if self.data is None:
            others = math.prod(size for size in sizes.values() if size is not None)
            sizes["data"] = max(len(devices) // others, 1)
        needed = math.prod(sizes.values())
        if needed != len(devices):
            text = " x ".join(
                f"{name}={size}" for name, size in sizes.items() if name == "data" or size > 1
            )
            raise ValueError(
                f"mesh {text} needs {needed} devices, but there are {len(devices)} "
                f"({devices[0].platform}); change the mesh, or simulate devices on CPU with "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
            )
        axis_types = (AxisType.Auto,) * len(sizes)
        return Mesh(arranged(devices, sizes), tuple(sizes), axis_types=axis_types)

    def abstract(self, device) -> AbstractMesh:
        """The mesh over devices that are not here; `data` is 1 where it is None.

        Args:
            device: the `AbstractDevice` that each is.
        """
        sizes = tuple(getattr(self, name) or 1 for name in AXES)
        axis_types = (AxisType.Auto,) * len(AXES)
        return AbstractMesh(sizes, AXES, axis_types, abstract_device=device)


def batch_axes(mesh, rules: Rules) -> MeshAxes:
    """The axes that the rows of a batch are split over."""
    return rules.axes("B", mesh, table="activations")


def batch_parts(mesh, rules: Rules) -> int:
    """Over how many devices the rows of a batch are split."""
    return math.prod(mesh.shape[axis] for axis in batch_axes(mesh, rules))
