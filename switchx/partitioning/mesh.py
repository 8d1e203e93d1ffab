# SPDX-License-Identifier: Apache-2.0
"""The device mesh: how many devices along each parallelism axis."""

import dataclasses
import math

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from switchx.partitioning.rules import Rules


@dataclasses.dataclass(frozen=True)
class MeshSpec:
    """Sizes of the mesh axes, and the rules by which arrays follow them.

    Attributes:
        data: replicas of everything, each with its own part of the batch; None takes all
            the devices that the other axes leave.
        expert: parts that the experts are split over; they split the batch too.
    """

    data: int | None = None
    expert: int = 1
    rules: Rules = Rules()

    def __post_init__(self):
        for name in ("data", "expert"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"mesh axis {name!r} has size {size}; use at least 1")

    def build(self, devices=None) -> Mesh:
        """The mesh over `devices`, or over all there are.

        Raises:
            ValueError: the mesh does not use exactly the devices there are.
        """
        devices = jax.devices() if devices is None else devices
        data = max(len(devices) // self.expert, 1) if self.data is None else self.data
        sizes = {"data": data, "expert": self.expert}
        needed = math.prod(sizes.values())
        if needed != len(devices):
            text = " x ".join(f"{name}={size}" for name, size in sizes.items())
            raise ValueError(
                f"mesh {text} needs {needed} devices, but there are {len(devices)} "
                f"({devices[0].platform}); change the mesh, or simulate devices on CPU with "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
            )
        axis_types = (AxisType.Auto,) * len(sizes)
        return Mesh(
            np.array(devices).reshape(tuple(sizes.values())),
            tuple(sizes),
            axis_types=axis_types,
        )


def batch_parts(mesh: Mesh) -> int:
    """Over how many devices the rows of a batch are split."""
    return mesh.shape["data"] * mesh.shape["expert"]
