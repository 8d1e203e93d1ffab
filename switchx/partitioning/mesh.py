# SPDX-License-Identifier: Apache-2.0
"""The device mesh: how many devices along each parallelism axis."""

import dataclasses

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from switchx.partitioning.rules import Rules


@dataclasses.dataclass(frozen=True)
class MeshSpec:
    """Sizes of the mesh axes, and the rules by which arrays follow them.

    Attributes:
        data: replicas of everything, each with its own part of the batch.
        expert: parts that the experts are split over; they split the batch too.
    """

    data: int = 1
    expert: int = 1
    rules: Rules = Rules()

    def __post_init__(self):
        for name, size in self.axis_sizes.items():
            if size < 1:
                raise ValueError(f"mesh axis {name!r} has size {size}; use at least 1")

    @property
    def axis_sizes(self) -> dict[str, int]:
        return {"data": self.data, "expert": self.expert}

    @property
    def num_devices(self) -> int:
        return self.data * self.expert

    def build(self, devices=None) -> Mesh:
        """The mesh over `devices`, or over all there are.

        Raises:
            ValueError: the mesh does not use exactly the devices there are.
        """
        devices = jax.devices() if devices is None else devices
        if self.num_devices != len(devices):
            sizes = " x ".join(f"{name}={size}" for name, size in self.axis_sizes.items())
            raise ValueError(
                f"mesh {sizes} needs {self.num_devices} devices, but there are {len(devices)} "
                f"({devices[0].platform}); change the mesh, or simulate devices on CPU with "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={self.num_devices}"
            )
        shape = tuple(self.axis_sizes.values())
        axis_types = (AxisType.Auto,) * len(shape)
        return Mesh(np.array(devices).reshape(shape), tuple(self.axis_sizes), axis_types=axis_types)
