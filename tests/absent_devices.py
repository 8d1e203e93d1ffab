# SPDX-License-Identifier: Apache-2.0
"""Accelerators that are not there, to trace programs for."""

from jax.sharding import AbstractDevice, AbstractMesh, AxisType


def mesh_of(kind: str, platform: str, axes: dict[str, int] | None = None) -> AbstractMesh:
    """A mesh for `jax.sharding.use_abstract_mesh`, of one device where no axes are named."""
    axes = axes or {}
    device = AbstractDevice(
        device_kind=kind, num_cores=1 if platform == "tpu" else None, platform=platform
    )
    return AbstractMesh(
        tuple(axes.values()),
        tuple(axes),
        axis_types=(AxisType.Auto,) * len(axes),
        abstract_device=device,
    )
